"""How long the service takes to start from a release of a million labels, with every checksum verified.

    python -m benchmarks.service_start [--labels 1000000] [--dim 64] [--spec flat] [--dir DIR] [--starts 3]

Times the real process, from exec to the first 200 on /readyz and to the first answered query, and shows
what it holds in memory and that TensorFlow is not in it. CPU seconds tell how much of the wait is the
service's own work where other programs share the cores. The release is built once and kept in DIR.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from tests.serving.process import ServerProcess, server
from tests.serving.releases import synthetic_release

_FRAMEWORKS = ("tensorflow", "keras", "jax", "torch")
_KEPT = Path(tempfile.gettempdir()) / "longtail"
_QUERY = {"queries": [{"features": {"user_id": "u1", "history": ["item-1", "item-2"]}, "k": 10}]}


def main(
    labels: int = 1_000_000,
    dim: int = 64,
    spec: str = "flat",
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _KEPT,
    starts: int = 3,
) -> None:
    """Build the release if it is not there, then start the service a few times."""
    releases = synthetic_release(dir, labels=labels, dim=dim, spec=spec)
    size = sum(path.stat().st_size for path in releases.rglob("*") if path.is_file())
    print(f"release: {labels:,} labels, d = {dim}, {spec}, {size / 1e6:,.0f} MB of files")
    columns = f"{'start':>5} {'ready s':>8} {'answer s':>9} {'CPU s':>6} {'RSS MB':>7} {'private MB':>11}"
    print(f"{columns}  frameworks in the process")
    for start in range(1, starts + 1):
        with server(releases, dir / "server.log", poll_seconds=0.05, drain_seconds=0) as process:
            ready = process.wait_until_ready(120)
            httpx.post(f"{process.url}/v1/retrieve", json=_QUERY).raise_for_status()
            answered = time.perf_counter() - process.started
            resident, private = _memory(process)
            frameworks = ", ".join(_frameworks(process)) or "none"
            seconds = f"{ready:8.2f} {answered:9.2f} {_cpu_seconds(process):6.2f}"
            print(f"{start:5} {seconds} {resident:7,.0f} {private:11,.0f}  {frameworks}")
            process.terminate()


def _memory(process: ServerProcess) -> tuple[float, float]:
    """Resident memory, and the part of it that no file backs, both in MB."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    figures = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
    return tuple(int(figures[name].split()[0]) / 1e3 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def _cpu_seconds(process: ServerProcess) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _frameworks(process: ServerProcess) -> list[str]:
    maps = Path(f"/proc/{process.process.pid}/maps").read_text()
    return [name for name in _FRAMEWORKS if f"/{name}/" in maps or f"lib{name}" in maps]


if __name__ == "__main__":
    typer.run(main)
