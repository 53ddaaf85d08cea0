"""The house rules: imports go one way, serving loads no training framework, and names say what they hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
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


VAGUE = {
    "among", "apart", "asked", "beside", "brought", "each", "found", "given", "held", "kept", "known", "left",
    "made", "one", "own", "place", "places", "said", "seen", "shown", "stands", "taken", "there", "told",
    "wanted", "where", "whole",
}  # fmt: skip
"""Names that do not say what they hold; the noun does: `hits`, `row`, `label_ids`, `path`."""
VAGUE_IN_TESTS = {
    "anew", "apart", "asked", "beside", "brought", "nobody", "place", "places", "said", "stands", "taken",
    "told", "wanted", "whatever",
}  # fmt: skip
ROOMS = (*MAY_IMPORT, "longtail")
WIDE_FUNCTIONS = {"__init__", "audit", "fit", "train"}
"""Functions that may have more than 8 parameters. This list only shrinks."""
MOST_IMPORTS, MEAN_IMPORTS = 39, 12.6


@cache
def parse_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Parse a file and return all nodes of its tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def list_sources(room: str) -> tuple[Path, ...]:
    """Return the Python files of a room. The rooms linked in `longtail` are not files of it."""
    return tuple(sorted((ROOT / room).glob("*.py" if room == "longtail" else "**/*.py")))


def list_imports(path: Path) -> Iterator[list[str]]:
    """Yield what a file imports, at its top or inside its functions, as the parts of its name."""
    for node in parse_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def list_bound_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names that a file binds, with their lines: variables, parameters, attributes, functions, classes."""
    for node in parse_nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno


def is_vague(name: str) -> bool:
    words = name.lower().strip("_").split("_")
    return "_".join(words) in VAGUE or not {"place", "places"}.isdisjoint(words)


def list_modules(room: str) -> dict[str, Path]:
    """Return every module of a room by its name below `longtail`; a package's name is that of its `__init__`."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in list_sources(room)}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in paths.items()}


@pytest.mark.parametrize("room", [*ROOMS, "benchmarks", "tests"])
def test_names_say_what_they_hold(room: str) -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in list_sources(room)
        for name, line in list_bound_names(path)
        if is_vague(name)
    ]
    assert vague == []


def test_names_of_tests_are_plain() -> None:
    names = [name for path in list_sources("tests") for name in re.findall(r"(?m)^ *def test_(\w+)", path.read_text())]
    vague = [name for name in names if not VAGUE_IN_TESTS.isdisjoint(name.split("_"))]
    assert vague == []


def test_a_class_name_has_one_meaning() -> None:
    counts = Counter(
        node.name
        for room in ROOMS
        for path in list_sources(room)
        for node in parse_nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == []


def test_functions_have_few_parameters() -> None:
    wide = {
        node.name
        for room in ROOMS
        for path in list_sources(room)
        for node in parse_nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if len({arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} - {"self", "cls"})
        > 8
    }
    assert wide <= WIDE_FUNCTIONS


def test_files_import_few_names() -> None:
    """Count `from` statements as one import each."""
    counts = {
        path: sum(
            len(node.names) if isinstance(node, ast.Import) else 1
            for node in parse_nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom)
        )
        for room in ROOMS
        for path in list_sources(room)
    }
    busiest = max(counts, key=counts.__getitem__)
    assert counts[busiest] <= MOST_IMPORTS, busiest
    mean = sum(counts.values()) / len(counts)
    assert mean <= MEAN_IMPORTS


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room: str) -> None:
    """From room to room, and among the folders of a room, of which none imports the room's own names."""
    imports: dict[str, set[str]] = {}
    for path in list_sources(room):
        part = path.relative_to(ROOT / room).with_suffix("").parts[0]
        for package, *names in list_imports(path):
            if package != "longtail":
                continue
            allowed = MAY_IMPORT[room] | ({"commands"} if path.stem in ("__main__", "cli") else set())
            assert names[0] in allowed, f"{path} imports {names}"
            if names[0] == room and names[1] != part:
                imports.setdefault(part, set()).add(names[1])
    # Raises CycleError, which names the circle.
    assert set(TopologicalSorter(imports).static_order()) >= imports.keys()


def test_modules_import_one_way() -> None:
    """Imports inside functions and for type checkers count too."""
    modules = {name: path for room in MAY_IMPORT for name, path in list_modules(room).items()}
    modules |= {path.stem: path for path in list_sources("longtail") if path.stem != "__init__"}
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        for package, *names in list_imports(path):
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
def test_imports_load_no_other_framework(program: str, blocked: tuple[str, ...]) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked})); {program}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.process  # TensorFlow's import starts one
@pytest.mark.parametrize("room", MAY_IMPORT)
def test_exported_names_exist(room: str) -> None:
    module = import_module(f"longtail.{room}")
    for name in module.__all__:
        assert hasattr(module, name), f"{room}.__all__ names {name!r}"


def test_long_files_exist() -> None:
    assert [name for name in LONG_FILES if not (HERE / name).is_file()] == []
