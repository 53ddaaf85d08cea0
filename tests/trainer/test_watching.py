"""What watches a run: Keras callbacks, and trackers beside TensorBoard, in their offline modes."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
from rich.console import Console

from longtail.trainer import RecipeError
from longtail.trainer.progress import Reporter
from longtail.trainer.trackers import tracker_module
from longtail.trainer.train import train
from longtail.trainer.trained import Trained
from tests.trainer import tiny
from tests.trainer.test_train import data, scripted_point


class Told(keras.callbacks.Callback):
    """Writes down what it is told, and stops after a number of epochs."""

    def __init__(self, stop_after: int = 99) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.stop_after = stop_after

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self.told.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.told.append(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.told.append(sorted(logs))
        self.model.stop_training = epoch + 1 >= self.stop_after

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        self.told.append("end")


def run(work: Path, *callbacks: Any, epochs: int = 3, **more: Any) -> Trained:
    recipe = tiny.recipe(training={"batch_size": 12, **more.pop("training", {})})
    reporter = Reporter(Console(file=io.StringIO()))
    return train(
        recipe, data(), epochs=epochs, work=work, logs=work / "logs", reporter=reporter, callbacks=callbacks, **more
    )


@pytest.mark.slow
def test_callbacks_are_told_and_may_stop(tmp_path: Path) -> None:
    told = Told(stop_after=2)
    stopper = keras.callbacks.EarlyStopping("val_recall@2", mode="max", patience=9)

    trained = run(tmp_path, told, stopper)

    both = ["loss", "val_recall@2"]
    assert told.told == ["begin", 0, both, 1, both, "end"]
    assert len(trained.history.losses) == 2
    assert told.model.query is trained.model.towers.query
    assert len(told.model.get_weights()) == 2, "the tables of users and items"
    assert stopper.best == max(trained.history.metrics.values())


@pytest.mark.slow
def test_validation_within_epochs_stops_and_keeps_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps an epoch, looked at after the second and the fifth (0.4 of an epoch would be 2, 4 and 5)."""
    scripted = iter([0.1, 0.3, 0.5, 0.2, 0.2, 0.2])
    monkeypatch.setattr(Trained, "curve", lambda *_, **__: [scripted_point(next(scripted))])

    trained = run(tmp_path, training={"evaluate_every": 0.4, "patience": 2})

    assert trained.history.metrics == {0.4: 0.1, 0.8: 0.3, 1: 0.5, 1.4: 0.2, 1.8: 0.2}
    assert trained.history.best_epoch == 1
    assert len(trained.history.losses) == 2


def test_a_tracker_that_is_unknown_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="track: expected one of mlflow, wandb, received 'comet'"):
        tracker_module("comet")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RecipeError, match=r"expected mlflow to be installed: pip install 'longtail\[mlflow\]'"):
        tracker_module("mlflow")
