"""`model.temperature = "auto"`: short runs on valid choose it, and the job goes on as with the number."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.trainer import DataError, RecipeError, fit, load_recipe, temperature as search
from longtail.trainer.config import Recipe
from longtail.trainer.errors import DivergedError, TrainerError
from longtail.trainer.evaluation.target import HitsByLabel
from longtail.trainer.history import TrainingHistory
from longtail.trainer.progress import Reporter
from longtail.trainer.search_space import SearchSpace
from longtail.trainer.temperature import TEMPERATURES
from longtail.trainer.trained import Trained
from tests.trainer import tiny

AUTO = ["model.temperature=auto", "training.epochs=5", "training.refit=false"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few temperatures may be tried."""
    monkeypatch.setattr(search, "TEMPERATURES", (0.08, 0.12, 0.2))


@pytest.mark.usefixtures("few")
@pytest.mark.nightly
def test_auto_trains_as_the_best_temperature(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    chosen = fit(recipe, tmp_path / "auto", overrides=AUTO)
    tried = {float(name): metric for name, metric in json.loads(chosen.reports["history.json"])["temperatures"].items()}
    best = max(tried, key=tried.__getitem__)
    at = search.TEMPERATURES.index(best)
    assert {*search.TEMPERATURES[max(at - 1, 0) : at + 2]} <= {*tried}
    assert json.loads(chosen.reports["recipe.json"])["model"]["temperature"] == best
    named = fit(recipe, tmp_path / "named", overrides=[*AUTO, f"model.temperature={best}"])
    assert np.array_equal(chosen.embeddings, named.embeddings)
    again = fit(recipe, tmp_path / "again", overrides=AUTO, warm_start=tmp_path / "auto")
    assert json.loads(again.reports["recipe.json"])["model"]["temperature"] == best
    assert json.loads(again.reports["history.json"])["temperatures"] == {}


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
def test_auto_compares_temperatures_under_the_target_prior(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    overrides = [*AUTO, "evaluation.target_prior=uniform", "training.epochs=1"]
    chosen = fit(recipe, tmp_path / "auto", overrides=overrides)
    tried = {float(name): metric for name, metric in json.loads(chosen.reports["history.json"])["temperatures"].items()}
    temperature, metric = min(tried.items(), key=lambda item: item[1])  # a short run of one epoch is the whole run
    fit(recipe, tmp_path / "worst", overrides=[*overrides, f"model.temperature={temperature}"])
    assert HitsByLabel.read(tmp_path / "worst").best("uniform")[1] == pytest.approx(metric)


def test_auto_skips_temperatures_that_diverge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = search.train

    def diverging(recipe: Recipe, *arguments: Any, **more: Any) -> Trained:
        if recipe.model.number in (0.12, 0.3):
            raise DivergedError("training: expected a finite loss")
        return train(recipe, *arguments, **more)

    monkeypatch.setattr(search, "train", diverging)
    finished = fit(tiny.write_job(tmp_path), tmp_path / "out", overrides=AUTO)
    tried = json.loads(finished.reports["history.json"])["temperatures"]
    assert (tried["0.12"], tried["0.3"]) == (0, 0)
    assert json.loads(finished.reports["recipe.json"])["model"]["temperature"] == 0.2


@pytest.mark.parametrize("best", [0, 8, 9, 11, TEMPERATURES.index(0.8), len(TEMPERATURES) - 1])
def test_auto_goes_on_from_the_ends_of_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], best: int
) -> None:
    class EndedError(TrainerError):
        pass

    runs: list[float] = []

    def train(recipe, *_, epochs, **__):  # type: ignore[no-untyped-def]
        if epochs == 5:
            raise EndedError
        runs.append(recipe.model.temperature)
        assert recipe.training.evaluate_every == 1  # the best epoch counts, and the last may be overfitted
        distance = abs(TEMPERATURES.index(recipe.model.temperature) - best)
        # Floors come before the metric: what misses them by less is better at any metric.
        history = TrainingHistory([1.0], {1: distance / 10}, 1, missed={1: distance / 100})
        return type("Trained", (), {"history": history, "recipe": recipe})

    monkeypatch.setattr(search, "train", train)
    monkeypatch.setattr("longtail.trainer.job.train", train)
    recipe = tiny.write_job(tmp_path)
    for _ in range(2):  # the second time, all that was tried is known
        with pytest.raises(EndedError):
            fit(recipe, tmp_path / "out", Reporter(), overrides=AUTO)
    content = json.loads((tmp_path / "out.work" / "temperatures.json").read_text())
    assert [temperature for temperature, _ in content["tried"]] == runs
    assert len({*runs}) == len(runs)
    assert {*TEMPERATURES[max(best - 1, 0) : best + 2]} <= {*runs}
    at_end = f"Temperature {TEMPERATURES[best]:g} is an end of what `auto` tries: a better one may lie beyond"
    assert (at_end in " ".join(capsys.readouterr().out.split())) == (best in (0, len(TEMPERATURES) - 1))


def test_auto_without_validation_is_refused(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)
    with pytest.raises(DataError, match=r"model.temperature: expected valid pairs to choose it on for 'auto'"):
        fit(recipe, tmp_path / "a", overrides=[*AUTO, 'data.split={strategy="temporal", valid=0, test=0.2}'])
    with pytest.raises(RecipeError, match=r"learn_temperature: expected a temperature to begin from"):
        load_recipe(recipe, [*AUTO, "model.learn_temperature=true"])
    with pytest.raises(RecipeError, match=r"tune: expected a number or a range for model.temperature"):
        SearchSpace(load_recipe(recipe, [*AUTO, 'tune.ranges={"model.dim"={low=2, high=8}}']))
