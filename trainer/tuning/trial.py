"""One trial: the recipe with its values, trained, and measured on valid where `fit` would serve it."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtail.trainer.choosing import check_choice, choose_dial
from longtail.trainer.config import Recipe
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.history import TrainingHistory
from longtail.trainer.progress import Reporter
from longtail.trainer.train import train


class Measured:
    """The data of a recipe without its test pairs, read again only for trials that would read it otherwise.

    Args:
        recipe: whose validation pairs all trials are measured on.

    Attributes:
        dataset: of that recipe; its `test` is empty.

    Raises:
        DataError: as `read_dataset`; there are no validation pairs.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.dataset = recipe, _without_test(recipe)
        if not len(self.dataset.valid):
            raise DataError("tune: expected validation pairs to measure trials on, found none")
        check_choice(recipe, self.dataset)

    def of(self, recipe: Recipe) -> Dataset:
        """The data of a trial.

        Raises:
            DataError: as `read_dataset`; its validation pairs or its catalogue are not those of the study.
        """
        if _reads(recipe) == _reads(self._recipe):
            return self.dataset
        found = _without_test(recipe)
        ours, theirs = self.dataset, found
        if not (
            theirs.label_ids.equals(ours.label_ids)
            and theirs.query_ids.equals(ours.query_ids)
            and np.array_equal(theirs.valid.queries, ours.valid.queries)
            and np.array_equal(theirs.valid.labels, ours.valid.labels)
        ):
            raise DataError(
                f"data: expected the recipe's own {len(ours.valid):,} validation pairs over {len(ours.label_ids):,} "
                f"labels, on which trials are compared, found {len(theirs.valid):,} over {len(theirs.label_ids):,}, "
                "or others"
            )
        return found


def _without_test(recipe: Recipe) -> Dataset:
    dataset = read_dataset(recipe)
    return replace(dataset, test=dataset.test.take(slice(0)))


def _reads(recipe: Recipe) -> tuple[Any, ...]:
    """What `read_dataset` depends on."""
    return (
        recipe.weighted_data, recipe.seed, recipe.string_columns, recipe.table_columns, recipe.context_columns,
        recipe.objective_of_type,
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a trial that was trained to its end has on valid.

    Attributes:
        metrics: every figure at the λ and μ that the trial chose, by name.
        bias_removal, popularity: that λ and μ.
        epochs: after which the kept validation was.
        seconds: of training and measuring, in the process that ended it.
        validated: the recipe's metric at every validation of the training, in order.
    """

    metrics: dict[str, float]
    bias_removal: float
    popularity: float
    epochs: float
    seconds: float
    validated: list[float]

    @property
    def setting(self) -> Setting:
        """λ and μ."""
        return Setting(self.bias_removal, self.popularity)


def try_recipe(
    recipe: Recipe, dataset: Dataset, work: Path, logs: Path, reporter: Reporter,
    judge: Callable[[TrainingHistory], None],
) -> Found:  # fmt: skip
    """Train a trial's recipe and choose its λ and μ on valid, as `fit` does; go on from a checkpoint in `work`.

    Args:
        recipe: with the trial's values.
        dataset: without test pairs.
        work: directory of checkpoints; emptied at the end.
        logs: directory of TensorBoard's logs.
        reporter: shows progress.
        judge: as `train` takes it.

    Raises:
        TrainerError: as `train` and `curve_of`; the recipe's own layers could not be served.
    """
    try:
        return _found(recipe, dataset, work, logs, reporter, judge)
    finally:
        gc.collect()  # of the trial's tables, which its compiled steps refer to in circles


def _found(
    recipe: Recipe, dataset: Dataset, work: Path, logs: Path, reporter: Reporter,
    judge: Callable[[TrainingHistory], None],
) -> Found:  # fmt: skip
    began = time.perf_counter()
    try_own_layers(recipe)
    trained = train(
        recipe, dataset, epochs=recipe.training.epochs, work=work, logs=logs, reporter=reporter, judge=judge
    )  # fmt: skip
    dial = choose_dial(trained, dataset)
    point = next(point for point in dial.curve if Setting.of(point) == dial.default)
    shutil.rmtree(work, ignore_errors=True)
    metrics = {name: interval.value for name, interval in point.metrics.items()}
    seconds, history = time.perf_counter() - began, trained.history
    return Found(metrics, *dial.default, history.best_epoch, seconds, list(history.metrics.values()))
