"""Data frames as tables of files, and answers as frames of the same library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longtail.tables import as_source, is_query

Source = Any
"""A frame of pandas, Polars, Arrow or DuckDB; or a file, directory, glob, URL or query of tables."""


def is_frame(source: Source) -> bool:
    """Return whether a source holds rows itself, instead of naming files."""
    return hasattr(source, "__arrow_c_stream__") or find_library(source) in ("duckdb", "pandas", "polars", "pyarrow")


def find_library(source: object) -> str:
    """Return the library of an object's type, such as `pandas`."""
    package = type(source).__module__.partition(".")[0]
    return "duckdb" if package == "_duckdb" else package


def as_arrow(frame: Source) -> pa.Table:
    """Convert a frame to an Arrow table, without the unnamed index of pandas.

    Raises:
        TypeError: the object is no frame, or a column holds values of several types.
    """
    try:
        if find_library(frame) == "pandas":
            table = pa.Table.from_pandas(frame)
            unnamed = [name for name in table.column_names if name.startswith("__index_level_")]
            return table.drop_columns(unnamed).replace_schema_metadata()
        if find_library(frame) == "polars":
            return (frame.collect() if hasattr(frame, "collect") else frame).to_arrow()
        return frame.to_arrow_table() if find_library(frame) == "duckdb" else pa.table(frame)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TypeError(f"a frame's columns must have one type each: {error}") from error


def write_frame(source: Source, path: Path) -> Path | str:
    """Write a frame as a Parquet file, and return its path; return any other source as a path, URL or query."""
    if not is_frame(source):
        return source if is_query(source) else as_source(source)
    pq.write_table(as_arrow(source), path)
    return path


@contextmanager
def as_sources(**sources: Source) -> Iterator[dict[str, Path | str]]:
    """Yield paths, URLs or queries of sources by name; frames are files of a temporary folder.

    Sources that are None are left out. Errors inside the block name `NAME.parquet` without the folder.
    """
    with TemporaryDirectory(prefix="longtail-") as folder:
        tables = {name: source for name, source in sources.items() if source is not None}
        try:
            yield {name: write_frame(source, Path(folder, f"{name}.parquet")) for name, source in tables.items()}
        except Exception as error:
            error.args = tuple(
                argument.replace(f"{folder}/", "") if isinstance(argument, str) else argument for argument in error.args
            )
            raise


def like(source: Source, table: pa.Table) -> Any:
    """Convert a table to a frame of the library of a source; of other sources to pandas if installed, else Arrow."""
    library = find_library(source) if is_frame(source) else "pandas" if find_spec("pandas") else "pyarrow"
    if library == "pandas":
        return table.to_pandas()
    if library == "polars":
        import polars

        return polars.from_arrow(table)
    if library == "duckdb":
        import duckdb

        return duckdb.from_arrow(table)
    return table
