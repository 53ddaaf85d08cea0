"""Studies, trial by trial. Trainings here are formulas of the recipe's values; the last tests have real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer import DataError, RecipeError, TrainerError, TuneResult, fit, load_recipe, study, tune
from longtail.trainer.config import Recipe
from longtail.trainer.config.tune import measured_metrics
from longtail.trainer.study import FILE
from tests.trainer import tiny
from tests.trainer.test_cli import run as command

T = "model.temperature"
RANGE = {T: {"low": 0.1, "high": 1.0}}


def compute_figures(recipe: Recipe) -> dict[str, float]:
    """Recall rises with T up to .7 and falls then, the tail's falls all the way, and so does Gini."""
    t = recipe.model.temperature
    return {"recall@5": 0.7 - abs(t - 0.7), "recall@5/tail": 0.5 - t / 2, "gini@5": 1 - t, "coverage@5": t * (1 - t)}


@dataclass
class TrialScript:
    """Replace training by a formula, and by an error in the i-th training, counted from 1."""

    figures: Callable[[Recipe], dict[str, float]] = compute_figures
    errors: dict[int, BaseException] = field(default_factory=dict)
    recipes: list[Recipe] = field(default_factory=list)

    def train_trial(
        self, recipe: Recipe, dataset: Any, work: Path, logs: Path, reporter: Any, trial: optuna.Trial | None
    ) -> dict[str, float]:  # fmt: skip
        del dataset, work, logs, reporter
        self.recipes.append(recipe)
        if error := self.errors.get(len(self.recipes)):
            raise error
        metrics = dict.fromkeys(measured_metrics(recipe.evaluation), 0.0) | self.figures(recipe)
        for epoch, share in enumerate((0.5, 0.75, 1.0)) if trial is not None else ():
            trial.report(metrics["recall@5"] * share, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned("pruned")
        return metrics | {"bias_removal": 0.5, "popularity": 0.0, "epochs": 3}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> TrialScript:
    script = TrialScript()
    monkeypatch.setattr(study, "train_trial", lambda *arguments: script.train_trial(*arguments))
    monkeypatch.setattr("gc.collect", lambda: 0)  # these trials leave nothing to collect
    return script


def job(folder: Path, ranges: dict[str, Any] = RANGE, **more: Any) -> Recipe:
    """`tiny.RECIPE` with a section `tune`."""
    tree = load_recipe(tiny.write_job(folder / "job")).model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Recipe.model_validate(tree | {"tune": {"ranges": ranges, "trials": 6, **more}})


def job_file(folder: Path) -> Path:
    return tiny.write_job(folder, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"{T}" = {{ low = 0.1, high = 1.0 }}\n')


def figures(result: TuneResult, name: str) -> np.ndarray:
    """Return a metric of the complete trials, in order."""
    trials = [trial.user_attrs for trial in result.study.trials]
    return np.array([attributes["figures"][name] for attributes in trials if "figures" in attributes])


def states(result: TuneResult) -> list[str]:
    return [trial.state.name for trial in result.study.trials]


def test_best_recipe_is_written_after_the_recipe_s_own_values(tmp_path: Path, script: TrialScript) -> None:
    recipe, (reporter, text) = job(tmp_path), tiny.record_output()

    result = tune(recipe, tmp_path / "out", reporter)

    temperatures = np.array([trial.params[T] for trial in result.study.trials])
    assert temperatures[0] == recipe.model.temperature == 0.1, "the recipe itself comes first"
    assert ((temperatures >= 0.1) & (temperatures <= 1)).all()
    assert len(set(temperatures)) == len(script.recipes) == 6
    best = temperatures[np.abs(temperatures - 0.7).argmin()]
    assert result.recipe == recipe.model_copy(
        update={"tune": None, "model": recipe.model.model_copy(update={"temperature": best})}
    )
    again = load_recipe(tmp_path / "out" / "best.toml")
    assert again.model_dump(exclude={"data"}) == result.recipe.model_dump(exclude={"data"})
    assert again.data.train.resolve() == recipe.data.train.resolve()  # type: ignore[union-attr]
    summary = f"recall@5 {figures(result, 'recall@5').max():.4f} at λ = 0.5"
    assert summary in (tmp_path / "out" / "best.toml").read_text().split("\n\n")[0]
    assert summary in text.getvalue().replace("\n", " ")


@pytest.mark.usefixtures("script")
def test_best_trial_is_within_constraints(tmp_path: Path) -> None:
    """With at least .3 for the tail, T is at most .4 and recall at most .4, while T = .7 has .7."""
    result = tune(job(tmp_path, constraints={"recall@5/tail": 0.3}, trials=12), tmp_path / "out")

    recall, tail = figures(result, "recall@5"), figures(result, "recall@5/tail")
    assert tail[recall.argmax()] < 0.3
    assert recall[result.best.number] == recall[tail >= 0.3].max()
    assert result.best.params[T] <= 0.4


@pytest.mark.usefixtures("script")
def test_nearest_trial_is_chosen_if_none_is_within_constraints(tmp_path: Path) -> None:
    reporter, text = tiny.record_output()
    limits = {"recall@5/tail": 0.6, "gini@5": 0.2}

    result = tune(job(tmp_path, constraints=limits), tmp_path / "out", reporter)

    missed = np.maximum(0.6 - figures(result, "recall@5/tail"), 0) + np.maximum(figures(result, "gini@5") - 0.2, 0)
    assert sum(result.best.constraints.values()) == pytest.approx(missed.min())
    assert f"No trial meets tune.constraints on valid: the nearest misses by {missed.min():.4f}" in text.getvalue()


@pytest.mark.usefixtures("script")
def test_several_objectives_have_a_front_and_a_best_first_objective(tmp_path: Path) -> None:
    recipe = job(tmp_path, objectives=["recall@5", "gini@5", "coverage@5"], trials=12)

    result = tune(recipe, tmp_path / "out")

    points = np.stack([figures(result, "recall@5"), -figures(result, "gini@5"), figures(result, "coverage@5")], 1)
    beaten = [any((other >= point).all() and (other > point).any() for other in points) for point in points]
    assert {trial.number for trial in result.study.best_trials} == set(np.flatnonzero(~np.array(beaten)))
    assert result.best.number == points[:, 0].argmax()


def test_refused_trials_keep_their_reasons(tmp_path: Path, script: TrialScript) -> None:
    """Trials are refused by the recipe or by training; another error ends `tune`, and a later call continues."""
    pairs = {"loss.hits": {"choices": ["mask", "mask_known"]}, "training.accumulate": {"choices": [1, 2]}}
    script.errors = {2: DataError("training: expected a finite loss, found inf"), 4: MemoryError("too much")}
    recipe = job(tmp_path, RANGE | pairs, trials=12)

    with pytest.raises(MemoryError):
        tune(recipe, tmp_path / "out")
    result = tune(recipe, tmp_path / "out")

    trials = result.study.trials
    reasons = [trial.user_attrs.get("refused", "") for trial in trials]
    both = [trial.params["loss.hits"] == "mask_known" and trial.params["training.accumulate"] == 2 for trial in trials]
    assert ["training.accumulate: expected 1 with loss.hits 'mask_known'" in reason for reason in reasons] == both
    assert any(both)
    assert {"training: expected a finite loss, found inf", "MemoryError: too much"} < {*reasons}
    assert len(trials) == 12
    assert [state == "FAIL" for state in states(result)] == [bool(reason) for reason in reasons]


def test_refused_trials_alone_are_an_error(
    tmp_path: Path, script: TrialScript, capsys: pytest.CaptureFixture[str]
) -> None:
    script.errors = {i: DataError("training: no") for i in range(1, 99)}

    code, _, errors = command(capsys, "tune", job_file(tmp_path), "--out", tmp_path / "out", "--set", "tune.trials=3")

    assert code == 2
    assert errors.endswith("tune: expected trials that can be trained, found none of 3; training: no\n")
    with pytest.raises(TrainerError, match="found none of 3"):
        tune(tmp_path / "recipe.toml", tmp_path / "out", trials=3)
    assert len(script.recipes) == 3


@pytest.mark.parametrize(
    ("more", "pruned"),
    [
        ({}, 3),
        ({"constraints": {"recall@5/tail": 0.0}}, 0),  # which validations do not measure
        ({"objectives": ["recall@5", "gini@5"]}, 0),
    ],
)
def test_trials_below_the_median_are_pruned(
    tmp_path: Path, script: TrialScript, more: dict[str, Any], pruned: int
) -> None:
    """Recall halves from trial to trial: from the sixth on, five complete ones are all better."""
    script.figures = lambda _: {"recall@5": 0.5 ** len(script.recipes)}

    result = tune(job(tmp_path, trials=8, **more), tmp_path / "out")

    assert states(result) == ["COMPLETE"] * (8 - pruned) + ["PRUNED"] * pruned
    assert result.best.number == 0


def test_ctrl_c_leaves_the_best_recipe_and_the_same_command_continues(
    tmp_path: Path, script: TrialScript, capsys: pytest.CaptureFixture[str]
) -> None:
    script.errors = {1: KeyboardInterrupt(), 4: KeyboardInterrupt()}
    words = ("tune", job_file(tmp_path), "--out", tmp_path / "out", "--set", "tune.trials=3")

    assert [command(capsys, *words)[0] for _ in range(2)] == [130, 130]
    assert (tmp_path / "out/best.toml").is_file()
    assert command(capsys, *words)[0] == 0
    temperatures = [recipe.model.temperature for recipe in script.recipes]
    assert temperatures[:2] == [0.1, 0.1], "the recipe's own values, again"
    assert temperatures[3] == temperatures[4]
    assert len(temperatures) == 5


@pytest.mark.nightly
def test_larger_trials_continue_a_study_and_the_seed_decides(tmp_path: Path, script: TrialScript) -> None:
    recipe = job(tmp_path)
    for trials in (3, 3, 6):
        result = tune(recipe, tmp_path / "out", trials=trials)
    assert len(script.recipes) == 6

    again = tune(job(tmp_path), tmp_path / "again")
    other = tune(job(tmp_path).model_copy(update={"seed": 1}), tmp_path / "other")
    params = [[trial.params for trial in tuned.study.trials] for tuned in (result, again, other)]
    assert params[0] == params[1]
    assert params[0][1:] != params[2][1:]


def test_processes_share_a_study(tmp_path: Path, script: TrialScript) -> None:
    """Threads stand for them: each opens the storage itself, and no trial is made twice."""
    recipe, url = job(tmp_path, trials=8), f"sqlite:///{tmp_path}/shared.db"
    tune(recipe, tmp_path / "first", storage=url, trials=1)
    threads = [threading.Thread(target=tune, args=(recipe, tmp_path / name), kwargs={"storage": url}) for name in "ab"]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    shared = optuna.load_study(study_name="tiny", storage=url)
    assert 8 <= len(shared.trials) <= 9, "one may have begun its last as the other ended"
    assert len({trial.params[T] for trial in shared.trials}) == len(shared.trials) == len(script.recipes)
    assert (tmp_path / "a/best.toml").is_file()
    assert (tmp_path / "b/best.toml").is_file()


def test_another_recipe_or_other_data_are_refused(tmp_path: Path, script: TrialScript) -> None:
    recipe, out = job(tmp_path, trials=2), tmp_path / "out"
    tune(recipe, out)
    other = recipe.model_copy(update={"training": recipe.training.model_copy(update={"epochs": 4})})

    with pytest.raises(RecipeError, match=r"received another training\.epochs 4 \(there: 3\): choose another --out"):
        tune(other, out)
    with pytest.raises(RecipeError, match=r"another tune\.ranges\.model\.temperature\.high 0\.5 \(there: 1\.0\)"):
        tune(job(tmp_path, {T: {"low": 0.1, "high": 0.5}}), out)
    moved = recipe.model_copy(update={"name": "moved"})
    shutil.copytree(tmp_path / "job", tmp_path / "elsewhere")
    data = recipe.data.model_copy(update={"train": tmp_path / "elsewhere" / "interactions.parquet"})
    result = tune(moved.model_copy(update={"data": data}), out)
    assert len(result.study.trials) == 2, "names and paths may change"
    pq.write_table(tiny.clustered(users=40, items=16, per_user=8, seed=9), tmp_path / "job" / "interactions.parquet")
    with pytest.raises(RecipeError, match=r"expected the recipe and data that .*, received another data "):
        tune(recipe, out)
    with pytest.raises(RecipeError, match=r"job: expected a study \(study\.db\) to go on with, or a path that is free"):
        tune(recipe, tmp_path / "job")
    assert len(script.recipes) == 2


def test_unmeasurable_trials_are_refused_before_a_study_is_created(tmp_path: Path, script: TrialScript) -> None:
    recipe = job(tmp_path)
    ks = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"ks": [5, 99]}),
                                   "tune": recipe.tune.model_copy(update={"objectives": ["recall@99"]})})  # type: ignore[union-attr]  # fmt: skip
    with pytest.raises(DataError, match="tune: expected metrics at a k of at most 16, all labels, received recall@99"):
        tune(ks, tmp_path / "out")
    data = recipe.data.model_copy(update={"split": None})
    with pytest.raises(DataError, match="tune: expected validation pairs to measure trials on, found none"):
        tune(recipe.model_copy(update={"data": data}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert script.recipes == []


# Real trainings


def write_splits(folder: Path, *, permuted: bool = False) -> Recipe:
    """Interactions in a file a split, test's labels in another order if `permuted`: not one pair of it stays true."""
    rows = tiny.clustered(users=40, items=16, per_user=8, seed=0).sort_by("timestamp")
    folder.mkdir()
    for name, part in (("train", slice(0, 240)), ("valid", slice(240, 280)), ("test", slice(280, 320))):
        columns = {column: rows[column].to_numpy()[part] for column in rows.column_names}
        if permuted and name == "test":
            columns["item_id"] = np.roll(np.sort(columns["item_id"]), 20)[np.argsort(np.argsort(columns["item_id"]))]
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "valid", "test")}
    tune = {"ranges": RANGE | {"loss.weight": {"choices": ["unit", "importance"]}}, "trials": 2}
    return tiny.recipe(data={**files, "timestamp": "timestamp"}, training={"epochs": 2, "batch_size": 32},
                       evaluation={"baselines": []}, tune=tune)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.nightly
