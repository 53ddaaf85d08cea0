"""What watches a run: validations within epochs, and trackers beside TensorBoard."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtail.trainer import RecipeError
from longtail.trainer.progress import Reporter
from longtail.trainer.trackers import tracker_module
from longtail.trainer.train import train
from longtail.trainer.trained import Trained
from tests.trainer import tiny
from tests.trainer.test_train import data, scripted_point


def run(work: Path, epochs: int = 3, **more: Any) -> Trained:
    recipe = tiny.recipe(training={"batch_size": 12, **more.pop("training", {})})
    reporter = Reporter(Console(file=io.StringIO()))
    return train(recipe, data(), epochs=epochs, work=work, logs=work / "logs", reporter=reporter, **more)


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
