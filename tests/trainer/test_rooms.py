"""The rooms of trainer/: imports among its folders and modules go one way."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

TRAINER = Path(__file__).parents[2] / "trainer"
LEAVES = {"__main__", "errors", "backend", "history", "layers"}


def imports(trainer: Path) -> dict[str, set[str]]:
    """Every folder and top-level module of a trainer/, and those that it imports, TYPE_CHECKING and functions included.

    Raises AssertionError for an import that is relative, or of the package's own `__init__`.
    """
    nodes = {path.stem for path in trainer.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    found: dict[str, set[str]] = {node: set() for node in nodes}
    for path in trainer.rglob("*.py"):
        node = path.relative_to(trainer).with_suffix("").parts[0]
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                assert statement.level == 0, f"{path}: expected absolute imports"
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            else:
                continue
            for name in names:
                package, _, inside = name.partition("longtail.trainer")
                if package:
                    continue
                room = inside.removeprefix(".").split(".")[0]
                assert room in nodes, f"{path}: expected a module or folder of trainer/, found {name!r}"
                found[node].add(room)
    return {node: names - {node} for node, names in found.items()}


def test_the_rooms_of_trainer_import_one_way() -> None:
    found = imports(TRAINER)
    # Raises CycleError, which names the circle.
    assert set(TopologicalSorter(found).static_order()) == found.keys()
    assert {node for node, names in found.items() if not names} == LEAVES
    assert found["sampling"] == found["losses"] | {"errors"} == {"backend", "errors"}
    assert found["config"] == {"errors", "layers", "losses", "metric_registry", "optimizers", "register"}
