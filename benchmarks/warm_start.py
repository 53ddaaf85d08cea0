"""A warm start against a start from scratch: generated shops, one training after another.

The first 80 % of a shop's events train yesterday's bundle. Today's job has 90 %, of which the last 5 points choose λ
and the epoch; the last 10 % are to be found. It runs from scratch, and from yesterday's bundle with
`training.replay`; the recipe is the one that `longtail-train init` writes.

    python -m benchmarks.warm_start --out runs/warm
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")  # a thread that waits for another counts as CPU time
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import numpy as np
import pyarrow.parquet as pq
import typer

from benchmarks.shops.generate import LAWS, write
from benchmarks.shops.measure import Measurement
from longtail.bundle import Bundle
from longtail.trainer import Recipe, fit, load_recipe

_TRAIN = Path(sys.executable).parent / "longtail-train"
_METRICS = ("recall@20", "ndcg@20", "recall@20/head", "recall@20/torso", "recall@20/tail")


def main(
    out: Annotated[Path, typer.Option(help="Where shops and bundles go; what is there is not made again.")],
    law: Annotated[list[str] | None, typer.Option(help="Only these: static, sessions, drift, fresh.")] = None,
    replay: Annotated[list[float] | None, typer.Option(help="Of today's warm starts.")] = None,
    seed: int = 2,
) -> None:
    """Print a row for each run: CPU seconds of the whole of `fit`, figures, and the difference to that from scratch."""
    print(f"| shop | run | CPU s | {' | '.join(_METRICS)} | recall@20 less that from scratch |")
    print("| --- " * (len(_METRICS) + 4) + "|")
    for name in LAWS:
        if name not in (law or LAWS):
            continue
        shop = out / f"{name}-{seed}"
        if not shop.exists():
            write(shop, name, products=5_000, users=6_000, events=150_000, seed=seed)
            tables = ["--labels", shop / "products.parquet", "--queries", shop / "users.parquet"]
            words = [_TRAIN, "init", shop / "events.parquet", *tables, "--out", shop / "recipe.toml"]
            subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
        _compare(name, shop, replay or [0.0, 0.1])


def _compare(name: str, shop: Path, shares: list[float]) -> None:
    yesterday, _ = _fitted(_cut(shop, "yesterday", train=0.72, valid=0.08, test=0.1), shop / "run-yesterday", None)
    today = _cut(shop, "today", train=0.85, valid=0.05, test=0.1)
    scratch, took = _fitted(today, shop / "run-scratch", None)
    runs = [("from scratch", scratch, took)]
    for share in shares:
        training = today.training.model_copy(update={"replay": share})
        recipe = today.model_copy(update={"training": training})
        runs.append((f"warm start, replay {share:g}", *_fitted(recipe, shop / f"run-warm-{share:g}", yesterday)))
    against = Measurement(today, Bundle.load(scratch))
    reference = against.ours(took)
    for run, bundle, seconds in runs:
        measurement = Measurement(today, Bundle.load(bundle))
        row = measurement.ours(seconds)
        figures = [f"{against.metrics(row)[key].value:.4f}" for key in _METRICS]
        by = against.ahead(row, reference)
        lacks = f"{by.value:+.4f} [{by.low:+.4f}, {by.high:+.4f}]" if bundle != scratch else ""
        print(f"| {name} | {run} | {seconds:.0f} | {' | '.join(figures)} | {lacks} |", flush=True)


def _fitted(recipe: Recipe, out: Path, warm_start: Path | None) -> tuple[Path, float]:
    """The bundle, and the CPU seconds that it took."""
    took = out.with_suffix(".seconds")
    if not out.exists():
        began = time.process_time()
        fit(recipe, out, warm_start=warm_start)
        took.write_text(str(time.process_time() - began), encoding="utf-8")
    return out, float(took.read_text(encoding="utf-8"))


def _cut(shop: Path, name: str, *, train: float, valid: float, test: float) -> Recipe:
    """The shop's recipe on the first events by time: shares that train and choose, and the last ones, to be found."""
    table = pq.read_table(shop / "events.parquet")
    table = table.take(np.argsort(table["time"].to_numpy(), kind="stable"))
    ends = {"train": (0.0, train), "valid": (train, train + valid), "test": (1 - test, 1.0)}
    folder = shop / name
    folder.mkdir(exist_ok=True)
    for part, (first, last) in ends.items():
        pq.write_table(table[round(first * len(table)) : round(last * len(table))], folder / f"{part}.parquet")
    recipe = load_recipe(shop / "recipe.toml", ["evaluation.baselines=[]"])
    paths = {part: folder / f"{part}.parquet" for part in ends}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={**paths, "split": None})})


if __name__ == "__main__":
    typer.run(main)
