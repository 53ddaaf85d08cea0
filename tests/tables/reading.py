"""Reads whole tables for tests."""

from pathlib import Path
from typing import Any

from longtail.tables import find_files
from longtail.tables.database import Rejected, open_database
from longtail.tables.table import all_columns, read_table


def read_rows(sources: Path | str | list[Path | str]) -> list[dict[str, Any]]:
    """Return all rows of some sources, by the names of their columns."""
    return read(sources)[0]


def read(sources: Path | str | list[Path | str]) -> tuple[list[dict[str, Any]], dict[str, str], list[Rejected]]:
    """Return rows of some sources, the types of their columns, and rejected lines."""
    with open_database() as built:
        table = read_table(built, find_files(sources), all_columns, "places")
        rejected = [line for part in table.parts for line in part.rejected]
        return table.arrow([*table.kinds]).to_pylist(), table.kinds, rejected
