"""Map files of columns (Arrow) and rows (NumPy), whose memory all processes share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from longtail.bundle.arrays import Array, Float32
from longtail.bundle.errors import BundleCorruptError, require

ORDER = "row_by_id"
"""Column of the rows in the order of their ids."""


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table with each column in one chunk."""
    # In one chunk a reader takes the mapped column as it is, without a copy.
    table = table.combine_chunks()
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as written:
        written.write_table(table)


def map_table(path: Path, *, verify: bool = True) -> pa.Table:
    """Map a file of `write_table`; `verify` checks that no text ends beyond it. Raises BundleCorruptError."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate(full=verify)
    except (pa.ArrowException, ValueError) as error:
        raise BundleCorruptError(f"{path}: expected an Arrow file: {error}") from error
    return table


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Combine a column's chunks, without a copy if there is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def decode_chunks(column: pa.ChunkedArray) -> pa.Array:
    """Combine a column's chunks, and decode a dictionary."""
    array = combine_chunks(column)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def map_columns(
    path: Path, id_name: str, numbers: Mapping[str, npt.DTypeLike], optional: Mapping[str, npt.DTypeLike] = {},
    *, verify: bool = True,
) -> tuple[pa.Array, dict[str, Array], pa.Table]:  # fmt: skip
    """Map ids, string or large_string [rows], numbers by name, and the other columns.

    Raises BundleCorruptError, or BundleInvariantError for a missing column, another type or nulls.
    """
    table = map_table(path, verify=verify)
    numbers = {**numbers, **{name: type_ for name, type_ in optional.items() if name in table.column_names}}
    types = {name: (pa.from_numpy_dtype(np.dtype(type_)),) for name, type_ in numbers.items()}
    columns: dict[str, pa.Array] = {}
    for name, expected in {id_name: (pa.string(), pa.large_string()), **types}.items():
        actual = table.schema.field(name).type if name in table.column_names else "no such column"
        require(f"{path.name} column {name!r}", actual in expected, expected[0], actual)
        columns[name] = combine_chunks(table[name])
        nulls = columns[name].null_count
        require(f"{path.name} column {name!r}", nulls == 0, "no nulls", f"{nulls} nulls")
    arrays = {name: columns[name].to_numpy(zero_copy_only=False) for name in numbers}
    return columns[id_name], arrays, table.drop_columns([*columns])


def read_table(path: Path) -> Float32:
    """Map the rows of an embedding table, float32 [rows, dims]."""
    try:
        array: Float32 = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise BundleCorruptError(f"{path}: expected a NumPy array file, found none") from error
    except (ValueError, EOFError) as error:
        raise BundleCorruptError(f"{path}: expected a NumPy array file: {error}") from error
    return array
