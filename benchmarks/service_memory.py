"""What a worker of the service holds in memory of its own: at start, after load, and after ever more swaps.

    python -m benchmarks.service_memory [--labels 1000000] [--swaps 10] [--requests 1000] [--columns 2] [--dir DIR]

Private is what no file backs (`longtail_worker_private_bytes`, RssAnon of /proc): the index, the embeddings and the
query tower's tables are mapped, and shared by all workers. One worker of the real service answers requests over
histories and excluded labels drawn from the whole catalogue, and loads two releases in turn, with a second between.
Beside what is measured stands the sizing rule of README.md ("In production"). Releases are built once and kept in DIR;
their display columns are, in turn, a title of 25 characters and a price.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import pyarrow as pa
import typer

from benchmarks.index_recall import synthetic_bundle
from longtail.bundle import replace_file
from longtail.index import IndexSpec, Releases, build
from tests.serving.process import ServerProcess, server

_KEPT = Path(tempfile.gettempdir()) / "longtail"
_LOADED = 2
"""Releases that a service holds after a swap, by its default settings."""
_HISTORY, _EXCLUDED = 10, 10
_STAGES = (1, 2, 5)
_MB = 1e6

PROCESS_BYTES = 120e6
"""Of the sizing rule: a worker without a release."""
LABEL_BYTES = 50
"""Of the sizing rule: a label of one release, with an id of 10 characters and without display columns."""


def main(
    labels: int = 1_000_000,
    columns: int = 2,
    swaps: int = 10,
    requests: int = 1000,
    spec: str = "ivf_flat",
    dir: Annotated[Path, typer.Option(help="Where the releases are kept.")] = _KEPT,
) -> None:
    """Build two releases if they are not there, then serve them in turn."""
    releases = twin_releases(dir, labels=labels, columns=columns, spec=spec)
    print(f"{labels:,} labels x {columns} display columns, d = 64, {spec}, one worker")
    print(f"{'when':>22}{'private MB':>12}{'resident MB':>13}")
    rng = np.random.default_rng(0)
    with server(releases, dir / "memory.log", poll_seconds=0.05, drain_seconds=0) as process:
        process.wait_until_ready(300)
        _show("start", process)
        with httpx.Client(base_url=process.url, timeout=60) as client:
            for _ in range(requests):
                client.post("/v1/retrieve", json=_request(rng, labels)).raise_for_status()
            _show(f"{requests:,} requests", process)
            for swap in range(1, swaps + 1):
                name = "AB"[swap % 2]
                replace_file(releases / "CURRENT", f"{name}\n".encode())
                _wait_until_served(client, name)
                client.post("/v1/retrieve", json=_request(rng, labels)).raise_for_status()
                if swap in _STAGES or swap % 10 == 0 or swap == swaps:
                    _show(f"{swap} swap{'s' * (swap > 1)}", process)
        process.terminate()
    held = _column_bytes(columns)
    rule = PROCESS_BYTES + _LOADED * labels * (LABEL_BYTES + held)
    print(
        f"sizing rule: {PROCESS_BYTES / _MB:.0f} MB + {_LOADED} releases x {labels:,} labels x "
        f"({LABEL_BYTES} + {held} of display columns) bytes = {rule / _MB:,.0f} MB"
    )


def twin_releases(directory: Path, *, labels: int, columns: int, spec: str) -> Path:
    """Releases A and B of the same labels; built below `directory` unless they are there, A the current one."""
    root = directory / f"memory-{spec.replace(',', '-')}-{labels}x{columns}"
    releases = Releases(root / "releases")
    if releases.current() is None:
        plain = synthetic_bundle(labels)
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
        _copy(releases, "A", "B")
        releases.publish("A")
    else:
        replace_file(root / "releases" / "CURRENT", b"A\n")
    return root / "releases"


def _copy(releases: Releases, name: str, copy: str) -> None:
    """Another release of the same content under its own name."""
    shutil.copytree(releases.root / name, releases.root / copy)
    manifest = releases.manifest(name).model_copy(update={"name": copy}).sealed()
    (releases.root / copy / "release.json").write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _request(rng: np.random.Generator, labels: int) -> dict[str, Any]:
    history, excluded = ([f"item-{row}" for row in rng.integers(labels, size=count)] for count in (_HISTORY, _EXCLUDED))
    features = {"user_id": f"u{rng.integers(1000)}", "history": history}
    return {"queries": [{"features": features, "k": 20, "exclude": excluded, "bias_removal": rng.uniform()}]}


def _wait_until_served(client: httpx.Client, name: str) -> None:
    deadline = time.monotonic() + 300
    while client.get("/v1/release").json()["name"] != name:
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected release {name} to be served within 300 s")
        time.sleep(0.05)
    time.sleep(1.0)


def _show(when: str, process: ServerProcess) -> None:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    figures = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
    private, resident = (int(figures[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    print(f"{when:>22}{private / _MB:12,.0f}{resident / _MB:13,.0f}", flush=True)


def _column_bytes(columns: int) -> int:
    """What the display columns of a label take: a title of 25 characters and where it starts, or a double."""
    return sum(25 + 4 if column % 2 == 0 else 8 for column in range(columns))


if __name__ == "__main__":
    typer.run(main)
