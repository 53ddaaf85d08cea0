"""Layers for numbers and vectors, which have no embedding table.

Legend: `B` batch, `D` numbers of a vector.
"""

from __future__ import annotations

import keras

from longtail.trainer.backend import Tensor, ops


class SignedLog(keras.layers.Layer):
    """sign(x)·log(1 + |x|)."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")

    def call(self, x: Tensor) -> Tensor:
        """Return the same shape, float32."""
        return ops.sign(x) * ops.log(1.0 + ops.abs(x))


class OrMissing(keras.layers.Layer):
    """Puts a learned vector in the place of rows that are missing; 0 at first."""

    def __init__(self, width: int, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.vector = self.add_weight(shape=(width,), initializer="zeros", name="missing")
        self.built = True

    def call(self, x_BD: Tensor, missing_B: Tensor) -> Tensor:
        """Return rows, float32 [B, D]; `missing_B` is 1 for those that are missing, else 0."""
        missing_B1 = ops.expand_dims(missing_B, 1)
        rows_BD: Tensor = x_BD * (1 - missing_B1) + missing_B1 * self.vector
        return rows_BD
