"""The loss of a batch's logits: accidental hits, weights, mining, family. Knows no model and no sampler.

Legend: `B` batch, `M` negatives per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras import ops

from longtail.trainer.losses.families import LOSSES, MASKED, reduce_eta
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.weights import WEIGHTS, LogProbabilities

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
        rows = _Rows(ops.cast(positive_B, "float32"), ops.cast(negative_BM, "float32"), hits_BM, log_pi, log_q)
        losses_B = LOSSES[self.family].loss(*self._prepared(rows), **self.family_arguments)
        return losses_B + self._penalty(rows)

    def with_state(self, *logits: Any, log_eta_B: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """As a call, for a family with a number η per training pair: losses [B] and the new log η [B].

        Args:
            logits: what a call takes.
            log_eta_B: log η of the rows.
            rate: step size of η in (0, 1).
        """
        rows = _Rows(ops.cast(logits[0], "float32"), ops.cast(logits[1], "float32"), *logits[2:])
        prepared = self._prepared(rows)
        new_B = ops.stop_gradient(reduce_eta(*prepared, log_eta_B=log_eta_B, rate=rate))
        losses_B = LOSSES[self.family].loss(*prepared, **self.family_arguments, log_eta_B=new_B)
        return losses_B + self._penalty(rows), new_B

    def _prepared(self, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and log-weights as a family takes them."""
        positive_B, negative_BM, hits_BM, log_pi, log_q = rows
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

    def _penalty(self, rows: _Rows) -> Tensor:
        """[BM20 eq. 6], [B]."""
        if not self.regularizer:
            return 0.0
        squares_BM = ops.where(rows.hits_BM, 0.0, ops.square(rows.negative_BM + rows.log_q[1]))
        negatives_B = ops.sum(squares_BM, axis=1) / ops.maximum(_kept(rows.hits_BM), 1.0)
        return self.regularizer * (ops.square(rows.positive_B + rows.log_q[0]) + negatives_B)


class _Rows(NamedTuple):
    """What an objective is called with, logits in float32."""

    positive_B: Tensor
    negative_BM: Tensor
    hits_BM: Tensor
    log_pi: tuple[Tensor, Tensor]
    log_q: tuple[Tensor, Tensor]


def _kept(hits_BM: Tensor) -> Tensor:
    """Negatives left in every row, float32 [B]."""
    return ops.sum(ops.cast(ops.logical_not(hits_BM), "float32"), axis=1)
