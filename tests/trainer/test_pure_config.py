"""Recipes are read, and the command's help is shown, where no training framework can be imported."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from longtail.trainer import LOSSES, SAMPLERS, WEIGHTS
from tests.trainer import tiny

pytestmark = pytest.mark.process

_PROGRAM = """
import sys

BLOCKED = (
    "keras", "tensorflow", "tensorboard", "jax", "jaxlib", "scipy", "matplotlib", "onnx", "onnxruntime", "tf2onnx",
    "optuna",
)

class BlockedImports:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, BlockedImports())
"""

_COMMAND = """
from longtail.trainer import cli

sys.argv = ["longtail-train", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as ended:
    code = ended.code or 0
else:
    code = 0
"""


def run_blocked(program: str, *arguments: object) -> str:
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM + program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_recipe_is_read_without_a_training_framework(tmp_path: Path) -> None:
    program = "from longtail.trainer import LOSSES, SAMPLERS, load_recipe; print(load_recipe(sys.argv[1]).loss)"
    assert run_blocked(program, tiny.write_job(tmp_path)) == "softmax · in_batch · unit\n"


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["evaluate", "--help"]])
def test_help_is_shown_without_a_training_framework(arguments: list[str]) -> None:
    assert "Usage: " in run_blocked(_COMMAND + "assert code == 0", *arguments)


def test_a_recipe_is_checked_without_a_training_framework(tmp_path: Path) -> None:
    recipe = tiny.write_job(tmp_path)

    assert "fit would train" in run_blocked(_COMMAND + "assert code == 0", "check", recipe)


def test_docstrings_explain_parameters_of_rows() -> None:
    """The reference lists a row's parameters from the `Args` of its function."""
    for function in (*SAMPLERS.values(), *WEIGHTS.values(), *(family.loss for family in LOSSES.values())):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                assert f"        {parameter.name}: " in (function.__doc__ or ""), (function, parameter)
