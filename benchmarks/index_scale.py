"""How an index grows with the catalogue: what it takes to build, to open and to search, at ever more labels.

    python -m benchmarks.index_scale                                        # 1, 3 and 10 million, rows and codes
    python -m benchmarks.index_scale --labels 10000000 --index codes
    python -m benchmarks.index_scale --labels 10000000 --index codes --within-gb 1 --queries 150   # as root

Data: as of index_recall. `rows` is `--spec ivf_flat`, `codes` is `--bytes-per-label 40`. Builds are the command's, on
every core: seconds of the clock, of all cores, and the most memory that was resident, mapped files included. Then a
fresh process opens the release, which another has verified, as a service does, and asks it 20,000 queries near as
many labels, one at a time on one thread, a third at each λ, for 100 results each, twice; queries per second are of
the second time, by the clock and per CPU second. Own is memory that no file backs; mapped is what was touched of the
release's files, which the kernel may drop. With `--within-gb` the process and the pages of all files it reads share
so much memory (a control group), and none of them are there to begin with. Growth is the exponent between the first
and the last row: 1 grows as the labels do.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import faiss
import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.index_recall import synthetic_bundle
from longtail.index import Releases

LAMBDAS, K = (0.0, 0.5, 1.0), 100
SPECS = {"rows": ["--spec", "ivf_flat"], "codes": ["--bytes-per-label", "40"]}
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
"""Where control groups of memory are, in their first version and in the second, and the file of their limit."""
_GROUP = "longtail-index-scale"


@dataclass(frozen=True)
class Grown:
    """What one catalogue took, in the table's columns."""

    build_s: float
    build_cpu_s: float
    build_peak_gb: float
    bytes_per_label: float
    open_s: float
    own_mb: float
    mapped_mb: float
    queries_per_s: float
    queries_per_cpu_s_at_0: float
    queries_per_cpu_s_at_half: float
    queries_per_cpu_s_at_1: float
    lowest_recall: float


def main() -> None:
    """Print a table of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--index", choices=list(SPECS), nargs="+", default=list(SPECS))
    parser.add_argument("--within-gb", type=float)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--dir", type=Path, help="where bundles and releases are kept; a temporary folder if left out")
    arguments = parser.parse_args()
    folder: Path = arguments.dir or Path(tempfile.mkdtemp())
    names = [field.name.replace("_", " ") for field in fields(Grown)]
    try:
        for index in arguments.index:
            print(f"\n{index}: {' '.join(SPECS[index])}\n\n| labels | {' | '.join(names)} |")
            print("|---:" * (1 + len(names)) + "|")
            rows = []
            for labels in arguments.labels:
                rows.append(grown(folder, index, labels, arguments.queries, arguments.within_gb))
                print(f"| {labels:,} | {' | '.join(_shown(value) for value in _values(rows[-1]))} |", flush=True)
            if len(rows) > 1:
                times = math.log(arguments.labels[-1] / arguments.labels[0])
                growth = [
                    math.log(last / first) / times
                    for first, last in zip(_values(rows[0]), _values(rows[-1]), strict=True)
                ]
                print(f"| growth | {' | '.join(f'{exponent:.2f}' for exponent in growth)} |", flush=True)
    finally:
        if arguments.dir is None:
            shutil.rmtree(folder)


def grown(folder: Path, index: str, labels: int, queries: int, within_gb: float | None) -> Grown:
    """Build a release if it is not there, and search it in a process of its own."""
    bundle, name = folder / f"bundle-{labels}", f"{index}-{labels}"
    context = multiprocessing.get_context("spawn")
    if not bundle.exists():
        with context.Pool(1) as pool:
            pool.apply(_make, (bundle, labels))
    seconds = cpu = peak = math.nan
    if not (folder / "releases" / name).exists():
        started = time.perf_counter()
        command = ["build", str(bundle), "--releases", str(folder / "releases"), "--name", name, *SPECS[index]]
        child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", "longtail.index", *command])
        _, status, usage = os.wait4(child, 0)
        if status:
            raise SystemExit(f"longtail-index {' '.join(command)}: failed")
        seconds, cpu = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
        peak = usage.ru_maxrss * 1024 / 1e9
    with context.Pool(1) as pool:
        pool.apply(_verified, (folder / "releases", name))
    with context.Pool(1) as pool:
        searched = pool.apply(_searched, (folder / "releases", name, queries, within_gb))
    _set_free()
    return Grown(seconds, cpu, peak, *searched)


def _make(path: Path, labels: int) -> None:
    synthetic_bundle(labels).write(path)


def _verified(releases: Path, name: str) -> None:
    (releases.parent / "state").mkdir(exist_ok=True)
    Releases(releases).open(name, towers=False, state=releases.parent / "state")


def _searched(releases: Path, name: str, queries: int, within_gb: float | None) -> tuple[float, ...]:
    if within_gb is not None:
        _confine(releases / name, within_gb)
    with threadpool_limits(1):
        faiss.omp_set_num_threads(1)
        started = time.perf_counter()
        release = Releases(releases).open(name, towers=False, state=releases.parent / "state")
        opened = time.perf_counter() - started
        bundle, searcher = release.bundle, release.searcher
        rng = np.random.default_rng(7)
        near_QD = np.asarray(bundle.embeddings[np.sort(rng.integers(0, len(bundle.embeddings), queries))])
        near_QD = near_QD + rng.standard_normal(near_QD.shape, np.float32) * np.float32(
            0.6 / math.sqrt(len(near_QD[0]))
        )
        queries_QD = rng.permutation(near_QD / np.linalg.norm(near_QD, axis=1, keepdims=True))
        parts = [
            bundle.augmentation.queries(part_QD, value)
            for value, part_QD in zip(LAMBDAS, np.array_split(queries_QD, len(LAMBDAS)), strict=True)
        ]
        for _ in ("pages", "figures"):
            clocks, cpus = [], []
            for queries_QE in parts:
                started, since = time.perf_counter(), time.process_time()
                for query in range(len(queries_QE)):
                    searcher.search(queries_QE[query : query + 1], K)
                clocks.append(time.perf_counter() - started)
                cpus.append(len(queries_QE) / (time.process_time() - since))
    index = release.index
    lowest = min(at.recall for at in index.recall)
    status = Path("/proc/self/status").read_text().splitlines()
    resident = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in status if line.startswith("Rss")}
    return (
        index.bytes_per_label or math.nan, opened, resident["RssAnon"], resident["RssFile"],
        queries / sum(clocks), *cpus, lowest,
    )  # fmt: skip


def _confine(release: Path, gigabytes: float) -> None:
    """Let this process and the pages that it reads have so much memory, and none of the release's to begin with."""
    for root, limit in _GROUPS:
        group = root / _GROUP
        if root.is_dir():
            try:
                group.mkdir(exist_ok=True)
                (group / limit).write_text(str(int(gigabytes * 1e9)))
                (group / "cgroup.procs").write_text(str(os.getpid()))
                break
            except OSError:
                with suppress(OSError):
                    group.rmdir()
    else:
        raise SystemExit("--within-gb: expected control groups of memory that this user may make, found none")
    os.sync()
    for file in release.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _set_free() -> None:
    """Remove the group of a process that has ended."""
    for root, _ in _GROUPS:
        with suppress(OSError):
            (root / _GROUP).rmdir()


def _values(row: Grown) -> list[float]:
    return [getattr(row, field.name) for field in fields(row)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


if __name__ == "__main__":
    main()
