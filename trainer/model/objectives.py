"""Several objectives over shared towers: each maps the query's embedding in a way of its own.

Legend: `B` queries, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.model.embedding import unit_rows


class ObjectiveMaps(keras.layers.Layer):
    """The end of a query tower with objectives: u_o = (I + A_o) x of objective o, and what is served, Σ ŝ_o u_o.

    An inner product is linear, so the score of that one vector is Σ ŝ_o f_o, exactly [METHODS §2.4]. A_o is 0 at first:
    all objectives begin as the tower itself, and a penalty on weights pulls them together.

    Args:
        shares: ŝ by objective, in the order of the recipe; sums to 1.
        unit: divide each u_o by its norm. Their sum is then shorter than 1.
    """

    def __init__(self, shares: Mapping[str, float], dim: int, *, unit: bool, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.unit, self.shares = unit, list(shares.values())
        self.maps = [self.add_weight(shape=(dim, dim), initializer="zeros", name=objective) for objective in shares]
        self.built = True
        self._objectives_B: Tensor | None = None

    def call(self, x_BD: Tensor) -> Tensor:
        """Return what is served, float32 [B, D]; inside `by_objective` each row by its own objective."""
        if self._objectives_B is None:
            parts = [(share, at) for at, share in enumerate(self.shares) if share]
            served = [share * self._mapped(x_BD, at) for share, at in parts]
            return sum(served[1:], served[0])
        own_B1 = ops.expand_dims(self._objectives_B, 1)
        rows_BD = self._mapped(x_BD, 0)
        for at in range(1, len(self.maps)):
            rows_BD = ops.where(ops.equal(own_B1, at), self._mapped(x_BD, at), rows_BD)
        return rows_BD

    def _mapped(self, x_BD: Tensor, at: int) -> Tensor:
        """u_o of one objective, float32 [B, D]."""
        rows_BD = x_BD + ops.matmul(x_BD, self.maps[at])
        return unit_rows(rows_BD) if self.unit else rows_BD


@contextmanager
def by_objective(tower: keras.Model, objectives_B: Tensor | None) -> Iterator[None]:
    """Inside the block a query tower with objectives maps each row by its own, int32 [B]; others stay as they are."""
    maps = [layer for layer in tower.layers if isinstance(layer, ObjectiveMaps)]
    if maps and objectives_B is None:
        raise ValueError("a step with objectives: expected _objective in its batch, received none")
    try:
        for layer in maps:
            layer._objectives_B = ops.convert_to_tensor(objectives_B)
        yield
    finally:
        for layer in maps:
            layer._objectives_B = None
