"""Pooling of a history, audience, bag or text: by weights, by recency, or by learned attention.

Legend: `B` batch, `P` positions of a bag, `D` dimensions.
"""

from __future__ import annotations

import keras

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.model.embedding import EmbeddingTable


class WeightedBag(keras.layers.Layer):
    """Pool a bag of rows: `mean` Σwe/(Σ|w| + damping), `sum` Σwe, `sqrtn` Σwe/√Σw², or `attention`.

    `attention` is `mean` with weights w·exp(e·a) and a learned a. With the initial a = 0 it equals `mean`. Padding has
    weight 0, and an empty bag gives the zero vector.
    """

    def __init__(self, table: EmbeddingTable, combiner: str, *, name: str, damping: float = 0.0) -> None:
        super().__init__(name=name, dtype="float32")
        self.table, self.combiner, self.damping = table, combiner, damping
        if combiner == "attention":
            self.attention = self.add_weight(shape=(table.dim,), initializer="zeros", name="attention")

    def call(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Return pooled embeddings, float32 [B, D]."""
        if self.combiner == "attention":
            weights_BP = self._attended(ids_BP, weights_BP)
        # Only attention, whose weights are learned, trains through a [B, P, D] tensor.
        if self.table.compact is None or self.combiner == "attention":
            pooled_BD = ops.einsum("bpd,bp->bd", self.table(ids_BP), weights_BP)
        else:
            pooled_BD = backend.bag_sums(self.table.compact, ids_BP, weights_BP, shared=self.table.shared)
        if self.combiner == "sum":
            return pooled_BD
        if self.combiner in ("mean", "attention"):
            size_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True) + self.damping
        else:
            size_B1 = ops.sqrt(ops.sum(ops.square(weights_BP), axis=1, keepdims=True))
        # An empty bag has size 0, and its zero vector must not become NaN.
        return pooled_BD / ops.maximum(size_B1, 1e-6)

    def _attended(self, ids_BP: Tensor, weights_BP: Tensor) -> Tensor:
        """Compute w·exp(e·a), divided by the largest exponential of the bag, [B, P]."""
        scores_BP = ops.einsum("bpd,d->bp", self.table(ids_BP), self.attention)
        # Padding must not be the maximum. Dividing by the maximum cancels in the mean, and keeps exp from overflow.
        scores_BP = ops.where(ops.equal(weights_BP, 0), -1e9, scores_BP)
        return weights_BP * ops.exp(scores_BP - ops.stop_gradient(ops.max(scores_BP, axis=1, keepdims=True)))


class Symmetric(keras.layers.Layer):
    """Compute weights w / √(n·d), the normalised adjacency of LightGCN (He et al. 2020) [METHODS §10.1].

    n is Σ|w| over all entries, and d the number of training pairs of the entry's label or query.
    """

    def call(self, weights_BP: Tensor, pairs_BP1: Tensor) -> Tensor:
        """Return weights, float32 [B, P]."""
        entries_B1 = ops.sum(ops.abs(weights_BP), axis=1, keepdims=True)
        return weights_BP / ops.sqrt(ops.maximum(entries_B1, 1.0) * ops.maximum(pairs_BP1[..., 0], 1.0))


class Recency(keras.layers.Layer):
    """Halve the weight of an entry for every `half_life` later entries; padding does not count."""

    def __init__(self, half_life: float, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.half_life = half_life

    def call(self, weights_BP: Tensor) -> Tensor:
        """Return weights, float32 [B, P]."""
        there_BP = ops.cast(ops.not_equal(weights_BP, 0), "float32")
        later_BP = ops.sum(there_BP, axis=1, keepdims=True) - ops.cumsum(there_BP, axis=1)
        return weights_BP * ops.power(0.5, later_BP / self.half_life)
