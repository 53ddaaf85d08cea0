"""What a catalogue in Milvus costs beside one in FAISS, on this machine: to build, to keep and to ask.

    python -m benchmarks.milvus_cost [--labels 100000 --labels 1000000] [--queries 1000]

Labels of benchmarks.index_recall, a tenth of them in each `category`, `ivf_flat` beside `milvus_ivf_flat`: the same
rows, a head and a tail. Milvus is the wheel `milvus` 2.3.5, one process on the same cores. A query is 20 labels at
λ = ½, one at a time: milliseconds by the clock, and of CPU here and there. Memory is what a service's process has to
itself after as many requests, and what the server has grown by since it began; disk is its folder, likewise.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import pyarrow as pa
import typer

from benchmarks.index_recall import synthetic_bundle
from benchmarks.paired_rate import cpu_seconds
from longtail.index import Condition, Filter, Releases, Selection, build
from tests.milvus import RunningMilvus, running_milvus
from tests.serving.process import server

_K, _LAMBDA = 20, 0.5
_THREADS = 8
_CATEGORIES = 10
_SPECS = ("ivf_flat", "milvus_ivf_flat")


def main(
    labels: Annotated[list[int], typer.Option(help="Catalogues.")] = [100_000, 1_000_000],  # noqa: B006
    queries: Annotated[int, typer.Option(help="Asked one after the other, of each kind.")] = 1_000,
) -> None:
    """Print a table of what each took."""
    columns = (
        "labels", "index", "build s", "probes", "lowest recall", "ms", "CPU ms here", "there", "among a tenth, ms",
        "32 in a batch, ms", "8 at once, queries/s", "service's own MB", "server MB", "its disk MB",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|---:|---|{'---:|' * (len(columns) - 2)}")
    for count in labels:
        with tempfile.TemporaryDirectory() as folder, running_milvus() as milvus:
            path = Path(folder)
            _write(path / "bundle", count)
            for spec in _SPECS:
                print(_row(path, spec, count, queries, milvus), flush=True)


def _write(path: Path, labels: int) -> None:
    bundle = synthetic_bundle(labels)
    shown = bundle.labels.display.append_column(
        "category", pa.array([f"c{row % _CATEGORIES}" for row in range(labels)])
    )
    dataclasses.replace(
        bundle,
        labels=dataclasses.replace(bundle.labels, display=shown),
        manifest=bundle.manifest.model_copy(update={"display": shown.column_names}),
    ).write(path)


def _row(path: Path, spec: str, labels: int, queries: int, milvus: RunningMilvus) -> str:
    memory, disk, began = milvus.resident_bytes(), milvus.disk_bytes(), time.perf_counter()
    manifest = build(path / "bundle", path / "releases", spec=spec, name=spec, filterable=["category"])
    built = time.perf_counter() - began
    release = Releases(path / "releases").open(spec)
    asked = release.bundle.augmentation.queries(
        np.resize(release.bundle.calibration_queries, (queries, release.bundle.manifest.dim)), _LAMBDA
    )
    tenth = Selection.of([Condition("category", "eq", ("c3",))], labels, lambda: np.arange(labels) % _CATEGORIES == 3)

    def each(filter_: Filter | None) -> list[float]:
        return [_timed(lambda query=query: release.searcher.search(query[None], _K, [filter_])) for query in asked]

    each(None)
    here, there = time.process_time(), cpu_seconds(milvus.pid)
    alone = each(None)
    here, there = time.process_time() - here, cpu_seconds(milvus.pid) - there
    batches = [_timed(lambda some=some: release.searcher.search(some, _K)) for some in np.split(asked[: 32 * 10], 10)]
    filtered = each(Filter(selection=tenth))
    with ThreadPoolExecutor(_THREADS) as pool:
        together = _timed(lambda: list(pool.map(lambda query: release.searcher.search(query[None], _K), asked)))
    cells = [
        f"{built:,.0f}",
        release.index.effort.probes,
        f"{min(at.recall for at in manifest.recall):.4f}",
        f"{1e3 * statistics.median(alone):.2f}",
        f"{1e3 * here / queries:.2f}",
        f"{1e3 * there / queries:.2f}" if spec != "ivf_flat" else "–",
        f"{1e3 * statistics.median(filtered):.2f}",
        f"{1e3 * statistics.median(batches):.1f}",
        f"{queries / together:,.0f}",
        f"{_own_bytes(path, spec, milvus, queries) / 1e6:,.0f}",
    ]
    if spec == "ivf_flat":
        cells += ["–", "–"]
    else:
        cells += [f"{(milvus.resident_bytes() - memory) / 1e6:,.0f}", f"{(milvus.disk_bytes() - disk) / 1e6:,.0f}"]
    return f"| {labels:,} | {spec} | {' | '.join(map(str, cells))} |"


def _own_bytes(path: Path, name: str, milvus: RunningMilvus, requests: int) -> float:
    """Memory that a service of a release has to itself, after some requests."""
    releases = Releases(path / "releases")
    releases.publish(name)
    with server(releases.root, path / "log", milvus=milvus.uri, state=path / f"state-{name}") as running:
        running.wait_until_ready(120)
        with httpx.Client(base_url=running.url, timeout=30) as http:
            for number in range(requests):
                query = {"features": {"user_id": f"u{number % 20}"}, "k": _K, "filter": {"category": f"c{number % 7}"}}
                http.post("/v1/retrieve", json={"queries": [query]}).raise_for_status()
            said = http.get("/metrics").text
    return next(float(line.split()[-1]) for line in said.splitlines() if "worker_private_bytes{" in line)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
