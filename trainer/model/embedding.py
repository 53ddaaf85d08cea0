"""Embedding tables whose training cost depends on a batch's rows, not the table's size.

`keras.layers.Embedding` reads the whole table before it gathers, and Keras optimizers update every row. Here a step
gathers each table's distinct rows once, differentiates with respect to these rows only (`read_distinct`,
`compact_rows`), and scatters their update back (trainer/optimizers.py).

Legend: `B` batch, `P` positions of a bag, `N` ids, `U` distinct rows, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import keras
import numpy as np

from longtail.trainer import backend
from longtail.trainer.arrays import iterate_blocks
from longtail.trainer.backend import Tensor, ops

_DRAWN_WHOLE = 1 << 30
"""Largest table that is initialised with one seed, bytes."""

InputKey = tuple[str, str]
"""Tower and name of an input: `("query", "history")`."""


class EmbeddingTable(keras.layers.Layer):
    """Hold an embedding table, float32 [rows, dim]; row 0 is the out-of-vocabulary row.

    Above one gibibyte it is initialised in blocks with a seed each: at once, it would need four times its memory.
    """

    def __init__(self, rows: int, dim: int, *, scale: float, seed: int, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.rows, self.dim = rows, dim
        drawn_whole = rows * dim * 4 <= _DRAWN_WHOLE
        normal = partial(keras.initializers.RandomNormal, stddev=scale)
        initializer = normal(seed=seed) if scale and drawn_whole else "zeros"
        self.table = backend.rows_variable(rows, dim, name=f"{name}_rows", initializer=initializer)
        if scale and not drawn_whole:
            # A seed for each block: with one seed, all blocks would hold the same rows.
            seeds = np.random.SeedSequence(seed)
            backend.fill(
                self.table,
                (
                    ops.convert_to_numpy(normal(seed=int(seeds.spawn(1)[0].generate_state(1)[0]))((end - start, dim)))
                    for start, end in iterate_blocks(self.table)
                ),
            )
        self.built = True
        self.compact: Tensor | None = None
        """Rows [U, D] that replace the table inside `compact_rows`; with `shared`, all devices read the same ones."""
        self.shared = False

    def call(self, ids: Tensor) -> Tensor:
        """Return rows of the table, float32 [*ids.shape, D]; inside `compact_rows`, rows of the compact table."""
        if self.compact is None:
            return backend.gather(self.table, ids)
        return backend.take(self.compact, ids, shared=self.shared)


def read_distinct(
    tables: Mapping[str, EmbeddingTable], inputs: Mapping[InputKey, Tensor], readers: Mapping[InputKey, str], *,
    shared: bool = False,
) -> tuple[dict[InputKey, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Find the distinct ids that a batch reads from every table, once.

    Args:
        readers: inputs that hold ids, each with the name of its table.
        shared: all devices read the same ids, those of the whole batch.

    Returns:
        The inputs, with ids replaced by positions among the distinct ids of their table; and these ids, int32 [U].
    """
    compact, distinct = dict(inputs), {}
    for name, table in tables.items():
        keys = [key for key, table_name in readers.items() if table_name == name]
        distinct[name], positions = backend.distinct([inputs[key] for key in keys], table.rows, shared=shared)
        compact |= zip(keys, positions, strict=True)
    return compact, distinct


@contextmanager
def compact_rows(tables: Sequence[EmbeddingTable], rows: Sequence[Tensor], *, shared: bool = False) -> Iterator[None]:
    """Make tables look up rows [U, D] inside the block by positions of `read_distinct`."""
    try:
        for table, compact_UD in zip(tables, rows, strict=True):
            table.compact, table.shared = compact_UD, shared
        yield
    finally:
        for table in tables:
            table.compact = None


class UnitNorm(keras.layers.Layer):
    """Divide rows by their norm; unlike in `keras.layers.UnitNormalization`, a zero row becomes a unit vector."""

    def call(self, x_BD: Tensor) -> Tensor:
        """Scale rows [B, D] to norm 1; a zero row becomes the first unit vector."""
        # Cosine similarity needs norm 1 for every row, zero rows included.
        zero_B1 = ops.cast(ops.equal(ops.max(ops.abs(x_BD), axis=1, keepdims=True), 0.0), "float32")
        first_1D = ops.one_hot(ops.zeros((1,), "int32"), x_BD.shape[1])
        return ops.normalize(x_BD + zero_B1 * first_1D, axis=1)


class Dropout(keras.layers.Layer):
    """Multiply the input by a mask inside `dropout_masks`.

    The mask has one row per row of the input, or per entry of the feature `entries_of`. `keras.layers.Dropout` would
    advance its generator inside the differentiated function, where JAX keeps no state.
    """

    def __init__(self, rate: float, width: int, *, name: str, entries_of: str | None = None) -> None:
        super().__init__(name=name, dtype="float32")
        self.rate, self.width, self.entries_of = rate, width, entries_of
        self._mask: Tensor | None = None

    def draw(self, rows: Tensor, seed: keras.random.SeedGenerator) -> Tensor:
        """Draw a mask with values 0 and 1 / (1 − rate), float32 [rows, D]."""
        mask_BD = keras.random.uniform((rows, self.width), seed=seed) >= self.rate
        return ops.cast(mask_BD, "float32") / (1 - self.rate)

    def call(self, x_BD: Tensor) -> Tensor:
        """Return the input, masked inside `dropout_masks`; float32 [B, D]."""
        return x_BD if self._mask is None else x_BD * self._mask


@contextmanager
def dropout_masks(masks: Mapping[Dropout, Tensor]) -> Iterator[None]:
    """Make dropout layers use these masks [B, D] inside the block."""
    try:
        for layer, mask_BD in masks.items():
            layer._mask = mask_BD
        yield
    finally:
        for layer in masks:
            layer._mask = None


def list_layers(tower: keras.Model) -> list[keras.layers.Layer]:
    """List every layer of a tower, nested layers included."""
    return list(tower._flatten_layers(include_self=False))
