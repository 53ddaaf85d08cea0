"""A study, trial by trial: what is tried, kept, chosen and written. Trainings here are formulas of the recipe's values;
the last tests have real ones.
"""

from __future__ import annotations

import csv
import io
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
from rich.console import Console

from longtail.trainer import DataError, RecipeError, Reporter, TrainerError, TuneResult, fit, load_recipe, tune
from longtail.trainer.config import Recipe
from longtail.trainer.config.tune import measured_metrics
from longtail.trainer.history import TrainingHistory
from longtail.trainer.tuning import study
from longtail.trainer.tuning.study import FILE
from tests.trainer import tiny
from tests.trainer.test_cli import run as command

T = "model.temperature"
RANGE = {T: {"low": 0.1, "high": 1.0}}


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
    numbers: list[str] = field(default_factory=list)

    def found(self, search: Any, recipe: Recipe, number: str, judge: Any) -> dict[str, Any]:
        search._data_of(recipe)
        self.recipes.append(recipe)
        self.numbers.append(number)
        if error := self.at.get(len(self.recipes)):
            raise error
        metrics = dict.fromkeys(measured_metrics(recipe.evaluation), 0.0) | self.figures(recipe)
        history = TrainingHistory()
        for epoch, share in enumerate((0.5, 0.75, 1.0), 1):
            judge(history)
            history.metrics[epoch] = metrics["recall@5"] * share
        judge(history)
        return {"metrics": metrics, "bias_removal": 0.5, "popularity": 0.0, "epochs": 3, "seconds": 1.0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(study._Search, "found", lambda search, *rest: made.found(search, *rest))
    monkeypatch.setattr("gc.collect", lambda: 0)  # after every trial, which here has left nothing
    return made


def job(folder: Path, ranges: dict[str, Any] = RANGE, **more: Any) -> Recipe:
    """`tiny.RECIPE` with a section `tune`."""
    tree = load_recipe(tiny.write_job(folder / "job")).model_dump(mode="json", by_alias=True, exclude_unset=True)
    return Recipe.model_validate(tree | {"tune": {"ranges": ranges, "trials": 6, **more}})


def job_file(folder: Path) -> Path:
    return tiny.write_job(folder, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"{T}" = {{ low = 0.1, high = 1.0 }}\n')


def table(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def figures(result: TuneResult, name: str) -> np.ndarray:
    """Of the complete trials, in order."""
    return np.array([t.user_attrs["found"]["metrics"][name] for t in result.trials if "found" in t.user_attrs])


def screen() -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    return Reporter(Console(file=text, width=200)), text


def test_the_best_is_found_written_and_read_again(tmp_path: Path, script: Script) -> None:
    recipe, (reporter, text) = job(tmp_path), screen()

    result = tune(recipe, tmp_path / "out", reporter)

    temperatures = np.array([trial.params[T] for trial in result.trials])
    assert temperatures[0] == recipe.model.temperature == 0.1, "the recipe itself comes first"
    assert ((temperatures >= 0.1) & (temperatures <= 1)).all()
    assert len(set(temperatures)) == 6
    best = temperatures[np.abs(temperatures - 0.7).argmin()]
    assert result.recipe == recipe.model_copy(
        update={"tune": None, "model": recipe.model.model_copy(update={"temperature": best})}
    )
    again = load_recipe(tmp_path / "out" / "best.toml")
    assert again.model_dump(exclude={"data"}) == result.recipe.model_dump(exclude={"data"})
    assert again.data.train.resolve() == recipe.data.train.resolve()  # type: ignore[union-attr]
    said = f"recall@5 {figures(result, 'recall@5').max():.4f} at λ = 0.5"
    assert said in (tmp_path / "out" / "best.toml").read_text().split("\n\n")[0]
    assert said in text.getvalue().replace("\n", " ")
    assert (result.front, list((tmp_path / "out").glob("front/*"))) == ([], [])
    assert [float(row[T]) for row in table(tmp_path / "out")] == temperatures.tolist()
    assert len(script.recipes) == 6


def test_the_chosen_trial_is_within_the_constraint_that_the_best_breaks(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    """Of the tail at least .3: T at most .4, where recall is at most .4, while T = .7 has .7."""
    result = tune(job(tmp_path, constraints={"recall@5/tail": {"at_least": 0.3}}, trials=12), tmp_path / "out")

    recall, tail = figures(result, "recall@5"), figures(result, "recall@5/tail")
    assert tail[recall.argmax()] < 0.3
    assert recall[result.best.number] == recall[tail >= 0.3].max()
    assert result.best.params[T] <= 0.4
    assert [float(row["missed"]) for row in table(tmp_path / "out")] == pytest.approx(np.maximum(0.3 - tail, 0))


def test_the_nearest_is_chosen_where_no_trial_is_within(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    reporter, text = screen()
    limits = {"recall@5/tail": {"at_least": 0.6}, "gini@5": {"at_most": 0.2}}

    result = tune(job(tmp_path, constraints=limits), tmp_path / "out", reporter)

    missed = np.maximum(0.6 - figures(result, "recall@5/tail"), 0) + np.maximum(figures(result, "gini@5") - 0.2, 0)
    assert sum(result.best.constraints.values()) == pytest.approx(missed.min())
    assert f"No trial meets tune.constraints on valid: the nearest misses by {missed.min():.4f}" in text.getvalue()


def test_the_front_of_several_objectives_is_what_no_trial_beats(tmp_path: Path, script: Script) -> None:  # noqa: ARG001
    recipe = job(tmp_path, objectives=["recall@5", "gini@5", "coverage@5"], trials=12)

    result = tune(recipe, tmp_path / "out")

    points = np.stack([figures(result, "recall@5"), -figures(result, "gini@5"), figures(result, "coverage@5")], 1)
    beaten = [any((other >= one).all() and (other > one).any() for other in points) for one in points]
    assert {t.number for t in result.front} == {at for at, is_beaten in enumerate(beaten) if not is_beaten}
    assert 1 < len(result.front) < 12
    assert result.best.number == points[:, 0].argmax()
    assert {path.name for path in (tmp_path / "out/front").iterdir()} == {
        f"trial-{t.number}.toml" for t in result.front
    }


def test_refusals_are_kept_with_their_reasons(tmp_path: Path, script: Script) -> None:
    """A combination that the recipe refuses, what training refuses, and a crash, which leaves `tune`."""
    refusing = {"loss.hits": {"choices": ["mask", "mask_known"]}, "training.accumulate": {"choices": [1, 2]}}
    script.at = {2: DataError("training: expected a finite loss, found inf"), 4: MemoryError("too much")}
    recipe = job(tmp_path, RANGE | refusing, trials=12)

    with pytest.raises(MemoryError):
        tune(recipe, tmp_path / "out")
    result = tune(recipe, tmp_path / "out")

    assert len(result.trials) == 12
    reasons = [row["reason"] for row in table(tmp_path / "out")]
    both = [row["loss.hits"] == '"mask_known"' and row["training.accumulate"] == "2" for row in table(tmp_path / "out")]
    assert ["training.accumulate: expected 1 with loss.hits 'mask_known'" in reason for reason in reasons] == both
    assert any(both)
    assert {"training: expected a finite loss, found inf", "MemoryError: too much"} < {*reasons}
    assert {row["state"] for row in table(tmp_path / "out")} == {"complete", "refused"}


def test_nothing_but_refusals_is_an_error(tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.at = {at: DataError("training: no") for at in range(1, 99)}

    code, _, errors = command(capsys, "tune", job_file(tmp_path), "--out", tmp_path / "out", "--trials", 3)

    assert code == 2
    assert errors.endswith("tune: expected trials that can be trained, found none of 3; training: no\n")
    with pytest.raises(TrainerError, match="found none of 3"):
        tune(tmp_path / "recipe.toml", tmp_path / "out", trials=3)
    assert len(script.recipes) == 3


@pytest.mark.parametrize(
    ("more", "states"),
    [
        ({}, ["complete"] * 5 + ["pruned"] * 3),
        ({"prune": False}, ["complete"] * 8),
        ({"constraints": {"recall@5/tail": {"at_least": 0.0}}}, ["complete"] * 8),  # which the pruner does not know
        ({"objectives": ["recall@5", "gini@5"]}, ["complete"] * 8),
    ],
)
def test_what_validates_below_the_median_is_pruned(
    tmp_path: Path, script: Script, more: dict[str, Any], states: list[str]
) -> None:
    """Recall halves from trial to trial: from the sixth on, five complete ones are all better."""
    script.figures = lambda _: {"recall@5": 0.5 ** len(script.recipes)}

    result = tune(job(tmp_path, trials=8, **more), tmp_path / "out")

    assert [row["state"] for row in table(tmp_path / "out")] == states
    assert result.best.number == 0


def test_ctrl_c_writes_what_was_found_and_the_same_command_goes_on(
    tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.at = {1: KeyboardInterrupt(), 4: KeyboardInterrupt()}
    words = ("tune", job_file(tmp_path), "--out", tmp_path / "out", "--trials", 3)

    first, second, third = (command(capsys, *words) for _ in range(3))

    assert (first[0], second[0], third[0]) == (130, 130, 0)
    assert "Stopped after 0 of 3 trials" in first[1]
    assert "Stopped after 2 of 3 trials" in second[1]
    temperatures = [made.model.temperature for made in script.recipes]
    assert temperatures[:2] == [0.1, 0.1], "the recipe's own values, again"
    assert temperatures[3] == temperatures[4]
    assert script.numbers[0] == script.numbers[1], "where its checkpoint is"
    assert script.numbers[3] == script.numbers[4]
    assert [float(row[T]) for row in table(tmp_path / "out")] == [temperatures[at] for at in (1, 2, 4)]


@pytest.mark.nightly
def test_more_trials_go_on_where_fewer_ended_and_the_seed_decides(tmp_path: Path, script: Script) -> None:
    recipe = job(tmp_path)
    for trials in (3, 3, 6):
        result = tune(recipe, tmp_path / "out", trials=trials)
    assert len(script.recipes) == 6

    params = [[t.params for t in tune(job(tmp_path, seed=seed), tmp_path / str(seed)).trials] for seed in (0, 1)]
    assert [trial.params for trial in result.trials] == params[0]
    assert params[0][1:] != params[1][1:]


def test_several_processes_share_a_study(tmp_path: Path, script: Script) -> None:
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


def test_another_recipe_or_other_data_in_its_directory_are_refused(tmp_path: Path, script: Script) -> None:
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
    assert len(tune(moved.model_copy(update={"data": data}), out).trials) == 2, "names and places are not the study"
    pq.write_table(tiny.clustered(users=40, items=16, each=8, seed=9), tmp_path / "job" / "interactions.parquet")
    with pytest.raises(RecipeError, match=r"expected the recipe and data that .*, received another data "):
        tune(recipe, out)
    with pytest.raises(RecipeError, match=r"job: expected a study \(study\.db\) to go on with, or a path that is free"):
        tune(recipe, tmp_path / "job")
    assert len(script.recipes) == 2


def test_data_are_read_once_but_for_trials_that_read_others(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], study.read_dataset
    monkeypatch.setattr(study, "read_dataset", lambda recipe: reads.append(recipe) or read(recipe))
    tune(job(tmp_path), tmp_path / "out")
    assert (len(reads), len(script.recipes)) == (1, 6)

    reductions = {"data.reduction": {"choices": ["expand", "sample"]}}
    tune(job(tmp_path, reductions, trials=4), tmp_path / "reduction")
    assert {row["state"] for row in table(tmp_path / "reduction")} == {"complete"}
    log = str(tmp_path / "job" / "interactions.parquet")
    some = {"data.train": {"choices": [log, f"SELECT * FROM '{log}' WHERE user_id < 30"]}}
    tune(job(tmp_path, some, trials=6), tmp_path / "some")
    reasons = {row["data.train"]: row["reason"] for row in table(tmp_path / "some")}
    assert reasons.pop(json.dumps(log)) == ""
    assert "own 40 validation pairs over 16 labels, to compare trials, found 30 over 16" in "".join(reasons.values())


def test_what_cannot_be_measured_is_refused_before_anything_is_made(tmp_path: Path, script: Script) -> None:
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
    rows = tiny.clustered(users=40, items=16, each=8, seed=0).sort_by("timestamp")
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
def test_test_pairs_have_no_part_in_a_study(tmp_path: Path) -> None:
    """Other test pairs give the same study; `fit` then has on valid what the trial had."""
    recipe, other = write_splits(tmp_path / "true"), write_splits(tmp_path / "false", permuted=True)

    true, false = tune(recipe, tmp_path / "study"), tune(other, tmp_path / "other")

    metrics = [[t.user_attrs["found"]["metrics"] for t in result.trials] for result in (true, false)]
    assert metrics[0] == metrics[1]
    assert metrics[0][0] != metrics[0][1]
    best = load_recipe(tmp_path / "study" / "best.toml")
    without_test = best.model_copy(update={"data": best.data.model_copy(update={"test": None})})
    bundle = fit(without_test, tmp_path / "bundle")
    found = true.best.user_attrs["found"]
    default = bundle.manifest.bias_removal.default, bundle.manifest.popularity.default
    assert default == (found["bias_removal"], found["popularity"])
    curve = tiny.curve_of_metrics(tmp_path / "bundle")
    assert curve.curve_split == "valid"
    (point,) = [point for point in curve.curve if (point.bias_removal, point.popularity) == default]
    assert {name: figure.value for name, figure in point.metrics.items()} == found["metrics"]
    reported = list(true.best.intermediate_values.values())
    assert list(json.loads((tmp_path / "bundle/history.json").read_text())["metrics"].values()) == reported


KILLED = """
import os, signal, sys
count = int(sys.argv.pop(1))
import longtail.trainer.train
from longtail.trainer.tuning import study
study.HEARTBEAT = 1
batches, seen = longtail.trainer.train.epoch_batches, 0
def dying(*arguments, **more):
    global seen
    for batch in batches(*arguments, **more):
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch
longtail.trainer.train.epoch_batches = dying
from longtail.trainer.cli import main
main()
"""
"""`longtail-train`, killed when it takes its n-th batch."""


@pytest.mark.nightly
@pytest.mark.process
def test_values_of_a_killed_trial_are_tried_again_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven steps an epoch, two epochs a trial: killed in the second trial's second epoch, which has a checkpoint."""
    words = ["tune", str(job_file(tmp_path)), "--out", str(tmp_path / "out"), "--trials", "2"]
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
    assert [row["trial"] for row in table(tmp_path / "out")] == ["0", "2"]
