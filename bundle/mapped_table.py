"""Arrow files whose columns lie there as they are read: mapped, they take no memory of a process' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Array
from longtail.bundle.errors import BundleCorruptError, require

ORDER = "row_by_id"
"""Column of the rows in the order of their ids."""


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table, each of its columns in one piece."""
    table = table.combine_chunks()
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as written:
        written.write_table(table)


def map_table(path: Path, *, verify: bool = True) -> pa.Table:
    """Map what `write_table` wrote; with `verify` see that no text ends beyond it; raises BundleCorruptError."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=verify)
    except (pa.ArrowException, ValueError) as error:
        raise BundleCorruptError(f"{path}: expected an Arrow file: {error}") from error
    return table


def in_one_piece(column: pa.ChunkedArray) -> pa.Array:
    """A column [n] as one array [n]; Arrow's own `combine_chunks` copies one that is in one piece already."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def numbers_of(table: pa.Table, name: str, type_: npt.DTypeLike) -> Array:
    """Get a column of numbers as it lies in the file, [rows]."""
    expected = pa.from_numpy_dtype(np.dtype(type_))
    found = table.schema.field(name).type if name in table.column_names else "no such column"
    require(f"mapped column {name!r}", found == expected, expected, found)
    column = in_one_piece(table[name])
    require(f"mapped column {name!r}", column.null_count == 0, "no nulls", f"{column.null_count} nulls")
    numbers: Array = column.to_numpy(zero_copy_only=False)
    return numbers
