"""Tables that are no single file: Delta, Iceberg, and queries over files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.tables.errors import DataError
from longtail.tables.files import DataFile, find_files
from longtail.tables.values import quoted

if TYPE_CHECKING:
    from longtail.tables.engine import Engine


def lake_reader(file: DataFile) -> Any:
    """Open a Delta or Iceberg table in its newest version, as what DuckDB reads."""
    try:
        if file.kind == "delta":
            from deltalake import DeltaTable

            return DeltaTable(file.path).to_pyarrow_dataset()
        from pyiceberg.table import StaticTable

        newest = max(Path(file.path, "metadata").glob("*.metadata.json"), key=lambda path: path.stat().st_mtime_ns)
        return StaticTable.from_metadata(str(newest)).scan().to_arrow()
    except ImportError as error:
        raise DataError(
            f"{file.name}: expected the extra `{file.kind}`, pip install 'longtail[{file.kind}]': {error}"
        ) from error


def opened_query(engine: Engine, file: DataFile, whole: Callable[[DataFile], str]) -> str:
    """Return a query as a table, after making each file that it names a view of the same name.

    Args:
        whole: returns the query of all columns of a file.
    """
    for name in sorted(engine.connection.get_table_names(file.path)):
        place = name if "://" in name else Path(name)
        parts = find_files(place, "table")
        query = " UNION ALL BY NAME ".join(whole(part) for part in parts)
        engine.run(f"CREATE OR REPLACE VIEW {quoted(name)} AS {query}")
    return f"({file.path.strip().rstrip(';')})"
