"""Several objectives over shared towers: each objective maps the query's embedding by its own matrix.

Legend: `B` queries, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.model.embedding import unit_rows


class ObjectiveMaps(keras.layers.Layer):
    """Map query embeddings by objective: u_o = (I + A_o) x, served as Σ ŝ_o u_o.

    An inner product is linear, so the score of the served vector is exactly Σ ŝ_o f_o [METHODS §2.4]. A_o is 0
    initially: all objectives begin with the output of the tower, and a penalty on weights pulls them together.

    Args:
        shares: ŝ by objective, in the order of the recipe; the sum is 1.
        unit: divide each u_o by its norm. The norm of the sum is then at most 1.
    """

    def __init__(self, shares: Mapping[str, float], dim: int, *, unit: bool, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.unit, self.shares = unit, list(shares.values())
        self.maps = [self.add_weight(shape=(dim, dim), initializer="zeros", name=objective) for objective in shares]
        self.built = True
        self._objectives_B: Tensor | None = None

    def call(self, x_BD: Tensor) -> Tensor:
        """Return the served vectors, float32 [B, D]; inside `by_objective`, each row by its own objective."""
        if self._objectives_B is None:
            parts = [(share, at) for at, share in enumerate(self.shares) if share]
            served = [share * self._mapped(x_BD, at) for share, at in parts]
            return sum(served[1:], served[0])
        # Few objectives: all maps of all rows cost less than a gather of a [D, D] matrix per row.
        own_B1 = ops.expand_dims(self._objectives_B, 1)
        rows_BD = self._mapped(x_BD, 0)
        for at in range(1, len(self.maps)):
            rows_BD = ops.where(ops.equal(own_B1, at), self._mapped(x_BD, at), rows_BD)
        return rows_BD

    def _mapped(self, x_BD: Tensor, at: int) -> Tensor:
        """Compute u_o of one objective, float32 [B, D]."""
        rows_BD = x_BD + ops.matmul(x_BD, self.maps[at])
        return unit_rows(rows_BD) if self.unit else rows_BD


@contextmanager
def by_objective(tower: keras.Model, objectives_B: Tensor | None) -> Iterator[None]:
    """Make a query tower map each row by its own objective, int32 [B], inside the block.

    A tower without objectives does not change.
    """
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
