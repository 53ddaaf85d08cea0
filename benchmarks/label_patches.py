"""CPU, memory and latency of patches of labels, by the number of labels that were patched before.

    python -m benchmarks.label_patches [--labels 150000] [--patched 0 --patched 20000 --patched 100000] [--dir DIR]

One worker of the real service. A client patches one label a request, a new one and the same one in turn, and asks one
query after each; the worker's CPU is counted around the patches alone. Releases are built once and kept in DIR.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import httpx2 as httpx
import numpy as np
import typer

from benchmarks.paired_rate import cpu_seconds
from benchmarks.service_resources import bytes_of, twin_releases
from tests.serving.process import server

_KEPT = Path(tempfile.gettempdir()) / "longtail"
_AT_ONCE = 256
_MB = 1e6


def main(
    labels: int = 150_000,
    patched: Annotated[list[int], typer.Option(help="Numbers of patched labels.")] = [0, 20_000, 100_000],  # noqa: B006
    patches: int = 100,
    dir: Annotated[Path, typer.Option(help="Where the releases are kept.")] = _KEPT,
) -> None:
    """Patch labels up to each number, then measure single patches."""
    releases = twin_releases(dir, labels=labels, dim=64, columns=2, spec="flat")
    with (
        tempfile.TemporaryDirectory() as state,
        server(releases, dir / "server.log", state=state, max_new_labels=2 * labels, poll_seconds=60) as process,
    ):
        process.wait_until_ready(300)
        pid = process.process.pid
        with httpx.Client(base_url=process.url, timeout=60) as client:
            column = next(iter(_query(client, 0)[1]))
            done = 0
            for count in sorted(patched):
                started = time.perf_counter()
                while done < count:
                    ids = range(done, min(done + _AT_ONCE, count))
                    _patch(client, column, [f"item-{row}" for row in ids], "a")
                    done = ids.stop
                minutes = (time.perf_counter() - started) / 60
                costs, waits = {"new": [], "again": []}, []
                for at in range(patches):
                    for kind, row in (("new", labels - 1 - at - count), ("again", 0)):
                        before = cpu_seconds(pid)
                        _patch(client, column, [f"item-{row}"], f"v{at}")
                        costs[kind].append(cpu_seconds(pid) - before)
                        waits.append(_query(client, at)[0])
                shown = ", ".join(f"{kind} {1e3 * np.mean(seconds):.2f} ms" for kind, seconds in costs.items())
                print(
                    f"{count:>7,} patched (in {minutes:.1f} min): CPU of a patch: {shown}; next query "
                    f"p50 {1e3 * np.median(waits):.1f}, p99 {1e3 * np.quantile(waits, 0.99):.1f} ms; "
                    f"{bytes_of(process)[0] / _MB:.0f} MB",
                    flush=True,
                )
        process.terminate()


def _patch(client: httpx.Client, column: str, ids: list[str], value: str) -> None:
    body = {"labels": [{"id": id_, "display": {column: value}} for id_ in ids]}
    client.patch("/v1/labels", json=body).raise_for_status()


def _query(client: httpx.Client, user: int) -> tuple[float, dict[str, object]]:
    """Answer one query; returns the seconds and the display columns of the first label."""
    started = time.perf_counter()
    body = {"queries": [{"features": {"user_id": f"u{user}"}, "k": 10}]}
    answer = client.post("/v1/retrieve", json=body).raise_for_status().json()
    return time.perf_counter() - started, answer["results"][0]["labels"][0]["display"]


if __name__ == "__main__":
    typer.run(main)
