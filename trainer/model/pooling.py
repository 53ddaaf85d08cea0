"""Pooling of a history, audience, bag or text: by weights, by how recent an entry is, by learned attention.

Legend: `B` batch, `P` positions of a bag, `U` distinct rows, `D` dimensions.
"""

from __future__ import annotations

import keras

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.model.embedding import Table

_DENSE_ROWS = 4096
"""Largest table whose bags are pooled by one product with a dense [B, U] matrix of weights while training."""


class WeightedBag(keras.layers.Layer):
    """Pools a bag of a table's rows: `mean` Σwe/(Σ|w| + damping), `sum` Σwe, `sqrtn` Σwe/√Σw², or `attention`.

    `attention` is `mean` with weights w·exp(e·a), a learned: it begins as `mean`, where a = 0. Padding has weight 0;
    an empty bag is the zero vector.
    """

    def __init__(self, table: Table, combiner: str, *, name: str, damping: float = 0.0) -> None:
        super().__init__(name=name, dtype="float32")
        self.table, self.combiner, self.damping = table, combiner, damping
        if combiner == "attention":
            self.attention = self.add_weight(shape=(table.dim,), initializer="zeros", name="attention")

    def call(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Pooled embeddings, float32 [B, D]."""
        if self.combiner == "attention":
            weights_BP = self._attended(ids_BP, weights_BP)
        pooled_BD = self._sum(ids_BP, weights_BP)
        if self.combiner == "sum":
            return pooled_BD
        if self.combiner in ("mean", "attention"):
            size_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True) + self.damping
        else:
            size_B1 = ops.sqrt(ops.sum(ops.square(weights_BP), axis=1, keepdims=True))
        return pooled_BD / ops.maximum(size_B1, 1e-6)

    def _attended(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """w·exp(e·a), over its largest exponential, [B, P]."""
        scores_BP = ops.einsum("bpd,d->bp", self.table(ids_BP), self.attention)
        scores_BP = ops.where(ops.equal(weights_BP, 0), -1e9, scores_BP)
        return weights_BP * ops.exp(scores_BP - ops.stop_gradient(ops.max(scores_BP, axis=1, keepdims=True)))

    def _sum(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Σ w e. Bags over a small table repeat its rows: their sum is a product with those, without a [B, P, D]."""
        compact_UD = self.table.compact
        if compact_UD is None or self.table.rows > _DENSE_ROWS or backend.devices() > 1:
            return ops.einsum("bpd,bp->bd", self.table(ids_BP), weights_BP)
        batch = ops.shape(ids_BP)[0]  # histories of label embeddings read as many labels as a batch has
        rows_BP = ops.broadcast_to(ops.arange(batch, dtype="int32")[:, None], ops.shape(ids_BP))
        places = ops.stack([ops.reshape(rows_BP, (-1,)), ops.reshape(ids_BP, (-1,))], axis=1)
        weights_BU = ops.scatter(places, ops.reshape(weights_BP, (-1,)), (batch, ops.shape(compact_UD)[0]))
        return ops.matmul(weights_BU, compact_UD)


class Symmetric(keras.layers.Layer):
    """Weights w / √(n·d), n = Σ|w| of all entries and d what is known of an entry's own pairs: the normalised adjacency
    of LightGCN (He et al. 2020) [METHODS §10.1]."""

    def __init__(self, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")

    def call(self, weights_BP: Tensor, pairs_BP1: Tensor) -> Tensor:
        """Return weights, float32 [B, P]."""
        entries_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True)
        return weights_BP / ops.sqrt(ops.maximum(entries_B1, 1.0) * ops.maximum(pairs_BP1[..., 0], 1.0))


class Recency(keras.layers.Layer):
    """Halves the weight of an entry for every `half_life` entries after it; padding does not count."""

    def __init__(self, half_life: float, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.half_life = half_life

    def call(self, weights_BP: Tensor) -> Tensor:
        """Return weights, float32 [B, P]."""
        there_BP = ops.cast(ops.not_equal(weights_BP, 0), "float32")
        later_BP = ops.sum(there_BP, axis=1, keepdims=True) - ops.cumsum(there_BP, axis=1)
        return weights_BP * ops.power(0.5, later_BP / self.half_life)
