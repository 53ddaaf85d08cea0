"""What HTTP, validation and answers add to the query tower and the index.

    python -m benchmarks.service_latency [--labels 200000] [--spec auto] [--k 20] [--connections 8] [--requests 4000]

In one run: the service and a bare FastAPI echo of the same bodies, each a process of its own, asked by this
process over keep-alive connections of loopback; and the raw ONNX Runtime and FAISS work in this process, on
one thread. Ratios are what to read: all of them, and this client, share the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import faiss
import httpx
import numpy as np
import typer

from index import Releases
from serving import Encoder
from tests.serving.process import free_port, server
from tests.serving.releases import synthetic_release

_ECHO = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
class Body(BaseModel):
    queries: list[dict]
app = FastAPI()
@app.post("/echo")
async def echo(body: Body) -> Body:
    return body
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="error")
"""
_LONGEST_SECONDS = 20.0
_KEPT = Path(tempfile.gettempdir()) / "longtail"


@dataclass(frozen=True)
class Measured:
    """Durations of requests in seconds, and how long they took together."""

    durations: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.durations) / self.seconds


def main(
    labels: int = 200_000,
    dim: int = 64,
    spec: str = "auto",
    k: int = 20,
    connections: Annotated[int, typer.Option(help="Requests under way at once.")] = 8,
    requests: Annotated[int, typer.Option(help="Requests of one query per measurement; a sixteenth of 32.")] = 4000,
    search_threads: Annotated[int, typer.Option(help="The service's setting.")] = 2,
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _KEPT,
) -> None:
    """Measure one query per request, then thirty-two."""
    releases = synthetic_release(dir, labels=labels, dim=dim, spec=spec)
    print(f"{labels:,} labels, d = {dim}, {spec}, k = {k}, {connections} connections, {search_threads} search threads")
    print(f"{'':36} {'requests/s':>10} {'queries/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
    with (
        server(releases, dir / "server.log", search_threads=search_threads, drain_seconds=0) as process,
        _echo() as echo,
    ):
        process.wait_until_ready(120)
        retrieve = f"{process.url}/v1/retrieve"
        for batch, count in ((1, requests), (32, max(1, requests // 16))):
            bodies = _bodies(batch, k, labels)
            raw = _raw(releases, bodies, k, count // 4)
            echoed = asyncio.run(_load(echo, bodies, connections, count))
            served = asyncio.run(_load(retrieve, bodies, connections, count))
            alone = asyncio.run(_load(retrieve, bodies, 1, count // 4))
            _print(f"batch {batch}: ONNX + FAISS, one thread", raw, batch)
            _print(f"batch {batch}: FastAPI echo", echoed, batch)
            _print(f"batch {batch}: service", served, batch)
            _print(f"batch {batch}: service, one connection", alone, batch)
            in_sequence = 1 / (1 / raw.rate + 1 / echoed.rate)
            print(f"  service / echo {served.rate / echoed.rate:.2f}", end="")
            print(f"; service / (echo, then ONNX + FAISS) {served.rate / in_sequence:.2f}")


def _bodies(batch: int, k: int, labels: int) -> list[bytes]:
    """A hundred different bodies: known users, histories of ten, the dial anywhere."""
    rng = np.random.default_rng(0)
    return [
        json.dumps({"queries": [_query(rng, k, labels) for _ in range(batch)]}, separators=(",", ":")).encode()
        for _ in range(100)
    ]


def _query(rng: np.random.Generator, k: int, labels: int) -> dict[str, object]:
    history = [f"item-{row}" for row in rng.integers(labels, size=10)]
    features = {"user_id": f"u{rng.integers(1000)}", "history": history}
    return {"features": features, "k": k, "bias_removal": round(float(rng.uniform(0, 1)), 3)}


def _raw(releases: Path, bodies: list[bytes], k: int, count: int) -> Measured:
    """The work that no service can save: encode and search, features already parsed."""
    name = Releases(releases).current() or ""
    release = Releases(releases).open(name)
    bundle = release.bundle
    encoder = Encoder(bundle.query_tower, bundle.manifest.query_features, bundle.vocabularies, bundle.manifest.dim)
    faiss.omp_set_num_threads(1)
    batches = [[query["features"] for query in json.loads(body)["queries"]] for body in bodies]

    def once(features: list[dict[str, object]]) -> None:
        release.searcher.search(bundle.augmentation.queries(encoder.embed(encoder.read(features)), 0.5), k)

    once(batches[0])
    durations = []
    started = time.perf_counter()
    for turn in range(count):
        before = time.perf_counter()
        once(batches[turn % len(batches)])
        durations.append(time.perf_counter() - before)
    return Measured(durations, time.perf_counter() - started)


@contextmanager
def _echo() -> Iterator[str]:
    """A bare FastAPI echo in a process of its own; yields its URL."""
    url = f"http://127.0.0.1:{(port := free_port())}/echo"
    process = subprocess.Popen([sys.executable, "-c", _ECHO, str(port)])
    try:
        with httpx.Client() as client:
            for _ in range(200):
                try:
                    client.get(url)
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


async def _load(url: str, bodies: list[bytes], connections: int, count: int) -> Measured:
    """Send `count` requests, or as many as fit into 20 s, each connection one after the other."""
    parsed = httpx.URL(url)
    head = f"POST {parsed.path} HTTP/1.1\r\nhost: {parsed.host}\r\ncontent-type: application/json\r\n"
    messages = [f"{head}content-length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
    turns = iter(range(count))
    durations: list[float] = []

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(parsed.host, parsed.port)
        for turn in turns:
            before = time.perf_counter()
            if before > started + _LONGEST_SECONDS:
                break
            writer.write(messages[turn % len(messages)])
            header = await reader.readuntil(b"\r\n\r\n")
            if not header.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"expected 200, received {header[:60]!r}")
            length = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            durations.append(time.perf_counter() - before)
        writer.close()
        await writer.wait_closed()

    started = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return Measured(durations, time.perf_counter() - started)


def _print(name: str, measured: Measured, batch: int) -> None:
    p50, p99 = np.quantile(measured.durations, [0.5, 0.99]) * 1e3
    print(f"{name:36} {measured.rate:10,.0f} {measured.rate * batch:10,.0f} {p50:8.2f} {p99:8.2f}")


if __name__ == "__main__":
    typer.run(main)
