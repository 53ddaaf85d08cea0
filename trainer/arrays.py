"""Variables as files of arrays, a block of rows at a time: what a backend gives of a whole table is a copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from longtail.trainer import backend
from longtail.trainer.backend import ops

_BLOCK_BYTES = 1 << 26


def write_array(path: Path, values: keras.Variable | npt.NDArray[Any]) -> None:
    """Write a variable or an array, of any shape, as `.npy`."""
    size = int(np.prod(values.shape)) * np.dtype(values.dtype).itemsize
    if not isinstance(values, keras.Variable) or size <= _BLOCK_BYTES:
        np.save(path, ops.convert_to_numpy(values), allow_pickle=False)
        return
    rows = values.shape[0]
    header = {"descr": np.dtype(values.dtype).str, "fortran_order": False, "shape": tuple(values.shape)}
    step = max(1, _BLOCK_BYTES * rows // size)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, rows, step):
            ids_N = np.arange(start, min(start + step, rows), dtype=np.int32)
            file.write(np.ascontiguousarray(ops.convert_to_numpy(backend.gather(values, ids_N))).data)
