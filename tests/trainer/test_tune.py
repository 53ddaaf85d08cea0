"""A study, trial by trial: what is tried, kept, chosen and written. Trainings here are formulas of the recipe's values;
`test_tune_jobs.py` has real ones.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from rich.console import Console

from longtail.trainer import DataError, RecipeError, Reporter, TrainerError, TuneResult, load_recipe, tune
from longtail.trainer.config import Recipe
from longtail.trainer.config.tune import measured_metrics
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.history import TrainingHistory
from longtail.trainer.tuning import report, run, written
from longtail.trainer.tuning.ranges import Ranges
from longtail.trainer.tuning.result import non_dominated
from longtail.trainer.tuning.study import FILE, Study, held
from longtail.trainer.tuning.trial import Found
from tests.trainer import tiny
from tests.trainer.test_cli import run as command

T, SAMPLER = "model.temperature", "loss.sampler"


def figures_of(recipe: Recipe) -> dict[str, float]:
    """Recall rises with T up to .7 and falls then, the tail's falls all the way, and so does Gini."""
    t = recipe.model.temperature
    return {"recall@5": 0.7 - abs(t - 0.7), "recall@5/tail": 0.5 - t / 2, "gini@5": 1 - t, "coverage@5": t * (1 - t)}


@dataclass
class Script:
    """Stands for training: figures by formula, and what else should happen at a training, counted from 1."""

    figures: Callable[[Recipe], dict[str, float]] = figures_of
    at: dict[int, BaseException] = field(default_factory=dict)
    recipes: list[Recipe] = field(default_factory=list)
    datasets: list[Dataset] = field(default_factory=list)

    def __call__(self, recipe: Recipe, dataset: Dataset, work: Path, logs: Path, reporter: Any, judge: Any) -> Found:  # noqa: ARG002
        self.recipes.append(recipe)
        self.datasets.append(dataset)
        if error := self.at.get(len(self.recipes)):
            raise error
        metrics = dict.fromkeys(measured_metrics(recipe.evaluation), 0.0) | self.figures(recipe)
        validated = [metrics["recall@5"] * share for share in (0.5, 0.75, 1.0)]
        history = TrainingHistory()
        for epoch in range(3):
            judge(history)
            history.metrics[epoch + 1] = validated[epoch]
        return Found(metrics, 0.5, 0.0, 3, 1.0, validated)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(run, "try_recipe", made)
    monkeypatch.setattr(written, "tune_report", lambda *_: b"")  # but where it is tested: its plots take a second
    return made


RANGE = {T: {"low": 0.1, "high": 1.0}}


def job(folder: Path, ranges: dict[str, Any] = RANGE, **more: Any) -> Recipe:
    """`tiny.RECIPE` with a section `tune`."""
    loaded = load_recipe(tiny.write_job(folder / "job"))
    tree = loaded.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Recipe.model_validate(tree | {"tune": {"ranges": ranges, "trials": 6, **more}})


