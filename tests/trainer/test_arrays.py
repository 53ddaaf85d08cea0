"""Variables written block by block, and whole."""

from pathlib import Path

import keras
import numpy as np
import pytest

from longtail.trainer import arrays
from longtail.trainer.arrays import write_array

SHAPES = {"a table": (11, 4), "a column": (11, 1), "of three axes": (5, 2, 3), "a vector": (11,), "one row": (1, 9)}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_make_what_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    values = (100 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    variable = keras.Variable(values, dtype=dtype)
    write_array(tmp_path / "whole.npy", variable)
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 32)
    write_array(tmp_path / "blocks.npy", variable)
    np.save(tmp_path / "numpy.npy", values)
    content = (tmp_path / "numpy.npy").read_bytes()
    assert (tmp_path / "whole.npy").read_bytes() == (tmp_path / "blocks.npy").read_bytes() == content


def test_numbers_and_arrays_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 1)
    write_array(tmp_path / "array.npy", np.arange(5.0))
    assert np.load(tmp_path / "array.npy").tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 64)
    write_array(tmp_path / "number.npy", keras.Variable(3.5, dtype="float32"))
    assert np.load(tmp_path / "number.npy") == np.float32(3.5)
