"""Arrow files whose columns lie there as they are read: mapped, they take no memory of a process' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Array, Int32
from longtail.bundle.errors import BundleCorruptError, require


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table, each of its columns in one piece."""
    table = table.combine_chunks()
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as written:
        written.write_table(table)


def map_table(path: Path, *, verify: bool = True) -> pa.Table:
    """Map what `write_table` wrote: its pages are shared with every process that does so.

    Args:
        path: an Arrow file.
        verify: whether to read all of it, and see that no text ends beyond the file.

    Raises:
        BundleCorruptError: no Arrow file, or one whose columns point beyond it.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=verify)
    except (pa.ArrowException, ValueError) as error:
        raise BundleCorruptError(f"{path}: expected an Arrow file: {error}") from error
    return table


def in_one_piece(column: pa.ChunkedArray) -> pa.Array:
    """A column [n] as one array [n]; Arrow's own `combine_chunks` copies one that is in one piece already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def numbers_of(table: pa.Table, name: str, type_: npt.DTypeLike, rows: int) -> Array:
    """A column of numbers as it lies in the file, [rows].

    Args:
        table: of `map_table`.
        name: the column's.
        type_: of its numbers.
        rows: how many there must be.

    Raises:
        BundleInvariantError: no such column, of another type or length, or with nulls.
    """
    expected = pa.from_numpy_dtype(np.dtype(type_))
    found = table.schema.field(name).type if name in table.column_names else "no such column"
    require(f"mapped column {name!r}", found == expected, expected, found)
    column = in_one_piece(table[name])
    missing = f"{len(column)} rows, {column.null_count} nulls"
    require(f"mapped column {name!r}", missing == f"{rows} rows, 0 nulls", f"{rows} rows, 0 nulls", missing)
    numbers: Array = column.to_numpy(zero_copy_only=False)
    return numbers


def check_rows(name: str, rows_L: Int32) -> None:
    """Check that int32 [L] are the rows 0 … L − 1 in some order; raises BundleInvariantError."""
    seen_L = np.zeros(len(rows_L), np.bool_)
    inside = bool(((rows_L >= 0) & (rows_L < len(rows_L))).all())
    if inside:
        seen_L[rows_L] = True
    require(name, inside and bool(seen_L.all()), f"rows 0 to {len(rows_L) - 1}, once each", "others")
