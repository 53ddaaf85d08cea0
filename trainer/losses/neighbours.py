"""Supervised contrast with nearest neighbours (Sun et al. 2023) [METHODS §10.3].

Legend: `B` batch, `D` dimensions, `K` neighbours of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses.weights import MASKED


@dataclass(frozen=True)
class NeighbourLoss:
    """Each of a batch's queries, or of its labels, with one of its neighbours against the others of the batch."""

    temperature: float
    weight: float

    def __call__(
        self, anchors_BD: Tensor, neighbours_BD: Tensor, ids_B: Tensor, near_BK: Tensor, weight_B: Tensor
    ) -> Tensor:
        """Return what the term adds to the mean loss of a batch, float32 scalar, nats."""
        anchors_BD, neighbours_BD = _unit(anchors_BD), _unit(neighbours_BD)
        positive_B = ops.sum(anchors_BD * neighbours_BD, axis=1) / self.temperature
        others_BB = ops.matmul(anchors_BD, ops.transpose(anchors_BD)) / self.temperature
        masked_BB = ops.equal(ids_B[:, None], ids_B)
        for at in range(near_BK.shape[1]):
            masked_BB = ops.logical_or(masked_BB, ops.equal(near_BK[:, at : at + 1], ids_B))
        gaps_BB = ops.where(masked_BB, MASKED, others_BB - positive_B[:, None])
        gaps = ops.concatenate([ops.zeros_like(gaps_BB[:, :1]), gaps_BB], axis=1)
        losses_B = weight_B * ops.logsumexp(gaps, axis=1)
        return self.weight * ops.mean(ops.where(near_BK[:, 0] >= 0, losses_B, 0.0))


def _unit(x_BD: Tensor) -> Tensor:
    """Return rows divided by their norm, float32 [B, D]; a zero row stays one, and its gradient is as if its norm were
    1."""
    squares_B1 = ops.sum(ops.square(x_BD), axis=1, keepdims=True)
    return x_BD * ops.rsqrt(ops.where(squares_B1 > 0, squares_B1, 1.0))