def test_studies_do_not_depend_on_test_pairs(tmp_path: Path) -> None:
    """Other test pairs give the same study; `fit` then has on valid what the trial had."""
    recipe, other = write_splits(tmp_path / "true"), write_splits(tmp_path / "false", permuted=True)

    true, false = tune(recipe, tmp_path / "study"), tune(other, tmp_path / "other")

    metrics = [[trial.user_attrs["figures"] for trial in result.study.trials] for result in (true, false)]
    assert metrics[0] == metrics[1]
    assert metrics[0][0] != metrics[0][1]
    best = load_recipe(tmp_path / "study" / "best.toml")
    without_test = best.model_copy(update={"data": best.data.model_copy(update={"test": None})})
    bundle = fit(without_test, tmp_path / "bundle")
    figures = true.best.user_attrs["figures"]
    default = bundle.manifest.bias_removal.default, bundle.manifest.popularity.default
    assert default == (figures["bias_removal"], figures["popularity"])
    curve = tiny.read_curve(tmp_path / "bundle")
    assert curve.curve_split == "valid"
    (point,) = [point for point in curve.curve if (point.bias_removal, point.popularity) == default]
    assert {name: interval.value for name, interval in point.metrics.items()}.items() <= figures.items()
    validations = list(json.loads((tmp_path / "bundle/history.json").read_text())["metrics"].values())
    assert list(true.best.intermediate_values.values()) == validations[:-1]  # no epoch follows the last


