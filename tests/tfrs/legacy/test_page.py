"""What docs/tfrs.md shows of this door exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import longtail.trainer.tfrs

PAGE = (Path(__file__).parents[3] / "docs" / "tfrs.md").read_text()


def test_names_and_arguments_of_the_page_exist() -> None:
    (block,) = (block for block in re.findall(r"(?s)```python\n(.*?)```", PAGE) if "longtail.trainer.tfrs" in block)
    nodes = list(ast.walk(ast.parse(block)))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported <= set(longtail.trainer.tfrs.__all__)
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in imported]
    assert len(calls) == 4
    for call in calls:
        parameters = inspect.signature(getattr(longtail.trainer.tfrs, call.func.id)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(parameters)


def test_exported_names_exist() -> None:
    assert all(hasattr(longtail.trainer.tfrs, name) for name in longtail.trainer.tfrs.__all__)
