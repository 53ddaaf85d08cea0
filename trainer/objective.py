"""The loss of a batch's logits: accidental hits, weights, mining, family. Knows no model and no sampler.

Legend: `B` batch, `M` negatives per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keras import ops

from trainer.losses import LOSSES, MASKED, reduce_eta
from trainer.mining import Mining
from trainer.weights import WEIGHTS, LogProbabilities

Tensor = Any
"""A backend tensor; shapes are in the names."""


@dataclass(frozen=True)
class Objective:
    """Family × weight × mining over logits [METHODS §2, §3].

    Attributes:
        family: key of `LOSSES`.
        weight: key of `WEIGHTS`.
        family_arguments, weight_arguments: their parameters.
        mining: keeps the hardest negatives; None keeps all.
        regularizer: strength of `(f + log q)²` on the positive and, on average, on its negatives [BM20 eq. 6].
    """

    family: str = "softmax"
    weight: str = "unit"
    family_arguments: Mapping[str, Any] = field(default_factory=dict)
    weight_arguments: Mapping[str, Any] = field(default_factory=dict)
    mining: Mining | None = None
    regularizer: float = 0.0

    def __call__(
        self,
        positive_B: Tensor,
        negative_BM: Tensor,
        hits_BM: Tensor,
        log_pi: tuple[Tensor, Tensor],
        log_q: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Loss of every row, float32 [B], nats.

        Args:
            positive_B: logits of the positives, any float type; all work is done in float32.
            negative_BM: logits of the negatives.
            hits_BM: bool, negatives that are their row's positive: masked out.
            log_pi: log label frequencies of the positives [B] and of the negatives [M] or [B, M].
            log_q: log sampling probabilities of the same.
        """
        prepared = self._prepared(positive_B, negative_BM, hits_BM, log_pi, log_q)
        losses_B = LOSSES[self.family].loss(*prepared, **self.family_arguments)
        return losses_B + self._penalty(positive_B, negative_BM, hits_BM, log_q)

    def with_state(
        self,
        positive_B: Tensor,
        negative_BM: Tensor,
        hits_BM: Tensor,
        log_pi: tuple[Tensor, Tensor],
        log_q: tuple[Tensor, Tensor],
        *,
        log_eta_B: Tensor,
        rate: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As a call, for a family with a number η per training pair: losses [B] and the new log η [B].

        Args:
            log_eta_B: log η of the rows.
            rate: step size of η in (0, 1).
        """
        prepared = self._prepared(positive_B, negative_BM, hits_BM, log_pi, log_q)
        new_B = ops.stop_gradient(reduce_eta(*prepared, log_eta_B=log_eta_B, rate=rate))
        losses_B = LOSSES[self.family].loss(*prepared, **self.family_arguments, log_eta_B=new_B)
        return losses_B + self._penalty(positive_B, negative_BM, hits_BM, log_q), new_B

    def _prepared(
        self,
        positive_B: Tensor,
        negative_BM: Tensor,
        hits_BM: Tensor,
        log_pi: tuple[Tensor, Tensor],
        log_q: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and log-weights as a family takes them."""
        positive_B, negative_BM = ops.cast(positive_B, "float32"), ops.cast(negative_BM, "float32")
        log_m_B = ops.log(ops.maximum(_kept(hits_BM), 1.0))
        miss_B = ops.log1p(-ops.minimum(ops.exp(log_q[0]), 1 - 1e-7))
        weight = WEIGHTS[self.weight](LogProbabilities(*log_pi, *log_q, miss_B, log_m_B), **self.weight_arguments)
        log_weight_BM = ops.where(hits_BM, MASKED, weight.row[:, None] + weight.col)
        if LOSSES[self.family].shifted:
            positive_B = positive_B - (log_m_B + log_q[0])
            negative_BM = negative_BM - (log_m_B[:, None] + log_q[1])
        if self.mining is not None:
            negative_BM, log_weight_BM = self.mining(negative_BM, log_weight_BM)
        return positive_B, negative_BM, log_weight_BM

    def _penalty(
        self, positive_B: Tensor, negative_BM: Tensor, hits_BM: Tensor, log_q: tuple[Tensor, Tensor]
    ) -> Tensor:
        if not self.regularizer:
            return 0.0
        squares_BM = ops.where(hits_BM, 0.0, ops.square(ops.cast(negative_BM, "float32") + log_q[1]))
        negatives_B = ops.sum(squares_BM, axis=1) / ops.maximum(_kept(hits_BM), 1.0)
        return self.regularizer * (ops.square(ops.cast(positive_B, "float32") + log_q[0]) + negatives_B)


def _kept(hits_BM: Tensor) -> Tensor:
    """Negatives left in every row, float32 [B]."""
    return ops.sum(ops.cast(ops.logical_not(hits_BM), "float32"), axis=1)
