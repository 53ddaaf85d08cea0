"""The tests that need TFRS in their own process, in TFRS' own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

# An environment of its own, which takes a minute to install, and a minute and a half to run.
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("which", ["not nightly", "nightly"])
def test_legacy_keras_suite_passes(tfrs_python: str, which: str) -> None:
    run = subprocess.run(
        [tfrs_python, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, "tests/tfrs/legacy"], cwd=ROOT,
        env=os.environ | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


@pytest.mark.nightly
def test_missing_legacy_keras_names_the_variable(tfrs_python: str) -> None:
    run = subprocess.run(
        [tfrs_python, "-c", "import longtail.trainer.tfrs"], cwd=ROOT, env=os.environ | {"TF_USE_LEGACY_KERAS": "0"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "install 'longtail[tfrs]' and set TF_USE_LEGACY_KERAS=1" in run.stderr.splitlines()[-1]
