"""Move variables to and from array files in blocks, because backends copy whole variables.

Legend: `N` rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.trainer import backend
from longtail.trainer.backend import keras, ops

_BLOCK_BYTES = 1 << 26


def read_values(values: keras.Variable | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a variable or an array, of any shape, as an array in host memory.

    A `backend.rows_variable` gives a copy of its requested rows, without those that only pad the parts on devices.
    """
    if not hasattr(values, "rows"):
        return ops.convert_to_numpy(values)
    return np.concatenate([_rows(values, start, end) for start, end in iterate_blocks(values)])


def assign(variable: keras.Variable, values: npt.NDArray[Any]) -> None:
    """Set a variable, of any shape, to values of the shape that `read_values` returns."""
    if hasattr(variable, "rows"):
        backend.fill(variable, [values])
    else:
        variable.assign(values)


def write_array(path: Path, values: keras.Variable | npt.NDArray[Any]) -> None:
    """Write a variable or an array, of any shape, as `.npy`."""
    if not isinstance(values, keras.Variable) or not is_large(values):
        np.save(path, read_values(values), allow_pickle=False)
        return
    # `np.save` would first copy the whole variable to the host.
    header = {"descr": np.dtype(values.dtype).str, "fortran_order": False, "shape": _shape(values)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start, end in iterate_blocks(values):
            file.write(_rows(values, start, end).data)


def read_array(path: Path, variable: keras.Variable) -> None:
    """Set a variable to the values of a file."""
    values = np.load(path, mmap_mode="r" if is_large(variable) else None, allow_pickle=False)
    if values.shape != _shape(variable):
        raise ValueError(f"{path}: expected an array of shape {_shape(variable)}, found {values.shape}")
    if not is_large(variable):
        assign(variable, values)
        return
    backend.fill(variable, (np.array(values[start:end]) for start, end in iterate_blocks(variable)))


def is_large(values: keras.Variable) -> bool:
    """Return whether a variable is larger than one block."""
    return _bytes(values) > _BLOCK_BYTES


def iterate_blocks(values: keras.Variable) -> Iterator[tuple[int, int]]:
    """Yield the first and last row of every block."""
    rows = _shape(values)[0]
    step = max(1, _BLOCK_BYTES * rows // max(_bytes(values), 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _rows(values: keras.Variable, start: int, end: int) -> npt.NDArray[Any]:
    rows = ops.convert_to_numpy(backend.gather(values, np.arange(start, end, dtype=np.int32)))
    # `file.write` needs the rows in one piece.
    return np.ascontiguousarray(rows)


def _shape(values: keras.Variable) -> tuple[int, ...]:
    """Return the shape without rows that only pad the parts on devices."""
    shape = tuple(values.shape)
    return (values.rows, *shape[1:]) if hasattr(values, "rows") else shape


def _bytes(values: keras.Variable) -> int:
    return int(np.prod(_shape(values))) * int(np.dtype(values.dtype).itemsize)


def untrained_variable(column: npt.NDArray[Any], name: str) -> keras.Variable:
    """Create an untrained variable on the device from a column of any shape."""
    return keras.Variable(column, dtype=str(column.dtype), trainable=False, name=name)
