"""Embedding tables whose training cost depends on the rows a batch touches, not on the table.

Keras 3's own `Embedding` reads the whole table before it gathers, and its optimisers update every
row. Here a step gathers each table's distinct rows once, differentiates with respect to those rows
alone (`reading`), and scatters their update back (optimizers.py).

Legend: `B` batch, `P` positions of a bag, `U` distinct rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from longtail.trainer import backend

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
        self.compact: Tensor | None = None
        """Rows [U, D] that stand in for the table inside `reading`."""

    def call(self, ids: Tensor) -> Tensor:
        """Rows of the table, float32 [*ids.shape, D]; inside `reading`, rows of the compact table."""
        return backend.gather(self.table, ids) if self.compact is None else ops.take(self.compact, ids, axis=0)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[*ids.shape, D]."""
        return (*input_shape, self.dim)


@contextmanager
def reading(tables: Sequence[Table], rows: Sequence[Tensor]) -> Iterator[None]:
    """Let tables answer from compact rows [U, D]; ids inside the block are positions 0..U−1."""
    try:
        for table, compact_UD in zip(tables, rows, strict=True):
            table.compact = compact_UD
        yield
    finally:
        for table in tables:
            table.compact = None


_DENSE_ROWS = 4096
"""Largest table whose bags are pooled by one product with a dense [B, U] matrix of weights while training."""


class WeightedBag(keras.layers.Layer):
    """Pools a bag of a table's rows by weight: `mean` Σwe/Σ|w|, `sum` Σwe, or `sqrtn` Σwe/√Σw².

    Padding has weight 0; an empty bag is the zero vector.

    Args:
        table: whose rows.
        combiner: `mean`, `sum` or `sqrtn`.
    """

    def __init__(self, table: Table, combiner: str, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.table, self.combiner = table, combiner

    def call(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Pooled embeddings, float32 [B, D]."""
        pooled_BD = self._sum(ids_BP, weights_BP)
        if self.combiner == "sum":
            return pooled_BD
        if self.combiner == "mean":
            size_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True)
        else:
            size_B1 = ops.sqrt(ops.sum(ops.square(weights_BP), axis=1, keepdims=True))
        return pooled_BD / ops.maximum(size_B1, 1e-6)

    def _sum(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Σ w e. Bags over a small table repeat its rows: their sum is a product with those, without a [B, P, D]."""
        compact_UD = self.table.compact
        if compact_UD is None or self.table.rows > _DENSE_ROWS:
            return ops.einsum("bpd,bp->bd", self.table(ids_BP), weights_BP)
        batch = weights_BP.shape[0]
        rows_BP = ops.broadcast_to(ops.arange(batch, dtype="int32")[:, None], ops.shape(ids_BP))
        places = ops.stack([ops.reshape(rows_BP, (-1,)), ops.reshape(ids_BP, (-1,))], axis=1)
        weights_BU = ops.scatter(places, ops.reshape(weights_BP, (-1,)), (batch, ops.shape(compact_UD)[0]))
        return ops.matmul(weights_BU, compact_UD)

    def compute_output_shape(
        self,
        ids_BP_shape: tuple[int | None, ...],
        weights_BP_shape: tuple[int | None, ...],  # noqa: ARG002
    ) -> tuple[int | None, ...]:
        """[B, D]."""
        return (ids_BP_shape[0], self.table.dim)


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


class Dropout(keras.layers.Layer):
    """Multiplies by a mask inside `dropping`; anywhere else, in evaluation and export, it changes nothing.

    Keras' own layer would advance its generator inside the differentiated function, where JAX keeps no state.

    Args:
        rate: share of coordinates set to 0.
        width: D.
    """

    def __init__(self, rate: float, width: int, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.rate, self.width = rate, width
        self._kept: Tensor | None = None

    def draw(self, rows: Tensor, seed: keras.random.SeedGenerator) -> Tensor:
        """A mask of 0 and 1 / (1 − rate), float32 [rows, D]."""
        kept_BD = keras.random.uniform((rows, self.width), seed=seed) >= self.rate
        return ops.cast(kept_BD, "float32") / (1 - self.rate)

    def call(self, x_BD: Tensor) -> Tensor:
        """The input, some coordinates of it 0 inside `dropping`; float32 [B, D]."""
        return x_BD if self._kept is None else x_BD * self._kept

    def compute_output_shape(self, x_BD_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[B, D]."""
        return x_BD_shape


@contextmanager
def dropping(masks: Mapping[Dropout, Tensor]) -> Iterator[None]:
    """Let layers drop coordinates by masks [B, D]."""
    try:
        for layer, mask_BD in masks.items():
            layer._kept = mask_BD
        yield
    finally:
        for layer in masks:
            layer._kept = None
