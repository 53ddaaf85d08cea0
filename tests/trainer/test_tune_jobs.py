"""Studies of real trainings: what they may read, and processes killed in the middle of a trial."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer import Recipe, fit, tune
from longtail.trainer.tuning.study import FILE
from tests.trainer import tiny

RANGES = {"model.temperature": {"low": 0.1, "high": 1.0}, "loss.weight": {"choices": ["unit", "importance"]}}


def write_splits(folder: Path, *, permuted: bool = False) -> None:
    """Interactions in a file a split, test's labels in another order if `permuted`: not one pair of it stays true."""
    table = tiny.clustered(users=40, items=16, each=8, seed=0).sort_by("timestamp")
    folder.mkdir()
    for name, rows in (("train", slice(0, 240)), ("valid", slice(240, 280)), ("test", slice(280, 320))):
        columns = {column: table[column].to_numpy()[rows] for column in table.column_names}
        if permuted and name == "test":
            columns["item_id"] = np.roll(np.sort(columns["item_id"]), 20)[np.argsort(np.argsort(columns["item_id"]))]
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def recipe(folder: Path, *, test: bool = True, **sections: Any) -> Recipe:
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "valid", *(["test"] if test else []))}
    tune = {"ranges": RANGES, "trials": 2}
    return tiny.recipe(data={**files, "timestamp": "timestamp"}, training={"epochs": 2, "batch_size": 32},
                       evaluation={"baselines": []}, tune=tune, **sections)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_test_pairs_have_no_part_in_a_study(tmp_path: Path) -> None:
    """Other test pairs and none at all give the same study; `fit` then has on valid what the trial had."""
    write_splits(tmp_path / "true")
    write_splits(tmp_path / "false", permuted=True)
    files = [pq.read_table(tmp_path / name / "test.parquet") for name in ("true", "false")]
    assert not (files[0]["item_id"].to_numpy() == files[1]["item_id"].to_numpy()).any()
    assert sorted(files[0]["item_id"].to_pylist()) == sorted(files[1]["item_id"].to_pylist())

    true = tune(recipe(tmp_path / "true"), tmp_path / "study")
    false = tune(recipe(tmp_path / "false"), tmp_path / "other")
    went_on = tune(recipe(tmp_path / "true", test=False), tmp_path / "study")

    for result in (false, went_on):
        assert [t.values for t in result.trials] == [t.values for t in true.trials]
        assert [t.figures for t in result.trials] == [t.figures for t in true.trials]
        assert result.recipe.model == true.recipe.model
    assert true.trials[0].figures != true.trials[1].figures
    bundle = fit(tmp_path / "study" / "best.toml", tmp_path / "bundle")
    found = true.best.found
    assert found is not None
    assert list(json.loads((tmp_path / "bundle/history.json").read_text())["metrics"].values()) == found.validated
    default = bundle.manifest.bias_removal.default, bundle.manifest.popularity.default
    assert default == found.setting
    curve = tiny.curve_of_metrics(tmp_path / "bundle")
    assert curve.curve_split == "valid"
    (point,) = [point for point in curve.curve if (point.bias_removal, point.popularity) == default]
    assert {name: figure.value for name, figure in point.metrics.items()} == found.metrics


TUNE = """
import os, signal, sys
count = int(sys.argv.pop(1))

import longtail.trainer.train
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
"""`longtail-train`, killed when it takes its n-th batch; never with 0."""


def start(recipe: Path, out: Path, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", TUNE, str(count), "tune", str(recipe), "--out", str(out), "--trials", "2"],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "trials.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.process
def test_a_study_killed_in_its_second_trial_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Seven steps an epoch, two epochs a trial: killed in the second trial's second epoch, which has a checkpoint."""
    text = tiny.RECIPE.replace("epochs = 3", "epochs = 2")
    text += '\n[tune.ranges]\n"model.temperature" = { low = 0.1, high = 1.0 }\n'
    recipe, out = tiny.write_job(tmp_path, recipe=text), tmp_path / "killed"
    uninterrupted = start(recipe, tmp_path / "whole", 0)

    killed = start(recipe, out, 14 + 10)
    killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL
    left = [trial.state.name for trial in optuna.load_study(study_name=None, storage=f"sqlite:///{out / FILE}").trials]
    assert left == ["COMPLETE", "RUNNING"]
    assert [path.name for path in (out / "work" / "0002").iterdir()] != []
    resumed = start(recipe, out, 0)
    said, errors = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, errors.decode()
    _, errors = uninterrupted.communicate(timeout=240)
    assert uninterrupted.returncode == 0, errors.decode()

    assert "2 trials over model.temperature" in said.decode()
    assert "1 of them are there" in said.decode()
    assert "Trial 2 of 2" in said.decode()
    assert "epoch   2" in said.decode()
    assert "epoch   1" not in said.decode(), "it goes on at its checkpoint"
    assert len(rows_of(out)) == 2
    assert rows_of(out) == rows_of(tmp_path / "whole")
    assert (out / "best.toml").read_text() == (tmp_path / "whole" / "best.toml").read_text()
    states = [
        trial.state.name for trial in optuna.load_study(study_name=None, storage=f"sqlite:///{out / FILE}").trials
    ]
    assert states == ["COMPLETE", "FAIL", "COMPLETE"]
