"""The rooms of index/ and the modules of bundle/: imports go one way, nothing goes round."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOOR = {"errors", "manifests"}
MAY_IMPORT = {
    "errors": set(),
    "manifests": set(),
    "search": FLOOR | {"search"},
    "construct": FLOOR | {"search", "construct"},
    "release": FLOOR | {"search", "construct", "release"},
    "options": set(),
    "cli": FLOOR | {"construct", "options", "release"},
    "__init__": FLOOR | {"search", "construct", "release"},
}
"""Module or folder of index/ → what it may import of index/."""


def imports(room: str) -> dict[str, set[str]]:
    """Every module of a room, by its path in it, and those of the same room that it imports anywhere in its text."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / room).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / room).with_suffix("").parts)
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: expected absolute imports"
                names = [node.module or ""]
                # `from longtail.index.release import building` names a module, too.
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            inside = [name.removeprefix(f"longtail.{room}.") for name in names if name.startswith(f"longtail.{room}.")]
            assert f"longtail.{room}" not in names, f"{path}: expected the module, found the room's own __init__"
            found[module] |= set(inside)
    return {module: {name for name in names if name in found} for module, names in found.items()}


def test_the_rooms_of_index_import_one_way() -> None:
    found = imports("index")
    for module, names in found.items():
        room = module.split(".")[0]
        assert {name.split(".")[0] for name in names} <= MAY_IMPORT[room], f"index.{module} imports {names}"
    assert {module.split(".")[0] for module in found} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", ["bundle", "index"])
def test_no_imports_go_round(room: str) -> None:
    found = imports(room)
    assert found["errors"] == set()
    # Raises CycleError, which names the circle.
    assert set(TopologicalSorter(found).static_order()) == found.keys()


@pytest.mark.process
def test_no_room_loads_keras_or_plots() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['keras', 'tensorflow', 'matplotlib']))\n"
        "import longtail.index, longtail.index.cli\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
