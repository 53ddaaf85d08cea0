"""Variables written block by block, and whole."""

from itertools import pairwise
from pathlib import Path

import keras
import numpy as np
import pytest

from longtail.trainer import arrays
from longtail.trainer.arrays import read_array, write_array
from longtail.trainer.model.embedding import EmbeddingTable

SHAPES = {"a table": (11, 4), "a column": (11, 1), "of three axes": (5, 2, 3), "a vector": (11,), "one row": (1, 9)}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_arrays_written_in_blocks_equal_arrays_written_at_once(
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

    again = keras.Variable(np.zeros(shape, dtype), dtype=dtype)
    read_array(tmp_path / "blocks.npy", again)
    assert np.array_equal(keras.ops.convert_to_numpy(again), values)


def test_an_array_of_another_shape_is_refused_without_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "array.npy", np.ones((5, 4), np.float32))
    for block in (1, 1000):
        monkeypatch.setattr(arrays, "_BLOCK_BYTES", block)
        variable = keras.Variable(np.zeros((6, 4), np.float32))
        with pytest.raises(ValueError, match=r"expected an array of shape \(6, 4\), found \(5, 4\)"):
            read_array(tmp_path / "array.npy", variable)
        assert not keras.ops.convert_to_numpy(variable).any()


def test_a_table_initialised_in_blocks_is_normal_and_depends_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.trainer.model.embedding._DRAWN_WHOLE", 4 * 4000)
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", 4 * 1200)

    def drawn(seed: int) -> np.ndarray:
        return np.array(keras.ops.convert_to_numpy(EmbeddingTable(1001, 4, scale=0.05, seed=seed, name="table").table))

    table = drawn(3)
    assert abs(table.mean()) < 0.003
    assert table.std() == pytest.approx(0.05, rel=0.05)
    blocks = [table[start : start + 300] for start in range(0, 900, 300)]
    assert not any(np.array_equal(block, following) for block, following in pairwise(blocks))
    assert np.array_equal(table, drawn(3))
    assert not np.array_equal(table, drawn(4))
