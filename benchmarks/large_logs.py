"""Time and memory of each stage from files to training steps, for logs of many millions of interactions.

    python -m benchmarks.large_logs                                    # 1, 10 and 100 million pairs
    python -m benchmarks.large_logs --pairs 10000000 --stages prepare map --dir DIR

N pairs have N/5 queries and N/20 labels with string ids. Every query and every label occurs; further occurrences are
drawn in proportion to 1 / rank. Parquet files have at most 10 million rows. `prepare` is the command that writes
`data.prepared`, `map` is a later job's `read_dataset` with one pass over all columns, and `encode` is the encoding for
id towers before a model is built. Each stage runs in a process of its own. Figures are wall-clock seconds, and the
largest resident memory of the process (`RssAnon`, read every 50 ms) without mapped files, which the kernel may reclaim.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FILE_ROWS = 10_000_000
_RECIPE = """
name = "large-logs"
[data]
train = "log"
query_id = "user_id"
label_id = "item_id"
timestamp = "time"
prepared = "prepared"
split = { strategy = "temporal", valid = 0.001, test = 0.001 }
[query]
features = [{ name = "user_id", kind = "id", dim = 16 }]
[label]
features = [{ name = "item_id", kind = "id", dim = 16 }]
[model]
dim = 16
"""


def write_log(folder: Path, pairs: int) -> None:
    """Write the files of a log."""
    (folder / "log").mkdir(parents=True)
    rng, queries, labels = np.random.default_rng(0), pairs // 5, pairs // 20

    def drawn(count: int, start: int, rows: int) -> np.ndarray:
        """Draw every id once over all files, then in proportion to 1 / rank."""
        every = np.arange(start, min(start + rows, count))
        return np.concatenate([every, (count ** rng.random(rows - len(every))).astype(np.int64) - 1])

    for start in range(0, pairs, FILE_ROWS):
        rows = min(FILE_ROWS, pairs - start)
        columns = {
            name: pc.binary_join_element_wise(
                prefix, pa.array(rng.permutation(drawn(count, start, rows))).cast("string"), ""
            )
            for name, prefix, count in (("user_id", "user-", queries), ("item_id", "item-", labels))
        }
        times = pa.array(rng.integers(1_600_000_000, 1_700_000_000, rows))
        pq.write_table(pa.table(columns | {"time": times}), folder / "log" / f"{start // FILE_ROWS:04}.parquet")


def _prepare(folder: Path) -> None:
    from longtail.trainer.config import load_recipe
    from longtail.trainer.data.prepared import prepare

    dataset, _ = prepare(load_recipe(folder / "recipe.toml"))
    print(
        f"    {len(dataset.train):,} training pairs, {len(dataset.query_ids):,} × {len(dataset.label_ids):,}",
        flush=True,
    )


def _map(folder: Path) -> None:
    from longtail.trainer.config import load_recipe
    from longtail.trainer.data.prepared import read_dataset

    dataset = read_dataset(load_recipe(folder / "recipe.toml"))
    dataset.label_counts(), int(dataset.train.queries.max())


def _encode(folder: Path) -> None:
    from longtail.trainer.config import load_recipe
    from longtail.trainer.data.encode import Encoding
    from longtail.trainer.data.prepared import read_dataset

    recipe = load_recipe(folder / "recipe.toml")
    Encoding.fit(recipe, read_dataset(recipe))


STAGES: dict[str, Callable[[Path], None]] = {"prepare": _prepare, "map": _map, "encode": _encode}


def measured(stage: str, folder: Path) -> tuple[float, float]:
    """Run a stage; return its seconds, and the largest memory of this process meanwhile, GB."""
    most, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.05):
            most = max(most, own_gigabytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    STAGES[stage](folder)
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return seconds, most


def main() -> None:
    """Print a row per number of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--dir", type=Path, help="where files are written, and kept; a temporary folder if left out")
    arguments = parser.parse_args()
    folder: Path = arguments.dir or Path(tempfile.mkdtemp())
    print("| pairs | log GB | " + " | ".join(f"{stage} s | GB" for stage in arguments.stages) + " | prepared GB |")
    print("|" + "---:|" * (3 + 2 * len(arguments.stages)), flush=True)
    try:
        for pairs in arguments.pairs:
            work = folder / f"pairs-{pairs}"
            if not work.exists():
                write_log(work, pairs)
            (work / "recipe.toml").write_text(_RECIPE)
            shutil.rmtree(work / "prepared", ignore_errors=True)
            figures: list[Any] = [size_of(work / "log")]
            for stage in arguments.stages:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    figures += pool.apply(measured, (stage, work))
            figures.append(size_of(work / "prepared"))
            print(f"| {pairs:,} | " + " | ".join(f"{figure:,.2f}" for figure in figures) + " |", flush=True)
    finally:
        if arguments.dir is None:
            shutil.rmtree(folder)


def own_gigabytes() -> float:
    """Return the memory of this process without file-backed pages, GB."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024 / 1e9


def size_of(folder: Path) -> float:
    """Return the size of a folder's files, GB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


if __name__ == "__main__":
    main()
