"""The house rules: imports go one way, and serving never meets a training framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import HERE, LONG_FILES

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "bundle": {"bundle", "extras"},
    "client": {"client", "plain"},
    "commands": {"__version__", "commands", "extras"},
    "index": {"bundle", "extras", "index", "state", "tables"},
    "serving": {"__version__", "bundle", "extras", "index", "serving", "state", "tables"},
    "state": {"bundle", "extras", "state"},
    "tables": {"bundle", "extras", "tables"},
    "trainer": {"bundle", "extras", "tables", "trainer"},
}
TRAINING = ("keras", "tensorflow", "jax", "torch", "longtail.trainer", "matplotlib")
WEB = ("fastapi", "h11", "httptools", "httpx2", "starlette", "uvicorn")
CORE = [
    f"longtail.serving.{room}.{path.stem}"
    for room in ("core", "monitoring")
    for path in sorted((ROOT / "serving" / room).glob("*.py"))
]


def imported_by(path: Path) -> Iterator[list[str]]:
    """Yield what a file imports, at its top or inside its functions, as the parts of its name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def modules_of(room: str) -> dict[str, Path]:
    """Return every module of a room by its name below `longtail`; a package's name is that of its `__init__`."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / room).rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room: str) -> None:
    """From room to room, and among the folders of a room, of which none imports the room's own names."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / room).rglob("*.py"):
        part = path.relative_to(ROOT / room).with_suffix("").parts[0]
        for package, *names in imported_by(path):
            if package != "longtail":
                continue
            allowed = MAY_IMPORT[room] | ({"commands"} if path.stem in ("__main__", "cli") else set())
            assert names[0] in allowed, f"{path} imports {names}"
            if names[0] == room and names[1] != part:
                found.setdefault(part, set()).add(names[1])
    # Raises CycleError, which names the circle.
    assert set(TopologicalSorter(found).static_order()) >= found.keys()


def test_modules_import_one_way() -> None:
    """Imports inside functions and for type checkers count too."""
    modules = {name: path for room in MAY_IMPORT for name, path in modules_of(room).items()}
    modules |= {path.stem: path for path in (ROOT / "longtail").glob("*.py") if path.stem != "__init__"}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        for package, *names in imported_by(path):
            while names and ".".join(names) not in modules:
                names = names[:-1]
            if package == "longtail" and names and ".".join(names) != name:
                imports.setdefault(name, set()).add(".".join(names))
    assert set(TopologicalSorter(imports).static_order()) >= imports.keys()


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "blocked"),
    [
        ("import longtail.bundle", TRAINING),
        ("import longtail.index.cli", (*TRAINING, "pyarrow.dataset")),  # which brings pandas
        ("import longtail.serving.cli", (*TRAINING, "pyarrow.dataset")),
        ("from longtail.serving import ServingError, Settings", (*WEB, "onnxruntime")),
        (f"import {', '.join(CORE)}", WEB),
    ],
)
def test_what_is_not_needed_is_not_loaded(program: str, blocked: tuple[str, ...]) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); {program}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.process  # TensorFlow's import starts one
@pytest.mark.parametrize("room", MAY_IMPORT)
def test_exported_names_exist(room: str) -> None:
    module = import_module(f"longtail.{room}")
    for name in module.__all__:
        assert hasattr(module, name), f"{room}.__all__ names {name!r}"


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONG_FILES if not (HERE / name).is_file()] == []
