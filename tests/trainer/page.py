"""docs/extending.md: its examples are what is tested, each as the page shows it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longtail.trainer import register

_PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
_TEXT = re.sub(r"(?ms)^<!-- api: .*?^<!-- end -->$", "", _PAGE)  # signatures are no examples
PYTHON, TOML = (re.findall(rf"(?ms)^```{language}\n(.*?)^```", _TEXT) for language in ("python", "toml"))


def page_toml(part: str) -> str:
    """The one block of TOML that has this in it."""
    (match,) = [block for block in TOML if part in block]
    return match


@contextmanager
def restore_tables() -> Iterator[None]:
    """Leaves the tables of rows as it found them."""
    before = {kind: dict(table) for kind, table in register._TABLES.items()}
    try:
        yield
    finally:
        for kind, table in register._TABLES.items():
            table.clear()
            table.update(before[kind])


def registered() -> SimpleNamespace:
    """The page's names, its rows registered."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in PYTHON:
        exec(block, names)
    return SimpleNamespace(**names)


def write_package(site: Path) -> None:
    """A package `shop` of the page's code, installed with its entry points in a folder that may go on PYTHONPATH."""
    code, entries = "\n\n".join(PYTHON), tomllib.loads(page_toml("entry-points"))["project"]["entry-points"]
    modules = {value.split(":")[0] for rows in entries.values() for value in rows.values()}
    for path in (site / f"{module.replace('.', '/')}.py" for module in modules):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    (site / "shop" / "__init__.py").touch()
    information = site / "shop-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (information / "top_level.txt").write_text("shop\n")
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
             for group, rows in entries.items()]  # fmt: skip
    (information / "entry_points.txt").write_text("\n".join(lines))
