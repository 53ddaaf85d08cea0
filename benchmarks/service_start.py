"""How long the service takes to start: from a release that nobody has verified, and from one that was verified before.

    python -m benchmarks.service_start [--labels 1000000] [--dim 64] [--spec ivf_flat] [--columns 2] [--dir DIR]
        [--starts 3]

Times the real process, from exec to the first 200 on /readyz, to the first answered query, and to the first page of
labels and a search among them; shows what it holds in memory, and that TensorFlow is not in it. CPU seconds tell how
much of the wait is the service's own work where other programs share the cores. The release, whose display columns are
a title and a price, is built once and kept in DIR, and read before the first start: the disk is not measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.service_memory import bytes_of, twin_releases
from longtail.bundle import sha256_of
from tests.serving.process import ServerProcess, server

_FRAMEWORKS = ("tensorflow", "keras", "jax", "torch")
_KEPT = Path(tempfile.gettempdir()) / "longtail"
_KEY = "start-key-of-sixteen"
_QUERY = {"queries": [{"features": {"user_id": "u1", "history": ["item-1", "item-2"]}, "k": 10}]}
_PAGE = {"limit": 100, "search": "label 0,000"}


def main(
    labels: int = 1_000_000,
    dim: int = 64,
    spec: str = "ivf_flat",
    columns: int = 2,
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _KEPT,
    starts: int = 3,
) -> None:
    """Build the release if it is not there, then start the service a few times of each kind."""
    releases = twin_releases(dir, labels=labels, dim=dim, columns=columns, spec=spec)
    size = sum(path.stat().st_size for path in (releases / "A").rglob("*") if path.is_file())
    for path in (releases / "A").rglob("*"):
        if path.is_file():
            sha256_of(path)
    print(f"release: {labels:,} labels, d = {dim}, {spec}, {size / 1e6:,.0f} MB of files\n")
    print("| start | ready s | answered s | CPU s | labels' page s | private MB | resident MB | frameworks |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for start in range(2 * starts):
        if start < starts:
            shutil.rmtree(releases / ".state" / "verified", ignore_errors=True)
        print(
            f"| {'every byte verified' if start < starts else 'verified before'} | {_start(releases, dir)} |",
            flush=True,
        )


def _start(releases: Path, directory: Path) -> str:
    """One start's figures, as cells of the table."""
    with server(releases, directory / "server.log", poll_seconds=0.05, drain_seconds=0, admin_keys=_KEY) as process:
        ready = process.wait_until_ready(300)
        with httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {_KEY}"}, timeout=60) as client:
            client.post("/v1/retrieve", json=_QUERY).raise_for_status()
            answered, cpu = time.perf_counter() - process.started, _cpu_seconds(process)
            began = time.perf_counter()
            client.get("/v1/labels", params=_PAGE).raise_for_status()
            page = time.perf_counter() - began
        private, resident = bytes_of(process)
        frameworks = ", ".join(_frameworks(process)) or "none"
        process.terminate()
    times = " | ".join(f"{seconds:.2f}" for seconds in (ready, answered, cpu, page))
    return f"{times} | {private / 1e6:,.0f} | {resident / 1e6:,.0f} | {frameworks}"


def _cpu_seconds(process: ServerProcess) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _frameworks(process: ServerProcess) -> list[str]:
    maps = Path(f"/proc/{process.process.pid}/maps").read_text()
    return [name for name in _FRAMEWORKS if f"/{name}/" in maps or f"lib{name}" in maps]


if __name__ == "__main__":
    typer.run(main)
