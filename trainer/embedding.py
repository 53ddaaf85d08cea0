"""Embedding tables whose training cost depends on the rows a batch touches, not on the table.

Keras 3's own `Embedding` reads the whole table before it gathers, and its optimisers update every
row. Here a step gathers each table's distinct rows once, differentiates with respect to those rows
alone (`reading`), and scatters their update back (optimizers.py).

Legend: `B` batch, `P` positions of a bag, `U` distinct rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from trainer import backend

Tensor = Any
"""A backend tensor; shapes are in the names."""


class Table(keras.layers.Layer):
    """An embedding table, float32 [rows, dim]; row 0 is the out-of-vocabulary row.

    Args:
        rows: rows of the table.
        dim: D.
        scale: standard deviation of the initial values.
        seed: of the initial values.
    """

    def __init__(self, rows: int, dim: int, *, scale: float, seed: int, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.rows, self.dim = rows, dim
        initializer = keras.initializers.RandomNormal(stddev=scale, seed=seed) if scale else "zeros"
        self.table = self.add_weight(shape=(rows, dim), initializer=initializer, trainable=False, name="table")
        self.built = True
        self._compact: Tensor | None = None

    def call(self, ids: Tensor) -> Tensor:
        """Rows of the table, float32 [*ids.shape, D]; inside `reading`, rows of the compact table."""
        return backend.gather(self.table, ids) if self._compact is None else ops.take(self._compact, ids, axis=0)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[*ids.shape, D]."""
        return (*input_shape, self.dim)


@contextmanager
def reading(tables: Sequence[Table], rows: Sequence[Tensor]) -> Iterator[None]:
    """Let tables answer from compact rows [U, D]; ids inside the block are positions 0..U−1."""
    try:
        for table, compact_UD in zip(tables, rows, strict=True):
            table._compact = compact_UD
        yield
    finally:
        for table in tables:
            table._compact = None


class WeightedBag(keras.layers.Layer):
    """Pools a bag of embeddings by weight: `mean` Σwe/Σ|w|, `sum` Σwe, or `sqrtn` Σwe/√Σw².

    Padding has weight 0; an empty bag is the zero vector.
    """

    def __init__(self, combiner: str, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.combiner = combiner

    def call(self, embeddings_BPD: Tensor, weights_BP: Tensor) -> Tensor:
        """Pooled embeddings, float32 [B, D]."""
        pooled_BD = ops.einsum("bpd,bp->bd", embeddings_BPD, weights_BP)
        if self.combiner == "sum":
            return pooled_BD
        if self.combiner == "mean":
            size_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True)
        else:
            size_B1 = ops.sqrt(ops.sum(ops.square(weights_BP), axis=1, keepdims=True))
        return pooled_BD / ops.maximum(size_B1, 1e-6)

    def compute_output_shape(
        self, embeddings_BPD_shape: tuple[int | None, ...], weights_BP_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        """[B, D]."""
        return (weights_BP_shape[0], embeddings_BPD_shape[-1])


class Direction(keras.layers.Layer):
    """Divides rows by their norm; a zero row, which has no direction, becomes the first unit vector.

    A tower of bags gives zero for an empty bag. Other rows are those of `keras.layers.UnitNormalization`.
    """

    def __init__(self, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")

    def call(self, x_BD: Tensor) -> Tensor:
        """Unit rows, float32 [B, D]."""
        zero_B1 = ops.cast(ops.equal(ops.max(ops.abs(x_BD), axis=1, keepdims=True), 0.0), "float32")
        first_1D = ops.one_hot(ops.zeros((1,), "int32"), x_BD.shape[1])
        return ops.normalize(x_BD + zero_B1 * first_1D, axis=1)

    def compute_output_shape(self, x_BD_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[B, D]."""
        return x_BD_shape