def table(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def told(result: TuneResult) -> list[tuple[Any, ...]]:
    """What a study found, but for how long it took."""
    return [(trial.state, trial.values, trial.figures, trial.validated, trial.reason) for trial in result.trials]


def screen() -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    return Reporter(Console(file=text, width=200)), text


def test_the_best_is_found_written_and_read_again(tmp_path: Path, script: Script) -> None:
    recipe, (reporter, text) = job(tmp_path), screen()

    result = tune(recipe, tmp_path / "out", reporter)

    temperatures = np.array([trial.values[T] for trial in result.trials])
    assert temperatures[0] == recipe.model.temperature == 0.1, "the recipe itself comes first"
    assert ((temperatures >= 0.1) & (temperatures <= 1)).all()
    assert len(set(temperatures)) == 6
    assert result.best.values[T] == temperatures[np.abs(temperatures - 0.7).argmin()]
    assert result.recipe == recipe.model_copy(
        update={"tune": None, "model": recipe.model.model_copy(update={"temperature": result.best.values[T]})}
    )
    best = load_recipe(tmp_path / "out" / "best.toml")
    assert best.model_dump(exclude={"data"}) == result.recipe.model_dump(exclude={"data"})
    assert best.data.train.resolve() == recipe.data.train.resolve()  # type: ignore[union-attr]
    head = (tmp_path / "out" / "best.toml").read_text().split("\n\n")[0]
    assert f"On valid: recall@5 {result.best.figures['recall@5']:.4f} at λ = 0.5" in head
    assert (result.front, list((tmp_path / "out").glob("front/*"))) == ([], [])
    assert f"Trial 6 of 6  {T} = " in text.getvalue()
    assert re.search(rf"▶ {result.best.number} │ +{result.best.figures['recall@5']:.4f} │ 0\.5 │", text.getvalue())
    rows = table(tmp_path / "out")
    assert [float(row[T]) for row in rows] == temperatures.tolist()
    assert [row["trial"] for row in rows if row["best"] == "True"] == [str(result.best.number)]
    assert all(len(dataset.test) == 0 for dataset in script.datasets)
    assert not (tmp_path / "out" / "work").exists()


def test_the_chosen_trial_is_within_the_constraint_that_the_best_breaks(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    """Of the tail at least .3: T at most .4, where recall is at most .4, while T = .7 has .7."""
    recipe = job(tmp_path, constraints={"recall@5/tail": {"at_least": 0.3}}, trials=12)

    result = tune(recipe, tmp_path / "out")

    recall, tail = (np.array([t.figures[name] for t in result.trials]) for name in ("recall@5", "recall@5/tail"))
    assert tail[recall.argmax()] < 0.3
    assert recall[result.best.number - 1] == recall[tail >= 0.3].max()
    assert result.best.missed == 0
    assert result.best.values[T] <= 0.4
    missed = [float(row["missed"]) for row in table(tmp_path / "out")]
    assert missed == pytest.approx(np.maximum(0.3 - tail, 0))
    on_front = {trial.number for trial in result.front}
    assert result.axes == ["recall@5", "recall@5/tail"]
    assert {result.trials[recall.argmax()].number, result.best.number} <= on_front, "what the constraint costs"
    assert {path.name for path in (tmp_path / "out/front").iterdir()} == {f"trial-{n:04d}.toml" for n in on_front}


def test_the_nearest_is_chosen_where_no_trial_is_within(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    reporter, text = screen()
    limits = {"recall@5/tail": {"at_least": 0.6}, "gini@5": {"at_most": 0.2}}

    result = tune(job(tmp_path, constraints=limits), tmp_path / "out", reporter)

    missed = [max(0.6 - t.figures["recall@5/tail"], 0) + max(t.figures["gini@5"] - 0.2, 0) for t in result.trials]
    assert result.best.missed == pytest.approx(min(missed))
    assert result.best.missed > 0
    assert "No trial meets tune.constraints on valid: the nearest has recall@5" in text.getvalue()
    assert "no trial meets them" in (tmp_path / "out/best.toml").read_text()


def test_the_front_of_two_objectives_is_what_no_trial_beats(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    recipe = job(tmp_path, objectives=["recall@5", "gini@5", "coverage@5"], trials=12)

    result = tune(recipe, tmp_path / "out")

    points = [(t.figures["recall@5"], -t.figures["gini@5"], t.figures["coverage@5"]) for t in result.trials]
    beaten = [
        any(all(b >= a for a, b in zip(one, other, strict=True)) and one != other for other in points) for one in points
    ]
    assert {t.number for t in result.front} == {at for at, is_beaten in enumerate(beaten, 1) if not is_beaten}
    assert 1 < len(result.front) < 12
    assert result.best is max(result.front, key=lambda trial: trial.figures["recall@5"])
    assert result.front[0] is result.best
    kept = optuna.load_study(study_name="longtail", storage=f"sqlite:///{tmp_path / 'out' / FILE}")
    assert {tuple(t.values) for t in kept.best_trials} == {
        tuple(t.figures[name] for name in recipe.tune.objectives) for t in result.front  # type: ignore[union-attr]
    }  # fmt: skip
    assert [direction.name for direction in kept.directions] == ["MAXIMIZE", "MINIMIZE", "MAXIMIZE"]
    assert kept.trials[3].intermediate_values == {}, "several objectives are not pruned"


def test_a_constraint_on_several_objectives_is_kept_by_the_front(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    limits = {"coverage@5": {"at_least": 0.16}}
    recipe = job(tmp_path, objectives=["recall@5/tail", "recall@5"], constraints=limits, trials=12)

    result = tune(recipe, tmp_path / "out")

    assert any(trial.missed for trial in result.trials)
    assert [trial.missed for trial in result.front] == [0] * len(result.front)
    assert result.axes == ["recall@5/tail", "recall@5"]


def test_non_dominated_by_hand() -> None:
    points = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.4], [0.5, 0.5], [0.0, 0.0]])
    assert non_dominated(points).tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("name", ["gini@5", "recall@5/tail"])
def test_an_objective_is_minimised_where_less_is_better(tmp_path: Path, script: Script, name: str) -> None:  # noqa: ARG001
    result = tune(job(tmp_path, objectives=[name]), tmp_path / "out")

    found = [trial.values[T] for trial in result.trials]
    assert result.best.values[T] == (max(found) if name == "gini@5" else min(found))


REFUSING = {"loss.hits": {"choices": ["mask", "mask_known"]}, "training.accumulate": {"choices": [1, 2]}}


def test_a_refused_combination_is_kept_with_its_reason(tmp_path: Path, script: Script) -> None:
    result = tune(job(tmp_path, RANGE | REFUSING, trials=12), tmp_path / "out")

    refused = [trial for trial in result.trials if trial.state == "refused"]
    assert 0 < len(refused) < 12 == len(result.trials)
    for trial in refused:
        assert (trial.values["loss.hits"], trial.values["training.accumulate"]) == ("mask_known", 2)
        assert "training.accumulate: expected 1 with loss.hits 'mask_known'" in (trial.reason or "")
    assert len(script.recipes) == 12 - len(refused)
    reasons = [row["reason"] for row in table(tmp_path / "out")]
    assert reasons == [trial.reason or "" for trial in result.trials]


def test_what_training_refuses_is_a_trial_and_what_it_breaks_on_is_said(tmp_path: Path, script: Script) -> None:
    script.at = {2: DataError("training: expected a finite loss, found inf"), 4: MemoryError("too much")}
    recipe = job(tmp_path, trials=6)

    with pytest.raises(MemoryError):
        tune(recipe, tmp_path / "out")
    result = tune(recipe, tmp_path / "out")

    assert [trial.reason for trial in result.trials] == [
        None, "training: expected a finite loss, found inf", None, "MemoryError: too much", None, None,
    ]  # fmt: skip


def test_nothing_but_refusals_is_an_error(tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.at = {at: DataError("training: no") for at in range(1, 99)}
    recipe = tiny.write_job(tmp_path, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"{T}" = {{ low = 0.1, high = 1.0 }}\n')

    code, _, errors = command(capsys, "tune", recipe, "--out", tmp_path / "out", "--trials", 3)

    assert code == 2
    assert errors.endswith("tune: expected trials that can be trained, found none of 3; trial 1: training: no\n")
    with pytest.raises(TrainerError, match="found none of 3"):
        tune(recipe, tmp_path / "out", trials=3)
    assert len(script.recipes) == 3


def test_what_validates_below_the_median_is_pruned(tmp_path: Path, script: Script) -> None:
    """Recall halves from trial to trial: from the seventh on, five complete ones are all better."""
    script.figures = lambda _: {"recall@5": 0.5 ** len(script.recipes)}
    (tmp_path / "again").mkdir()

    result = tune(job(tmp_path, trials=8), tmp_path / "out")
    script.recipes.clear()
    never = tune(job(tmp_path / "again", trials=8, pruner="none"), tmp_path / "never")

    assert [trial.state for trial in result.trials] == ["complete"] * 5 + ["pruned"] * 3
    assert result.trials[6].validated == [0.5**8], "the first epoch's, half of what it would have had"
    assert result.best.number == 1
    assert {trial.state for trial in never.trials} == {"complete"}
    kept = optuna.load_study(study_name="longtail", storage=f"sqlite:///{tmp_path / 'out' / FILE}")
    assert [trial.state.name for trial in kept.trials[5:]] == ["PRUNED"] * 3
    assert [row["state"] for row in table(tmp_path / "out")][5:] == ["pruned"] * 3


def test_nothing_is_pruned_for_a_constraint_that_the_pruner_does_not_know(tmp_path: Path, script: Script) -> None:
    script.figures = lambda _: {"recall@5": 0.5 ** len(script.recipes)}
    limits = {"recall@5/tail": {"at_least": 0.0}}

    assert {t.state for t in tune(job(tmp_path, constraints=limits, trials=7), tmp_path / "a").trials} == {"complete"}
    script.recipes.clear()
    result = tune(job(tmp_path, constraints=limits, pruner="median", trials=7), tmp_path / "b")
    assert result.trials[-1].state == "pruned"


@pytest.mark.parametrize("more", [{}, {"objectives": ["recall@5", "gini@5"]}, {"sampler": "random", "pruner": "none"}])
def test_stopped_by_ctrl_c_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, script: Script, more: dict[str, Any]
) -> None:
    recipe, (reporter, text) = job(tmp_path, trials=8, **more), screen()
    whole = tune(recipe, tmp_path / "whole")
    script.recipes.clear()
    script.at = {3: KeyboardInterrupt(), 7: KeyboardInterrupt()}

    with pytest.raises(KeyboardInterrupt):
        tune(recipe, tmp_path / "out", reporter)

    assert "Stopped after 2 of 8 trials; the same command goes on" in text.getvalue()
    assert len(table(tmp_path / "out")) == 2
    assert load_recipe(tmp_path / "out" / "best.toml").name == "tiny"
    with pytest.raises(KeyboardInterrupt):
        tune(recipe, tmp_path / "out", reporter)
    result = tune(recipe, tmp_path / "out", reporter)
    assert told(result) == told(whole)
    assert len(script.recipes) == 8 + 2, "both interrupted ones again, and no other"
    kept = optuna.load_study(study_name="longtail", storage=f"sqlite:///{tmp_path / 'out' / FILE}")
    states = [trial.state.name for trial in kept.trials]
    assert sorted(states) == sorted(["FAIL"] * 2 + [t.state.name for t in kept.trials if t.state.name != "FAIL"])
    assert not {"RUNNING", "WAITING"} & set(states)
    assert len(states) == 10


def test_ctrl_c_is_exit_code_130(tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny.write_job(tmp_path, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"{T}" = {{ low = 0.1, high = 1.0 }}\n')
    script.at = {1: KeyboardInterrupt(), 4: KeyboardInterrupt()}

    first = command(capsys, "tune", recipe, "--out", tmp_path / "out", "--trials", 3)
    second = command(capsys, "tune", recipe, "--out", tmp_path / "out", "--trials", 3)

    assert (first[0], second[0]) == (130, 130)
    assert [made.model.temperature for made in script.recipes[:2]] == [0.1, 0.1], "the recipe's own values, again"
    assert "Stopped after 0 of 3 trials" in first[1]
    assert "Stopped after 2 of 3 trials" in second[1]
    assert not any(errors for _, _, errors in (first, second))
    assert command(capsys, "tune", recipe, "--out", tmp_path / "out", "--trials", 3)[0] == 0


def test_more_trials_go_on_where_fewer_ended(tmp_path: Path, script: Script) -> None:
    recipe = job(tmp_path)

    for trials in (3, 3, 6):
        result = tune(recipe, tmp_path / "out", trials=trials)

    assert len(script.recipes) == 6
    assert told(result) == told(tune(recipe, tmp_path / "whole"))
    with pytest.raises(RecipeError, match="trials: expected at least 1, received 0"):
        tune(recipe, tmp_path / "out", trials=0)


def test_the_seed_decides_what_is_tried(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    first, other = (tune(job(tmp_path, seed=seed), tmp_path / str(seed)) for seed in (1, 2))
    assert [trial.values for trial in first.trials[1:]] != [trial.values for trial in other.trials[1:]]


def left_running(recipe: Recipe, out: Path) -> None:
    """What a process leaves behind that was killed in a trial."""
    ranges = Ranges(recipe)
    with held(out):
        study = Study(out, ranges, run.Measured(ranges.recipe).dataset.fingerprint())
        study.tidy()
        study.ask()


def test_a_trial_that_kills_its_process_every_time_is_left_behind(tmp_path: Path, script: Script) -> None:
    recipe = job(tmp_path, trials=3)
    for _ in range(3):
        left_running(recipe, tmp_path / "out")

    result = tune(recipe, tmp_path / "out")

    assert [trial.reason for trial in result.trials] == ["the process ended in each of 3 attempts at it", None, None]
    assert len(script.recipes) == 2
    left_running(job(tmp_path, trials=4), tmp_path / "out")
    assert tune(recipe, tmp_path / "out", trials=4).trials[3].state == "complete"


def test_another_recipe_or_other_data_in_its_directory_are_refused(tmp_path: Path, script: Script) -> None:
    recipe, out = job(tmp_path, trials=2), tmp_path / "out"
    tune(recipe, out)
    other = recipe.model_copy(update={"training": recipe.training.model_copy(update={"epochs": 4})})

    with pytest.raises(RecipeError, match=r"expected the recipe that its study was begun with, received another "
                       r"training\.epochs 4 \(there: 3\): choose another --out"):  # fmt: skip
        tune(other, out)
    with pytest.raises(RecipeError, match=r"another tune\.ranges\.model\.temperature\.high 0\.5 \(there: 1\.0\)"):
        tune(job(tmp_path, {T: {"low": 0.1, "high": 0.5}}), out)
    moved = recipe.model_copy(update={"name": "moved"})
    shutil.copytree(tmp_path / "job", tmp_path / "elsewhere")
    data = recipe.data.model_copy(update={"train": tmp_path / "elsewhere" / "interactions.parquet"})
    assert len(tune(moved.model_copy(update={"data": data}), out).trials) == 2, "names and places are not the study"
    tiny.pq.write_table(tiny.clustered(users=40, items=16, each=8, seed=9), tmp_path / "job" / "interactions.parquet")
    with pytest.raises(RecipeError, match="expected the data that its study was begun with, found others"):
        tune(recipe, out)
    assert len(script.recipes) == 2


def test_a_directory_of_something_else_or_in_use_is_refused(tmp_path: Path, script: Script) -> None:
    recipe, out = job(tmp_path), tmp_path / "out"
    with pytest.raises(RecipeError, match=r"job: expected a study \(study\.db\) to go on with, or a path that is free"):
        tune(recipe, tmp_path / "job")
    with held(out), pytest.raises(RecipeError, match="out: expected no other tune at work in it, found one"):
        tune(recipe, out)
    assert script.recipes == []


def test_without_optuna_it_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RecipeError, match=r"expected optuna to be installed: pip install 'longtail\[tune\]'"):
        tune(job(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_values_are_trained_once(tmp_path: Path, script: Script) -> None:
    result = tune(job(tmp_path, {"model.label_bias": {"choices": [True, False]}}, trials=8), tmp_path / "out")

    assert len(script.recipes) == 2
    assert len(result.trials) == 8
    for trial in result.trials:
        twin = next(t for t in result.trials if t.values == trial.values)
        assert (trial.figures, trial.validated) == (twin.figures, twin.validated)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recipe]]:
    found: list[Recipe] = []
    read = sys.modules["longtail.trainer.tuning.trial"].read_dataset
    monkeypatch.setattr(
        "longtail.trainer.tuning.trial.read_dataset", lambda recipe: found.append(recipe) or read(recipe)
    )
    return found


def test_data_are_read_once_but_for_trials_that_read_others(
    tmp_path: Path, script: Script, reads: list[Recipe]
) -> None:
    tune(job(tmp_path), tmp_path / "out")
    assert (len(reads), len(script.recipes)) == (1, 6)

    reductions = {"data.reduction": {"choices": ["expand", "sample"]}}
    result = tune(job(tmp_path, reductions, trials=4), tmp_path / "reduction")
    assert {trial.state for trial in result.trials} == {"complete"}
    assert len({trial.values["data.reduction"] for trial in result.trials}) == 2
    filters = {"data.filter": {"choices": [[], [["user_id", "<", 30]]]}}
    result = tune(job(tmp_path, filters, trials=6), tmp_path / "filter")
    reasons = {bool(trial.values["data.filter"]): trial.reason for trial in result.trials}
    assert reasons[False] is None
    assert "data: expected the recipe's own 40 validation pairs over 16 labels" in (reasons[True] or "")
    assert "found 30 over 16" in (reasons[True] or "")


def test_metrics_of_longer_lists_than_there_are_labels_are_refused(tmp_path: Path, script: Script) -> None:
    loaded = load_recipe(tiny.write_job(tmp_path / "job"), ["evaluation.ks=[5, 99]", 'tune.objectives=["recall@99"]',
                         f'tune.ranges={{"{T}"={{low=0.1, high=1.0}}}}'])  # fmt: skip
    with pytest.raises(DataError, match="tune: expected metrics at a k of at most 16, all labels, received recall@99"):
        tune(loaded, tmp_path / "out")
    assert script.recipes == []


def test_without_validation_pairs_there_is_nothing_to_choose_by(tmp_path: Path, script: Script) -> None:
    recipe = job(tmp_path)
    data = recipe.data.model_copy(update={"split": None})
    with pytest.raises(DataError, match="tune: expected validation pairs to measure trials on, found none"):
        tune(recipe.model_copy(update={"data": data}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert script.recipes == []


@pytest.mark.usefixtures("ink")
def test_the_report_needs_nothing_else_and_shows_every_trial(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.at = {5: DataError("<b>no & never</b>")}
    sampler = {"choices": ["in_batch", {"name": "uniform", "negatives": 4}]}
    limits = {"recall@5/tail": {"at_least": 0.3}}

    monkeypatch.setattr(written, "tune_report", report.tune_report)

    result = tune(job(tmp_path, RANGE | {SAMPLER: sampler}, constraints=limits, trials=12), tmp_path / "out")

    page = (tmp_path / "out" / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:|#)', page) == []
    assert "<script" not in page
    assert "&lt;b&gt;no &amp; never&lt;/b&gt;" in page
    plots = re.findall(r'<img alt="([^"]+)"', page)
    assert plots[:3] == [
        "recall@5 of every trial, in order",
        "recall@5 against recall@5/tail: all trials and the Pareto front",
        "Share of each range in what sets the best trials apart",
    ]
    assert {words.rpartition(" against ")[2] for words in plots[3:]} == {T, SAMPLER}
    rows = re.findall(r"<tr( class=chosen)?><th>(\d+)</th><td>(.*?)</td>", page)
    assert [int(number) for _, number, _ in rows] == list(range(1, 13))
    assert [int(number) for mark, number, _ in rows if mark] == [result.best.number]
    assert "uniform(negatives = 4)" in page


def test_importance_is_that_of_the_range_that_matters(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    recipe = job(tmp_path, RANGE | {"optimizer.decay": {"low": 0.1, "high": 0.9}}, trials=14)
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"schedule": "step"})})
    result = tune(recipe, tmp_path / "out")
    ranges = Ranges(recipe)
    study = Study(tmp_path / "out", ranges, run.Measured(ranges.recipe).dataset.fingerprint())

    found = report.importances(study, result)

    assert list(found) == [T, "optimizer.decay"]
    assert sum(found.values()) == pytest.approx(1)
    few = TuneResult(result.recipe, result.best, [], result.axes, result.trials[:3])
    assert report.importances(study, few) == {}


def test_the_recipe_of_a_path_takes_overrides(tmp_path: Path, script: Script) -> None:
    recipe = tiny.write_job(tmp_path, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"{T}" = {{ low = 0.1, high = 1.0 }}\n')

    tune(str(recipe), str(tmp_path / "out"), overrides=["training.epochs=7", "tune.trials=2"])

    assert [made.training.epochs for made in script.recipes] == [7, 7]
    assert tomllib.loads((tmp_path / "out/best.toml").read_text())["training"]["epochs"] == 7
