"""Tune the baselines of a recipe on validation, and measure them on test; no model is trained.

    python -m benchmarks.baselines data/movielens-1m/recipe.toml
    python -m benchmarks.baselines data/gowalla/recipe.toml --only EASE --long --set l2=80

Baselines learn from the same pairs as in `longtail-train fit`: from train to choose settings, and from train and valid
before test if the recipe refits. Seconds cover learning and answering with the chosen settings, then the choice.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int32
from longtail.trainer import Recipe, load_recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.evaluation.baselines import (
    BASELINES,
    Interactions,
    Settings,
    format_settings,
    read_categories,
    skip_reason,
    top_labels,
)
from longtail.trainer.evaluation.comparison import tuned
from longtail.trainer.evaluation.metrics import LabelFacts
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.evaluation.task import VALID_QUERIES, Task
from longtail.trainer.prior import fit_forecast_once


@dataclass(frozen=True)
class Row:
    """Hold the answers of one method to the test queries.

    Attributes:
        method: name of the method, with the settings chosen on validation.
        top_NK: labels, best first, int32 [N, K]; −1 after the last of a short list.
        seconds: time to train and answer with the chosen settings; for `fit`, its total time; None for a law.
        choosing: time of the search on validation, seconds; None if `seconds` includes it.
    """

    method: str
    top_NK: Int32
    seconds: float | None
    choosing: float | None


class Trial:
    """Run baselines on the data of one recipe: test queries, with the histories before test."""

    def __init__(self, recipe: Recipe, dataset: Dataset) -> None:
        self.recipe, self.dataset, self.earlier = recipe, dataset, dataset.pairs_before("test")
        self.task = self._task(dataset.test, self.earlier)

    @cached_property
    def facts(self) -> LabelFacts:
        """Count the pairs known before test by label, with buckets."""
        counts = self.final.label_counts()
        return LabelFacts(counts, define_buckets(self.recipe.evaluation, counts).assign(counts))

    def answers(self, name: str, settings: Settings | None = None, *, long: bool = False) -> Row | str:
        """Answer test with a row of `BASELINES`, or return the reason why it is skipped.

        Args:
            settings: settings in place of the defaults; None takes the best on validation.
            long: runs even a baseline that takes many minutes.
        """
        data = self.learnt_from(self.final.train, self.task)
        if (reason := skip_reason(name, data)) and not (long and "many minutes" in reason):
            return reason
        baseline, began = BASELINES[name], time.perf_counter()
        if settings is not None:
            settings = baseline.settings | settings
        elif baseline.grid or baseline.grid_of:
            learnt = self.learnt_from(self.dataset.train, self.valid)
            settings = tuned(baseline, self.valid, learnt, self.recipe.evaluation.metric, self.facts)
        else:
            settings = baseline.settings
        chosen = time.perf_counter()
        top_NK = top_labels(self.task, data, baseline.fit(data, settings))
        method = f"{name} ({format_settings(settings)})" if settings else name
        return Row(method, top_NK, time.perf_counter() - chosen, chosen - began)

    def learnt_from(self, train: Pairs, task: Task) -> Interactions:
        """Return the interactions from which a baseline learns, with the histories of a task."""
        queries, labels = len(self.dataset.query_ids), len(self.dataset.label_ids)
        seed, ordered = self.recipe.seed, self.dataset.ordered
        forecast = fit_forecast_once(self.recipe, self.dataset, task.past.known_pairs)
        prior_L = None if forecast is None else np.exp(forecast.log_popularity(include_future=True))
        return Interactions(
            train, task.past, queries=queries, labels=labels, seed=seed, ordered=ordered,
            columns=read_categories(self.recipe, self.dataset), prior_L=prior_L,
        )  # fmt: skip

    @cached_property
    def valid(self) -> Task:
        """Return the task that chooses settings: valid queries, with training pairs known."""
        return self._task(self.dataset.valid, self.dataset.train, VALID_QUERIES)

    @cached_property
    def final(self) -> Dataset:
        """Return the data from which baselines learn before test."""
        return self.dataset.refit() if self.recipe.training.refit else self.dataset

    def _task(self, held_out: Pairs, earlier: Pairs, max_queries: int | None = None) -> Task:
        config, labels, seed = self.recipe.evaluation, len(self.dataset.label_ids), self.recipe.seed
        held_out, past = self.dataset.with_past(held_out, earlier, config.history)
        return Task.create(held_out, past, config, labels=labels, seed=seed, max_queries=max_queries)


def main(
    recipe: Path,
    only: Annotated[list[str] | None, typer.Option(help="Only these baselines.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="KEY=NUMBER in place of a search.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also what `fit` leaves out as it takes many minutes.")] = False,
) -> None:
    """Print a table of every baseline."""
    loaded = load_recipe(recipe)
    trial = Trial(loaded, read_dataset(loaded))
    name, _, k = loaded.evaluation.metric.partition("@")
    columns = dict.fromkeys([f"{name}@{k}", f"ndcg@{k}", *(f"recall@{k}/{bucket}" for bucket in BUCKET_NAMES[:3])])
    settings = {key: float(value) for key, _, value in (text.partition("=") for text in setting or [])}
    print(f"| method | {' | '.join(columns)} | s | s to choose |\n|{' --- |' * (len(columns) + 3)}")
    for baseline in only or BASELINES:
        row = trial.answers(baseline, settings or None, long=long)
        if isinstance(row, str):
            print(f"| {baseline} | left out: {row} |")
            continue
        metrics = trial.task.metrics(row.top_NK, trial.facts)
        figures = " | ".join(f"{metrics[column].value:.4f}" for column in columns)
        print(f"| {row.method} | {figures} | {row.seconds:.0f} | {row.choosing:.0f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