KILLED = """
import os, signal, sys
count = int(sys.argv.pop(1))
import longtail.trainer.train
from longtail.trainer import study
study.HEARTBEAT = 1
batches, count_so_far = longtail.trainer.train.epoch_batches, 0
def dying(*arguments, **more):
    global count_so_far
    for batch in batches(*arguments, **more):
        count_so_far += 1
        if count_so_far == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
longtail.trainer.train.epoch_batches = dying
from longtail.trainer.cli import main
main()
"""
"""`longtail-train`, killed when it takes its n-th batch."""


@pytest.mark.nightly
@pytest.mark.process
def test_killed_trial_is_retried_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven steps an epoch, two epochs a trial: killed in the second trial's second epoch, which has a checkpoint."""
    words = ["tune", str(job_file(tmp_path)), "--out", str(tmp_path / "out"), "--set", "tune.trials=2"]
    words += ["--set", "training.epochs=2"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(14 + 10), *words], timeout=240, text=True,
        env=os.environ | {"KERAS_BACKEND": "tensorflow"}, capture_output=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    monkeypatch.setattr(study, "HEARTBEAT", 1)
    time.sleep(5)  # a trial counts as dead after three heartbeats without a sign of it
    code, out, errors = command(capsys, *words)

    assert (code, errors) == (0, "")
    assert "epoch   2" in out
    assert "epoch   1" not in out, "it goes on at its checkpoint"
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'out' / FILE}").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trials[1].params == trials[2].params
