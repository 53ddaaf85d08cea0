"""What a worker of the service holds in memory of its own: at start, after load, and after ever more swaps.

    python -m benchmarks.service_memory [--labels 1000000] [--dim 64] [--columns 2] [--spec ivf_flat]
        [--swaps 10] [--requests 1000] [--load] [--dir DIR]
    python -m benchmarks.service_memory --shapes        # six catalogues one after the other

Private is what no file backs (`longtail_worker_private_bytes`, RssAnon of /proc): the index, the embeddings, the label
table and the query tower's tables are mapped, and shared by all workers. One worker of the real service answers
requests over histories and excluded labels drawn from the whole catalogue, and loads two releases in turn, a second
apart; with `--load` another client asks all the while, and what it got and how long it waited is told.

Of 40 swaps and more it says how many bytes each leaves behind: the slope from the tenth on, with its 95 % interval from
the means of ten swaps each. Beside what is measured stands the sizing rule of README.md ("In production"); the command
fails where that is off by more than README.md says. Releases are built once and kept in DIR; their display columns are,
in turn, a title of 25 characters and a price.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import nullcontext
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
_FLAT_BELOW = 100_000
_MB = 1e6

PROCESS_BYTES = 92e6
"""Of the sizing rule: a worker without a release."""
LABEL_BYTES = 3
"""Of the sizing rule: a label of one release, whatever its id and its display columns hold."""
LATELY_BYTES = 40e6
"""Of the sizing rule, under steady load: labels shown and ids asked for lately, some ten thousands of each release."""
RULE_ERROR = 0.1
"""Share of the rule that README.md says it may be off by."""
_SHAPES = (
    (20_000, 64, 0),
    (20_000, 128, 2),
    (200_000, 32, 2),
    (200_000, 128, 0),
    (1_000_000, 64, 0),
    (1_000_000, 64, 2),
)
"""Labels, dimensions and display columns."""
_BLOCK, _SETTLED = 10, 10
"""Swaps whose mean is one point of the slope, and those before the first of them."""
_T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
"""97.5 % quantiles of Student's t by degrees of freedom."""


def main(
    labels: int = 1_000_000,
    dim: int = 64,
    columns: int = 2,
    swaps: int = 10,
    requests: int = 1000,
    spec: str = "",
    shapes: bool = False,
    load: bool = False,
    dir: Annotated[Path, typer.Option(help="Where the releases are kept.")] = _KEPT,
) -> None:
    """Build two releases if they are not there, then serve them in turn; `spec` is flat below 100,000 labels."""
    asked = (labels, dim, columns)
    errors = [_measure(dir, shape, swaps, requests, spec, load=load) for shape in (_SHAPES if shapes else (asked,))]
    if max(map(abs, errors)) > RULE_ERROR:
        print(f"expected the sizing rule to be off by at most {RULE_ERROR:.0%}")
        raise typer.Exit(1)


def _measure(
    directory: Path, shape: tuple[int, int, int], swaps: int, requests: int, spec: str, *, load: bool
) -> float:
    """How far the rule is off, as a share of it."""
    labels, dim, columns = shape
    kind = spec or ("flat" if labels < _FLAT_BELOW else "ivf_flat")
    releases = twin_releases(directory, labels=labels, dim=dim, columns=columns, spec=kind)
    print(f"{labels:,} labels x {columns} display columns, d = {dim}, {kind}, one worker")
    print(f"{'when':>22}{'private MB':>12}{'resident MB':>13}")
    with server(releases, directory / "memory.log", poll_seconds=0.05, drain_seconds=0) as process:
        process.wait_until_ready(300)
        with _Asking(process.url, labels) if load else nullcontext():
            held = _swap(process, releases, labels, swaps, requests)
        process.terminate()
    if swaps >= _SETTLED + 3 * _BLOCK:
        print(f"each swap from the {_SETTLED}th on leaves {_slope(held[_SETTLED:])}")
    process_bytes = PROCESS_BYTES + LATELY_BYTES * load
    rule = process_bytes + _LOADED * labels * LABEL_BYTES
    error = held[-1] / rule - 1
    print(
        f"sizing rule: {process_bytes / _MB:.0f} MB + {_LOADED} releases x {labels:,} labels x {LABEL_BYTES} bytes "
        f"= {rule / _MB:,.0f} MB; measured {error:+.1%}\n",
        flush=True,
    )
    return error


class _Asking:
    """A client that asks, one request after the other, until the block ends; then tells how long it waited."""

    def __init__(self, url: str, labels: int) -> None:
        self._url, self._labels = url, labels
        self._seconds: list[float] = []
        self._statuses: Counter[int] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        p50, p99, p999, longest = (np.quantile(self._seconds, (0.5, 0.99, 0.999, 1)) * 1e3).tolist()
        statuses = ", ".join(f"{count:,} with {status}" for status, count in sorted(self._statuses.items()))
        print(
            f"asked all the while: {statuses}; ms {p50:.1f} (p50), {p99:.1f}, {p999:.1f} (p99.9), {longest:.0f} at most"
        )

    def _ask(self) -> None:
        rng = np.random.default_rng(1)
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stopping.is_set():
                started = time.perf_counter()
                self._statuses[client.post("/v1/retrieve", json=_request(rng, self._labels)).status_code] += 1
                self._seconds.append(time.perf_counter() - started)


def _swap(process: ServerProcess, releases: Path, labels: int, swaps: int, requests: int) -> list[int]:
    """Bytes held after every swap."""
    rng, held = np.random.default_rng(0), []
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
            held.append(bytes_of(process)[0])
            if swap in _STAGES or swap % 10 == 0 or swap == swaps:
                _show(f"{swap} swap{'s' * (swap > 1)}", process)
    return held


def _slope(held: list[int]) -> str:
    """Bytes per swap with their 95 % interval, in words: least squares through the means of blocks of swaps."""
    blocks = len(held) // _BLOCK
    means = np.array(held[: blocks * _BLOCK]).reshape(blocks, _BLOCK).mean(axis=1) / 1e3
    at = np.arange(blocks) * _BLOCK - (blocks - 1) * _BLOCK / 2
    slope = at @ means / (at @ at)
    rest = means - means.mean() - slope * at
    error = _T_95[min(blocks - 2, max(_T_95))] * np.sqrt(rest @ rest / (blocks - 2) / (at @ at))
    return f"{slope:+.1f} KB, 95 % of {slope - error:+.1f} to {slope + error:+.1f}"


def twin_releases(directory: Path, *, labels: int, dim: int, columns: int, spec: str) -> Path:
    """Releases A and B of the same labels; built below `directory` unless they are there, A the current one."""
    root = directory / f"memory-{spec.replace(',', '-')}-{labels}x{dim}x{columns}"
    releases = Releases(root / "releases")
    if releases.current() is None:
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
    private, resident = bytes_of(process)
    print(f"{when:>22}{private / _MB:12,.0f}{resident / _MB:13,.0f}", flush=True)


def bytes_of(process: ServerProcess) -> tuple[int, int]:
    """Private and resident bytes."""
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    figures = {name: value for name, _, value in (line.partition(":") for line in status.splitlines())}
    private, resident = (int(figures[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return private, resident


if __name__ == "__main__":
    typer.run(main)
