"""Cost of ranking a catalogue at 11 λ × 3 ω, compared with one flat pass over it.

    python -m benchmarks.evaluation_cost data/gowalla/recipe.toml [--queries 10000] [--epochs 2]

The model is trained for some epochs, and W is the recipe's first kind and power. A flat pass is one product queries ×
labels at λ = ½ with the best K of each query, without leaving anything out: FAISS `IndexFlatIP` by products. Ways take
turns, and the least CPU time counts; run on one core (`taskset -c 0`, OMP_NUM_THREADS=1) to compare single threads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
from rich.console import Console

from longtail.trainer.config import load_recipe
from longtail.trainer.cooccurrence import _scaled, _structures
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.cooccurrence import HistoryEntries, TermOf
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.ranking import tower_lists
from longtail.trainer.evaluation.task import Task
from longtail.trainer.progress import Reporter
from longtail.trainer.quiet import quiet_tensorflow
from longtail.trainer.train import train

LAMBDAS, OMEGAS, TURNS = [at / 10 for at in range(11)], [0.0, 0.5, 1.0], 4


def main() -> None:
    """Print one Markdown table."""
    quiet_tensorflow()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--set", action="append", default=["model.temperature=0.05", "training.evaluate_every=100"])
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.set)
    dataset = read_dataset(recipe)
    with tempfile.TemporaryDirectory() as folder:
        trained = train(
            recipe, dataset, epochs=options.epochs, work=Path(folder), logs=Path(folder) / "logs",
            reporter=Reporter(Console(quiet=True)),
        )  # fmt: skip
    held_out, past = dataset.with_past(dataset.valid, dataset.train, recipe.evaluation.history)
    labels = len(dataset.label_ids)
    task = Task.of(held_out, past, recipe.evaluation, labels=labels, seed=0, max_queries=options.queries)
    features, side = trained.encoding.query.with_history(past), trained.label_side(past.known)
    entries = HistoryEntries(past, recipe.history_events)
    term = TermOf(_scaled(_structures(recipe, dataset)[0], entries, task.rows_N[:2000]), entries)
    vectors_ND = trained.model.embed_queries(features.of_queries(task.rows_N))
    towers = [Setting(at) for at in LAMBDAS]
    grid = [Setting(at, cooccurrence=weight) for at in LAMBDAS for weight in OMEGAS]
    index = faiss.IndexFlatIP(side.rows().shape[1])
    index.add(side.rows())
    faiss.cvar.distance_compute_blas_threshold = 1
    queries_NE = side.augmentation.queries(vectors_ND, 0.5)

    def lists(settings: list[Setting]) -> np.ndarray:
        of_towers, _ = tower_lists(task, lambda rows_B: vectors_ND[np.searchsorted(task.rows_N, rows_B)], side, towers)
        return of_towers.at(settings, term)

    ways: dict[str, Callable[[], object]] = {
        "flat, one λ": lambda: index.search(queries_NE, task.k),
        "11 λ": lambda: lists(towers),
        "11 λ × 3 ω": lambda: lists(grid),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, run in ways.items():
            begin = time.process_time()
            run()
            seconds[way].append(time.process_time() - begin)
    print(f"{len(task.rows_N):,} queries, {labels:,} labels, K = {task.k}\n\n| | s | flat ÷ it |\n|---|---:|---:|")
    for way, times in seconds.items():
        print(f"| {way} | {min(times):.2f} | {min(seconds['flat, one λ']) / min(times):.2f} |")


if __name__ == "__main__":
    main()
