"""How long reading a million interactions takes, by file format, from file to integer pairs.

    python -m benchmarks.read_speed [--rows 1000000]
    python -m benchmarks.read_speed --xmc [--rows 1186239]

String ids, 100,000 queries, 50,000 labels, a timestamp and a weight where the format has columns. Beside
it, what pyarrow alone needs to parse the same file.

`--xmc`: a file of the extreme-classification format as large as AmazonCat-13K (203,882 features, 13,330
labels, about 71 features and 5 labels a row, 1.2 GB), from file to tables and to what a training job holds.
Each in a process of its own, whose highest resident memory (Linux) stands beside the seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from longtail.trainer.config import DataConfig, Recipe
from longtail.trainer.data.dataset import load_dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.xmc import read_xmc

FEATURES, LABELS = 203_882, 13_330


def write_files(folder: Path, rows: int) -> None:
    """The same interactions in every format."""
    rng = np.random.default_rng(0)
    query, label = np.sort(rng.integers(0, 100_000, rows)), np.minimum(rng.zipf(1.2, rows), 50_000)
    table = pa.table(
        {
            "query_id": [f"user-{row}" for row in query],
            "label_id": [f"item-{row}" for row in label],
            "timestamp": rng.integers(0, 10**9, rows),
            "weight": rng.uniform(0, 1, rows),
        }
    )
    pq.write_table(table, folder / "pairs.parquet")
    pyarrow.csv.write_csv(table, folder / "pairs.csv")
    starts = np.flatnonzero(np.diff(query, prepend=-1))
    lists = (f"{query[part[0]]} {' '.join(map(str, label[part]))}" for part in np.split(np.arange(rows), starts[1:]))
    (folder / "pairs.txt").write_text("\n".join(lists) + "\n")


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def write_xmc(path: Path, rows: int) -> None:
    """Rows of uniformly drawn labels, features and values of four decimals."""
    rng = np.random.default_rng(0)
    values = pa.array([f"{value / 10_000:.4f}" for value in range(1, 10_000)])

    def joined(count: int, mean: int, bound: int, separator: str) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(np.maximum(rng.poisson(mean, count), 1))]).astype(np.int32)
        ids = pa.array(rng.integers(0, bound, offsets[-1]).astype(np.int32)).cast(pa.string())
        if bound == FEATURES:
            drawn = values.take(pa.array(rng.integers(0, len(values), offsets[-1])))
            ids = pc.binary_join_element_wise(ids, drawn, ":")
        return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), ids), separator)

    with path.open("wb") as file:
        file.write(f"{rows} {FEATURES} {LABELS}\n".encode())
        for start in range(0, rows, 50_000):
            count = min(50_000, rows - start)
            lines = pc.binary_join_element_wise(joined(count, 5, LABELS, ","), joined(count, 71, FEATURES, " "), " ")
            file.write("\n".join([*lines.to_pylist(), ""]).encode())


def tables_of(path: Path) -> int:
    """Read the file; bytes of its arrays."""
    rows = read_xmc(path)
    return int(rows.queries["features"].nbytes + rows.pairs.nbytes)


def inputs_of(path: Path) -> int:
    """Load and encode as a job does; bytes of the encoded arrays."""
    words = {"name": "features", "kind": "bag", "dim": 512, "combiner": "sum"}
    label = {"name": "label_id", "kind": "id", "dim": 512}
    recipe = Recipe.model_validate(
        {
            "name": "xmc",
            "data": {"train": path, "format": "xmc"},
            "query": {"features": [words]},
            "label": {"features": [label]},
        }
    )
    dataset = load_dataset(recipe.data, seed=0)
    Encoding.fit(recipe, dataset)
    non_zeros = len(dataset.query_table["features"].combine_chunks().keys) if dataset.query_table else 0
    return 8 * (non_zeros + len(dataset.train) + len(dataset.query_ids))


def measured(work: Callable[[Path], int], path: Path) -> tuple[float, int, int]:
    """Seconds, highest resident bytes of this process, and the bytes that `work` counted."""
    begin = time.perf_counter()
    size = work(path)
    elapsed = time.perf_counter() - begin
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return elapsed, 1024 * int(peak), size


def nothing(path: Path) -> int:
    """What a process holds before it reads anything."""
    return path.stat().st_size


def xmc(rows: int) -> None:
    """Print the table of the extreme-classification format."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "train.txt")
        write_xmc(path, rows)
        print(f"| XMC, {rows:,} rows, {path.stat().st_size / 1e9:.2f} GB | seconds | peak memory | of the arrays |")
        print("|---|---|---|---|")
        for name, work in (("imports", nothing), ("file → tables", tables_of), ("file → training inputs", inputs_of)):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                elapsed, peak, size = process.submit(measured, work, path).result()
            share = "" if work is nothing else f"{peak / size:.1f} × {size / 1e9:.2f} GB"
            print(f"| {name} | {elapsed:.1f} | {peak / 1e9:.2f} GB | {share} |", flush=True)


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--xmc", action="store_true")
    arguments = parser.parse_args()
    if arguments.xmc:
        xmc(arguments.rows or 1_186_239)
        return
    rows = arguments.rows or 1_000_000
    columns = {"timestamp": "timestamp", "weight": "weight"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_files(folder, rows)
        formats: list[tuple[str, DataConfig, Callable[[], object]]] = [
            (
                "Parquet",
                DataConfig(train=folder / "pairs.parquet", **columns),
                lambda: pq.read_table(folder / "pairs.parquet"),
            ),
            (
                "CSV",
                DataConfig(train=folder / "pairs.csv", **columns),
                lambda: pyarrow.csv.read_csv(folder / "pairs.csv"),
            ),
            ("lists", DataConfig(train=folder / "pairs.txt", format="lists"), (folder / "pairs.txt").read_bytes),
        ]
        print(f"| format, {rows:,} rows | file → sorted integer pairs | parsing alone |\n|---|---|---|")
        for name, data, parse in formats:
            print(
                f"| {name} | {seconds(lambda data=data: load_dataset(data, seed=0)):.2f} s | {seconds(parse):.2f} s |",
                flush=True,
            )  # type: ignore[misc]


if __name__ == "__main__":
    main()
