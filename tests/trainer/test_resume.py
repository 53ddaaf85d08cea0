"""Real processes, killed with SIGKILL in the middle of training and started again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import tiny

pytestmark = pytest.mark.process

FIT = """
import os, signal, sys
point, count = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]

def die_at(count):
    seen = 0
    def step():
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

if point == "checkpoint":
    rename, step = os.rename, die_at(count)
    os.rename = lambda *paths: ("/refit/" in str(paths[0]) and step(), rename(*paths))

from longtail.trainer import backend
from longtail.trainer.cli import main
from longtail.trainer.config import TrainingConfig
TrainingConfig.checkpoint_steps = 3
backend.compile_loss = lambda function: function
main()
"""
"""`longtail-train`, whose losses wait for no XLA as those of this process, killed when
the n-th checkpoint of its refit is written but not yet named."""


SETTINGS = (
    "training.epochs=2", "training.refit=true",
    'loss.sampler={name="mixed", negatives=8}', "optimizer.schedule=linear",
)  # fmt: skip


def run(point: str, count: int, recipe: Path, out: Path, *more: str) -> int:
    """Train in a process of its own, to the end or until it is killed; its exit code."""
    settings = [argument for override in (*SETTINGS, *more) for argument in ("--set", override)]
    ended = subprocess.run(
        [sys.executable, "-c", FIT, point, str(count), "fit", str(recipe), "--out", str(out), *settings],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
    return ended.returncode


SAME = ("embeddings.npy", "calibration_queries.npy", "labels.arrow", "metrics.json", "history.json")


@pytest.mark.nightly
def test_a_job_killed_in_its_refit_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """The job is killed while it writes a checkpoint, and then given the same command."""
    recipe = tiny.write_job(tmp_path)
    killed, work = tmp_path / "killed", tmp_path / "killed.work"
    assert run("none", 0, recipe, tmp_path / "whole") == 0

    assert run("checkpoint", 2, recipe, killed) == -signal.SIGKILL
    half, complete = sorted(path.name for path in (work / "refit").iterdir())
    assert (half.startswith(".latest-1."), complete) == (True, "latest-0")
    assert not killed.exists()
    assert run("none", 0, recipe, killed) == 0

    for name in SAME:
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [path.name for path in work.iterdir()] == ["logs"], "checkpoints go once the bundle is written"
