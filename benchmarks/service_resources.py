"""Start time of the service, and private memory of a worker over swaps of releases.

    python -m benchmarks.service_resources [--labels 1000000] [--dim 64] [--columns 2] [--spec ivf_flat]
        [--swaps 10] [--requests 1000] [--dir DIR]

One worker of the real service serves releases with generated labels, whose display columns are titles and prices in
turn. Private bytes are memory without file-backed pages (RssAnon of /proc). The command fails if they differ from the
sizing rule of docs/production.md by more than this page allows. Releases are built once and kept in DIR.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import typer

from benchmarks.index_recall import synthetic_bundle
from benchmarks.paired_rate import cpu_seconds
from longtail.index import IndexSpec, build, open_releases
from tests.serving.process import ServerProcess, server

_CACHE = Path(tempfile.gettempdir()) / "longtail"
_LOADED = 2  # releases that a service holds after a swap, by its default settings
_MB = 1e6
PROCESS_BYTES, LABEL_BYTES, RULE_ERROR = 92e6, 3, 0.1
"""The sizing rule: bytes of a worker without a release, bytes per label of a release, and the allowed deviation."""


def main(
    labels: int = 1_000_000,
    dim: int = 64,
    columns: int = 2,
    swaps: int = 10,
    requests: int = 1000,
    spec: str = "ivf_flat",
    dir: Annotated[Path, typer.Option(help="Where the releases are kept.")] = _CACHE,
) -> None:
    """Build two releases unless they exist, then start the service and swap between them."""
    releases = twin_releases(dir, labels=labels, dim=dim, columns=columns, spec=spec)
    print(f"{labels:,} labels x {columns} display columns, d = {dim}, {spec}, one worker")
    with server(releases, dir / "server.log", poll_seconds=0.05, drain_seconds=0) as process:
        ready = process.wait_until_ready(300)
        with httpx.Client(base_url=process.url, timeout=60) as client:
            rng = np.random.default_rng(0)
            client.post("/v1/retrieve", json=_request(rng, labels)).raise_for_status()
            answered = time.perf_counter() - process.started
            print(f"ready {ready:.2f} s, answered {answered:.2f} s, CPU {cpu_seconds(process.process.pid):.2f} s")
            for _ in range(requests):
                client.post("/v1/retrieve", json=_request(rng, labels)).raise_for_status()
            _show(f"{requests:,} requests", process)
            for swap in range(1, swaps + 1):
                name = "AB"[swap % 2]
                open_releases(releases).publish(name)
                _wait_until_served(client, name)
                client.post("/v1/retrieve", json=_request(rng, labels)).raise_for_status()
                if swap in (1, swaps):
                    _show(f"{swap} swaps", process)
        private, _ = bytes_of(process)
        process.terminate()
    rule = PROCESS_BYTES + _LOADED * labels * LABEL_BYTES
    print(f"sizing rule {rule / _MB:,.0f} MB; measured {private / rule - 1:+.1%}")
    if abs(private / rule - 1) > RULE_ERROR:
        raise typer.Exit(1)


def twin_releases(directory: Path, *, labels: int, dim: int, columns: int, spec: str) -> Path:
    """Build releases A and B of the same labels where missing; A is current."""
    root = directory / f"twins-{spec.replace(',', '-')}-{labels}x{dim}x{columns}"
    releases = open_releases(root / "releases")
    if releases.current() is not None:
        releases.publish("A")
        return root / "releases"
    plain = synthetic_bundle(labels, dim=dim)
    display = pa.table(
        {
            f"column_{column}": pa.array([f"Title of label {row:010,d}"[:25] for row in range(labels)])
            if column % 2 == 0
            else pa.array(np.random.default_rng(column).uniform(0, 100, labels).round(2))
            for column in range(columns)
        }
    )
    dataclasses.replace(
        plain,
        labels=dataclasses.replace(plain.labels, display=display),
        manifest=plain.manifest.model_copy(update={"display": display.column_names}),
    ).write(root / "bundle")
    build(root / "bundle", root / "releases", spec=IndexSpec(spec, recall_floor=0.0), name="A")
    shutil.copytree(releases.root / "A", releases.root / "B")
    manifest = releases.manifest("A").model_copy(update={"name": "B"}).sealed()
    (releases.root / "B" / "release.json").write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    releases.publish("A")
    return root / "releases"


def _request(rng: np.random.Generator, labels: int) -> dict[str, Any]:
    history, excluded = ([f"item-{row}" for row in rng.integers(labels, size=10)] for _ in range(2))
    features = {"user_id": f"u{rng.integers(1000)}", "history": history}
    return {"queries": [{"features": features, "k": 20, "exclude": excluded, "bias_removal": rng.uniform()}]}


def _wait_until_served(client: httpx.Client, name: str) -> None:
    deadline = time.monotonic() + 300
    while client.get("/v1/release").json()["name"] != name:
        if time.monotonic() > deadline:
            raise TimeoutError(f"release {name} was not served within 300 s")
        time.sleep(0.05)
    time.sleep(1.0)


def _show(when: str, process: ServerProcess) -> None:
    private, resident = bytes_of(process)
    print(f"{when:>22}: private {private / _MB:,.0f} MB, resident {resident / _MB:,.0f} MB", flush=True)


def bytes_of(process: ServerProcess) -> tuple[int, int]:
    """Return private and resident bytes of a service."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    figures = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
    private, resident = (int(figures[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return private, resident


if __name__ == "__main__":
    typer.run(main)
