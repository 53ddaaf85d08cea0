"""The house rules: imports go one way, and serving never meets a training framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import HERE, LONG_FILES

ROOT = Path(__file__).parent.parent
ROOMS = ("bundle", "client", "commands", "index", "serving", "state", "tables", "trainer")
MAY_IMPORT = {
    "bundle": {"bundle"},
    "client": {"client"},
    "commands": {"commands"},
    "index": {"bundle", "index", "state", "tables"},
    "serving": {"bundle", "index", "serving", "state", "tables"},
    "state": {"bundle", "state"},
    "tables": {"bundle", "tables"},
    "trainer": {"bundle", "tables", "trainer"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            rooms = {module.split(".")[1] for module in modules if module.startswith("longtail.")}
            allowed = MAY_IMPORT[room] | ({"commands"} if path.name == "__main__.py" else set())
            assert rooms <= allowed, f"{path} imports {rooms}"


@pytest.mark.process
@pytest.mark.parametrize("room", ["bundle", "index", "serving"])
def test_no_training_framework_is_loaded(room: str) -> None:
    blocked = ("keras", "tensorflow", "jax", "torch", "longtail.trainer", "matplotlib")
    modules = "longtail.bundle" if room == "bundle" else f"longtail.{room}, longtail.{room}.cli"
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {modules}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.process  # TensorFlow's import starts one
@pytest.mark.parametrize("room", ROOMS)
def test_exported_names_exist(room: str) -> None:
    module = import_module(f"longtail.{room}")
    for name in module.__all__:
        assert hasattr(module, name), f"{room}.__all__ names {name!r}"


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONG_FILES if not (HERE / name).is_file()] == []
