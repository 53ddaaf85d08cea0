"""A query table of many millions of rows from a model in memory to answers over HTTP: time and memory of each stage.

    python -m benchmarks.large_tables                       # 1, 5 and 20 million users × 64
    python -m benchmarks.large_tables --users 20000000 --dir DIR

Every user has one interaction with one of 100,000 items, Zipf; weights are fresh, since an export costs the same of
trained ones. `read` is the data and the model made of it, optimisers included; `export` the towers, their check
against Keras and the bundle written; `index` the command's flat build and publish. Each runs in a process of its own:
seconds of the clock, and the most that was resident. `before` is what the process held when the export began. The
service is the real process: to its first answer, then 200 queries by users, whose labels are compared with NumPy's of
the table's row. What it has to itself is beside what is mapped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.batch_cost import gigabytes
from benchmarks.service_memory import bytes_of
from longtail.bundle import BiasRemoval, Bundle
from longtail.index import Releases, build
from tests.serving.process import server

ITEMS, DIM, K, QUERIES = 100_000, 64, 10, 200
_RECIPE = """
name = "large-tables"
[data]
train = "pairs.parquet"
query_id = "user_id"
label_id = "item_id"
[query]
features = [{{ name = "user_id", kind = "id", dim = {dim} }}]
[label]
features = [{{ name = "item_id", kind = "id", dim = {dim} }}]
[model]
dim = {dim}
[training]
batch_size = 4096
"""


def main() -> None:
    """Print a row for each number of users."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=[1_000_000, 5_000_000, 20_000_000])
    parser.add_argument("--dir", type=Path, help="where files are written, and kept; a temporary folder if left out")
    arguments = parser.parse_args()
    folder: Path = arguments.dir or Path(tempfile.mkdtemp())
    print(
        "| users | table GB | read s | GB | before GB | export s | GB | bundle GB | index s | GB | answered s "
        "| own MB | mapped MB | ms a query | wrong labels |\n" + "|---:" * 15 + "|"
    )
    try:
        for users in arguments.users:
            work = folder / f"users-{users}"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            figures = [users * DIM * 4 / 1e9, *_apart(_exported, work, users), *_apart(_indexed, work), *_served(work)]
            print(f"| {users:,} | " + " | ".join(f"{figure:,.2f}" for figure in figures) + " |", flush=True)
    finally:
        if arguments.dir is None:
            shutil.rmtree(folder)


def _apart(stage: Callable[..., list[float]], *arguments: Any) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(stage, arguments)


def _exported(work: Path, users: int) -> list[float]:
    """Seconds and GB of reading; what is held; seconds and GB of the export, and GB of the bundle."""
    from longtail.trainer.config import load_recipe
    from longtail.trainer.data.prepared import read_dataset
    from longtail.trainer.evaluation.dial import Dial
    from longtail.trainer.export.bundle import to_bundle
    from longtail.trainer.train import prepare_run

    rng = np.random.default_rng(0)
    items = np.minimum(rng.zipf(1.2, users) - 1, ITEMS - 1)
    pq.write_table(pa.table({"user_id": rng.permutation(users), "item_id": items}), work / "pairs.parquet")
    (work / "recipe.toml").write_text(_RECIPE.format(dim=DIM))
    started = time.perf_counter()
    recipe = load_recipe(work / "recipe.toml")
    trained = prepare_run(recipe, read_dataset(recipe), epochs=1, work=work / "run").trained
    read, peak = time.perf_counter() - started, gigabytes("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident begins anew
    before = gigabytes("VmRSS")
    started = time.perf_counter()
    (work / "export").mkdir()
    dial = Dial(BiasRemoval(default=0))
    to_bundle(trained, np.arange(1000), dial, {}, work / "export").write(work / "bundle")
    seconds = time.perf_counter() - started
    shutil.rmtree(work / "export")
    return [read, peak, before, seconds, gigabytes("VmHWM"), _size(work / "bundle")]


def _indexed(work: Path) -> list[float]:
    started = time.perf_counter()
    build(work / "bundle", work / "releases", spec="flat", name="first")
    Releases(work / "releases").publish("first")
    return [time.perf_counter() - started, gigabytes("VmHWM")]


def _served(work: Path) -> list[float]:
    """Seconds to the first answer, own and mapped MB, ms a query, labels that are not NumPy's."""
    bundle = Bundle.load(work / "bundle", towers=False, verify=False)
    table_UD = np.load(bundle.tables["user_id"], mmap_mode="r")
    ids = bundle.vocabularies["user_id"].ids
    rows_Q = np.random.default_rng(1).integers(0, len(ids), QUERIES)
    with server(work / "releases", work / "log", poll_seconds=0.05, drain_seconds=0) as process:
        process.wait_until_ready(600)
        with httpx.Client(base_url=process.url, timeout=60) as client:
            found, seconds = [], []
            for row in rows_Q:
                query = {"features": {"user_id": ids[int(row)].as_py()}, "k": K, "bias_removal": 0}
                began = time.perf_counter()
                said = client.post("/v1/retrieve", json={"queries": [query]}).raise_for_status().json()
                seconds.append(time.perf_counter() - began)
                found.append([label["id"] for label in said["results"][0]["labels"]])
                if len(found) == 1:
                    answered = time.perf_counter() - process.started
        private, resident = bytes_of(process)
        process.terminate()
    scores_QL = table_UD[rows_Q + 1] @ bundle.embeddings.T
    best_QK = np.argsort(-scores_QL, axis=1, kind="stable")[:, :K]
    wrong = sum(
        bundle.labels.ids[int(row)].as_py() not in labels
        for labels, rows in zip(found, best_QK, strict=True)
        for row in rows
    )
    return [answered, private / 1e6, (resident - private) / 1e6, 1e3 * float(np.median(seconds)), wrong]


def _size(folder: Path) -> float:
    return sum(os.stat(path).st_size for path in folder.rglob("*") if path.is_file()) / 1e9


if __name__ == "__main__":
    main()
