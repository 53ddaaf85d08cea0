"""How long reading a million interactions takes, by file format, from file to integer pairs.

    python -m benchmarks.read_speed [--rows 1000000]

String ids, 100,000 queries, 50,000 labels, a timestamp and a weight where the format has columns. Beside
it, what pyarrow alone needs to parse the same file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from trainer.config import Data
from trainer.data import load_dataset


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


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    columns = {"timestamp": "timestamp", "weight": "weight"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_files(folder, rows)
        formats: list[tuple[str, Data, Callable[[], object]]] = [
            (
                "Parquet",
                Data(train=folder / "pairs.parquet", **columns),
                lambda: pq.read_table(folder / "pairs.parquet"),
            ),
            ("CSV", Data(train=folder / "pairs.csv", **columns), lambda: pyarrow.csv.read_csv(folder / "pairs.csv")),
            ("lists", Data(train=folder / "pairs.txt", format="lists"), (folder / "pairs.txt").read_bytes),
        ]
        print(f"| format, {rows:,} rows | file → sorted integer pairs | parsing alone |\n|---|---|---|")
        for name, data, parse in formats:
            print(
                f"| {name} | {seconds(lambda data=data: load_dataset(data, seed=0)):.2f} s | {seconds(parse):.2f} s |",
                flush=True,
            )  # type: ignore[misc]


if __name__ == "__main__":
    main()
