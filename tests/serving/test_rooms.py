"""The rooms of the service: which folder may import which, no circles, and a core that imports no web framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SERVING = Path(__file__).parents[2] / "serving"
PACKAGE = "longtail.serving"
# Folders, and modules at the top: `settings`, `errors` and `logs` are for all, the others are the commands.
MAY_IMPORT = {
    "errors": set(),
    "allocator": set(),
    "logs": set(),
    "settings": set(),
    "dashboard": set(),
    "monitoring": {"errors"},
    "events": {"errors"},
    "core": {"allocator", "errors", "settings", "monitoring", "events"},
    "http": {"errors", "settings", "logs", "monitoring", "events", "core", "dashboard"},
    "process": {"allocator", "errors", "settings", "logs", "monitoring", "core", "http"},
    "batch": {"errors", "settings", "core"},
    "check": {"core"},
    "compare": {"errors", "events", "monitoring", "core"},
    "export": {"errors", "events"},
    "cli": {"errors", "settings", "logs", "http", "process", "batch", "check", "compare", "export"},
    "__main__": {"cli"},
    "__init__": {"allocator", "errors", "settings", "core", "http"},
}
HTTP = {"asgiref", "fastapi", "fastapi_offline", "h11", "httptools", "httpx2", "starlette", "uvicorn"}


def imported_by(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            # `from package import module` is an import of the module, `from module import name` one of the module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> dict[str, Path]:
    """Every module of the room by its absolute name."""
    found = {}
    for path in SERVING.rglob("*.py"):
        parts = path.relative_to(SERVING).with_suffix("").parts
        found[".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """The module of the room that an imported name is, or is in; None for another room's."""
    while name.startswith(f"{PACKAGE}.") and name not in known:
        name = name.rpartition(".")[0]
    return name if name in known else None


def room_of(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0] or "__init__"


def graph() -> dict[str, set[str]]:
    """What every module of the room imports of the room."""
    known = modules()
    return {
        module: {found for name in imported_by(path) if (found := module_of(name, known)) not in (None, module)}
        for module, path in known.items()
    }


def test_every_folder_and_module_has_its_rule() -> None:
    assert {room_of(module) for module in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    found = {
        (module, imported)
        for module, all_imported in graph().items()
        if room_of(module) == room
        for imported in all_imported
        if room_of(imported) not in MAY_IMPORT[room] | {room}
    }
    assert found == set()


def test_the_rules_have_no_circle() -> None:
    assert list(TopologicalSorter(MAY_IMPORT).static_order())


def test_no_module_imports_itself_by_way_of_others() -> None:
    # Raises CycleError, which names the circle.
    assert len(list(TopologicalSorter(graph()).static_order())) == len(modules())


@pytest.mark.process
def test_core_and_monitoring_load_no_web_framework() -> None:
    rooms = sorted(module for module in modules() if room_of(module) in ("core", "monitoring"))
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(HTTP)}))\n"
        f"import {', '.join(rooms)}\n"
        "import longtail.serving\n"
        "try:\n    longtail.serving.create_app\n"
        "except ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=SERVING.parent, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "starlette.applications\n"), ended.stderr


@pytest.mark.process
def test_settings_load_neither_faiss_nor_fastapi() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['faiss', 'fastapi', 'onnxruntime', 'starlette']))\n"
        "import longtail.serving\n"
        "from longtail.serving import ServingError, Settings\n"
        "assert {*longtail.serving.__all__} <= {*dir(longtail.serving)}\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=SERVING.parent, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
