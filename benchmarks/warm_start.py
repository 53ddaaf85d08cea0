"""A warm start against a start from scratch: MovieLens 100K by time, in place of a shop's daily job.

The first 80 % of the ratings train yesterday's bundle. Today has 90 %, and the last 10 % are to be found. Three runs
with today's data: from scratch for all epochs, from yesterday's bundle for a quarter, and from scratch for a quarter.

    python -m benchmarks.warm_start --data data/movielens-100k
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import pyarrow.parquet as pq

from longtail.trainer import Recipe, evaluate, fit, load_recipe

METRICS = ("recall@20", "ndcg@20", "recall@20/tail")


def main() -> None:
    """Print one row of Markdown for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="of longtail-train data movielens-100k")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    quarter = max(arguments.epochs // 4, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = load_recipe(arguments.data / "recipe.toml")
        yesterday = cut(recipe, folder / "yesterday", until=0.8, valid=0.08, test=0.1)
        today = cut(recipe, folder / "today", until=0.9, valid=0.05, test=0.1)
        old = folder / "yesterday-bundle"
        fit(with_epochs(yesterday, arguments.epochs), old)
        print(f"| run | epochs | s | {' | '.join(METRICS)} |\n|{'---|' * (3 + len(METRICS))}", flush=True)
        for run, epochs, start in (
            ("from scratch", arguments.epochs, None),
            ("warm start", quarter, old),
            ("from scratch", quarter, None),
        ):
            began = time.perf_counter()
            bundle = fit(with_epochs(today, epochs), folder / f"{run} {epochs}", warm_start=start)
            seconds, result = time.perf_counter() - began, evaluate(bundle)
            at = result.dial.default
            (point,) = [it for it in result.curve if (it.bias_removal, it.popularity) == tuple(at)]
            cells = [f"{(it := point.metrics[name]).value:.4f} [{it.low:.4f}, {it.high:.4f}]" for name in METRICS]
            print(f"| {run} | {epochs} | {seconds:.0f} | {' | '.join(cells)} |", flush=True)


def with_epochs(recipe: Recipe, epochs: int) -> Recipe:
    """The recipe for so many epochs, without early stopping, so that time is what it says."""
    training = recipe.training.model_copy(update={"epochs": epochs, "patience": 0})
    return recipe.model_copy(update={"training": training})


def cut(recipe: Recipe, folder: Path, *, until: float, valid: float, test: float) -> Recipe:
    """The recipe on the first `until` of its ratings by time, the last `valid` of which choose; then `test` of them."""
    table = pq.read_table(recipe.data.train)
    table = table.take(np.argsort(table["timestamp"].to_numpy(), kind="stable"))
    first, second, third = (round(share * len(table)) for share in (until - valid, until, until + test))
    folder.mkdir()
    parts = {"train": table[:first], "valid": table[first:second], "test": table[second:third]}
    for name, part in parts.items():
        pq.write_table(part, folder / f"{name}.parquet")
    paths = {name: folder / f"{name}.parquet" for name in parts}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={**paths, "split": None})})


if __name__ == "__main__":
    main()
