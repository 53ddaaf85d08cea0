"""The loss of a batch's logits: masks, weights, mining and family, independent of model and sampler.

Legend: `B` batch, `M` negatives per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from longtail.bundle.arrays import Float32, Float64
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.losses.batch import FamilyInputs, SampledLogits, StepInputs
from longtail.trainer.losses.families import LOSSES, next_log_eta
from longtail.trainer.losses.loss_term import LossTerm
from longtail.trainer.losses.mining import Mining
from longtail.trainer.losses.weights import MASKED, WEIGHTS, LogProbabilities


@dataclass(frozen=True)
class Objective:
    """Combine family, weight and mining over logits [METHODS §2, §3].

    Attributes:
        regularizer: strength of the penalty `(f + log q)²` on the positive and, on average, on its negatives
            [BM20 eq. 6]. A shifted family, whose f is a log-probability without log q, has f². f excludes the offset.
        offset: a constant added to every logit, except for the penalty, ranking and export.
        terms: optional parts of the loss, in the order of their changes.
    """

    family: str = "softmax"
    weight: str = "unit"
    family_arguments: Mapping[str, Any] = field(default_factory=dict)
    weight_arguments: Mapping[str, Any] = field(default_factory=dict)
    mining: Mining | None = None
    regularizer: float = 0.0
    offset: float = 0.0
    terms: tuple[LossTerm, ...] = ()

    def __call__(self, logits: SampledLogits) -> Tensor:
        """Compute the loss of every row, float32 [B], nats."""
        return self.compute_losses(logits)[0]

    def compute_losses(
        self, logits: SampledLogits, *, log_eta_B: Tensor | None = None, rate: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute losses, float32 [B], and new log η of families with η per pair.

        Args:
            log_eta_B: log η of the rows, float32; None for any other family.
            rate: step size of η in (0, 1), float32 scalar.
        """
        # Exponentials of thousands of negatives are summed, for which bfloat16 has too few digits.
        positive_B, negative_BM = (ops.cast(it, "float32") for it in (logits.positive_B, logits.negative_BM))
        logits = logits._replace(positive_B=positive_B, negative_BM=negative_BM)
        weighted, loss = self._weighted(logits), LOSSES[self.family].loss
        if log_eta_B is not None and rate is not None:
            log_eta_B = ops.stop_gradient(next_log_eta(*weighted, log_eta_B=log_eta_B, rate=rate))
            loss = partial(loss, log_eta_B=log_eta_B)
        losses_B = loss(*weighted, **self.family_arguments)
        for term in self.terms:
            losses_B = term.target(losses_B, logits)
        return losses_B + self._penalty(logits) if self.regularizer else losses_B, log_eta_B

    def _weighted(self, logits: SampledLogits) -> FamilyInputs:
        """Return positives, negatives and log-weights as the family reads them."""
        positive_B, negative_BM = logits.positive_B, logits.negative_BM
        nothing_B = ops.zeros_like(positive_B)
        m_B = nothing_B + negative_BM.shape[1] if logits.m_B is None else logits.m_B
        # A batch of one pair has m = 0, and log 0 would make the gradient NaN.
        log_m_B = ops.log(ops.maximum(m_B, 1.0))
        log = LogProbabilities(
            pi_positive=logits.log_pi_positive_B,
            pi_negative=logits.log_pi_negative,
            q_positive=logits.log_q_positive_B,
            q_negative=logits.log_q_negative,
            miss=nothing_B if logits.log_miss_B is None else logits.log_miss_B,
            m=log_m_B,
        )
        weight = WEIGHTS[self.weight](log, **self.weight_arguments)
        for term in self.terms:
            weight = term.weight(weight, logits.rows)
        # Masks come after terms have changed the weights, so that no term can weigh a hit again.
        log_weight_BM = ops.where(logits.hits_BM, MASKED, weight.matrix())
        if self.offset:
            positive_B, negative_BM = positive_B + self.offset, negative_BM + self.offset
        if LOSSES[self.family].shifted:
            # NCE: the log-odds of data against m draws of noise are f − log(m·q) [BM20 §5].
            positive_B = positive_B - (log_m_B + logits.log_q_positive_B)
            negative_BM = negative_BM - (log_m_B[:, None] + logits.log_q_negative)
        if self.mining is not None:
            negative_BM, log_weight_BM = self.mining(negative_BM, log_weight_BM, logits.rows.get("ranks"))
        weighted = positive_B, negative_BM, log_weight_BM
        for term in self.terms:
            weighted = term.negatives(weighted, logits.rows, offset=self.offset)
        return weighted

    def _penalty(self, logits: SampledLogits) -> Tensor:
        """Compute the penalty of [BM20 eq. 6], float32 [B]."""
        positive_B, negative_BM = logits.positive_B, logits.negative_BM
        if not LOSSES[self.family].shifted:
            positive_B, negative_BM = positive_B + logits.log_q_positive_B, negative_BM + logits.log_q_negative
        squares_BM = ops.where(logits.hits_BM, 0.0, ops.square(negative_BM))
        # A row whose negatives are all masked is penalised for its positive alone.
        unmasked_B = ops.sum(ops.cast(ops.logical_not(logits.hits_BM), "float32"), axis=1)
        negatives_B = ops.sum(squares_BM, axis=1) / ops.maximum(unmasked_B, 1.0)
        return self.regularizer * (ops.square(positive_B) + negatives_B)


def balance(
    objective: Objective, log_pi_L: Float64, log_q_L: Float32 | None, *, m: int, pairs_per_query: float = 1.0
) -> float:
    """Return the offset of logits at which one positive balances its negatives.

    Without it, training would first push every logit down to the log-odds of one label among many. For NCE, whose
    logits are log p(y|x), it is −log L. For the logistic loss it is `−log E Σ w`: −log L with margin weights of ρ = 1,
    −log m with unit weights. It is 0 for any other family, a pairwise form, and mining.

    Args:
        log_q_L: log sampling probabilities; None if they depend on the query, which counts as 1/L.
        pairs_per_query: average number of pairs that share one set of negatives.

    Example:
        >>> log_pi_L = np.log([0.5, 0.25, 0.25])
        >>> [round(np.exp(-balance(Objective("logistic", weight), log_pi_L, None, m=8))) for weight in WEIGHTS][:3]
        [8, 1, 3]
    """
    family, labels = LOSSES[objective.family], len(log_pi_L)
    if not family.balanced or objective.family_arguments.get("pairwise") or objective.mining is not None:
        return 0.0
    if family.shifted:
        return -float(np.log(labels))
    log_pi_L = log_pi_L.astype(np.float32)
    log_q_L = np.full(labels, -np.log(labels), np.float32) if log_q_L is None else log_q_L
    nothing_L = np.zeros(labels, np.float32)
    log = LogProbabilities(log_pi_L, log_pi_L, log_q_L, log_q_L, miss=nothing_L, m=nothing_L + np.float32(np.log(m)))
    weight = WEIGHTS[objective.weight](log, **objective.weight_arguments)
    row_L, col_L = (ops.convert_to_numpy(part).astype(np.float64) for part in weight)
    # log E Σ w over m draws: the positive comes from π, the negatives come from q.
    log_total = np.log(m) + np.logaddexp.reduce(log_pi_L + row_L) + np.logaddexp.reduce(log_q_L + col_L)
    return float(np.log(pairs_per_query) - log_total)


class Eta(LossTerm):
    """Keep log η of all training pairs for `augment_and_reduce`; `Objective.compute_losses` updates it."""

    def __init__(self, *, pairs: int, labels: int, steps_per_epoch: int) -> None:
        # log L is the bracket of a model that scores all labels alike.
        self._log_eta_N = untrained_variable(np.full(pairs, np.log(labels), np.float32), "log_eta")
        self._steps_per_epoch, self.variables = steps_per_epoch, [self._log_eta_N]

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return log η and its step size."""
        log_eta_B = backend.gather(self._log_eta_N, step.batch["_pair"])
        epochs_done = step.steps_done // self._steps_per_epoch
        # Robbins-Monro steps t^−0.9 over epochs; below 1, because `next_log_eta` takes log(1 − rate).
        rate = ops.minimum(ops.power(1.0 + ops.cast(epochs_done, "float32"), -0.9), 1 - 1e-6)
        return {"log_eta": log_eta_B, "eta_rate": ops.zeros_like(log_eta_B) + rate}

    def update_state(self, batch: Mapping[str, Tensor], row_state: Tensors) -> None:
        """Write the new log η."""
        backend.scatter(self._log_eta_N, batch["_pair"], row_state["log_eta"])


_OF_THE_BRACKET = ("softmax", "bilateral_softmax", "augment_and_reduce")
"""Families whose negatives enter by Σ ρ e^f_y' alone."""


def log_terms(
    objective: Objective, log_pi_L: Tensor, positive_B: Tensor, logits_BL: Tensor, *, never_L: Tensor | None = None
) -> Tensor:
    """Compute log(ρ_yy' φ(−f_y')) of every label as a negative, float32 [B, L], nats; at most `MASKED` for log 0.

    For softmax families the terms are those inside the logarithm, ρ e^f_y' or ρ σ(d)^c; for pairwise forms they are
    ρ φ(f_y − f_y').

    Args:
        objective: family, weight and offset; the weight is a margin [R21 Prop. 4].
        log_pi_L: log label frequencies, float32 [L].
        positive_B: label rows of the positives, int32.
        logits_BL: logits of all labels, float32.
        never_L: labels that are never negatives, bool [L]; None without such labels.
    """
    rows, labels = logits_BL.shape
    zero_B, zero_L = ops.zeros((rows,)), ops.zeros((labels,))
    # With log q = 0, m = 1 and miss = 0, the margin's w = ρ (1 − q_y) / (m q_y') is ρ itself.
    log = LogProbabilities(ops.take(log_pi_L, positive_B), log_pi_L, zero_B, zero_L, miss=zero_B, m=zero_B)
    log_rho_BL = WEIGHTS[objective.weight](log, **objective.weight_arguments).matrix()
    if never_L is not None:
        log_rho_BL = ops.where(never_L, MASKED, log_rho_BL)
    logits_BL = logits_BL + objective.offset
    if objective.family in _OF_THE_BRACKET:
        return log_rho_BL + logits_BL
    loss = LOSSES[objective.family].loss
    own_B = ops.take_along_axis(logits_BL, positive_B[:, None], axis=1)
    own_N = ops.reshape(ops.broadcast_to(own_B, (rows, labels)), (-1,))
    negative_N1, weight_N1 = ops.reshape(logits_BL, (-1, 1)), ops.zeros((rows * labels, 1))
    if objective.family == "pairwise_softmax":  # with one negative, the loss is the log of the negative's term
        return log_rho_BL + ops.reshape(
            loss(own_N, negative_N1, weight_N1, **objective.family_arguments), (rows, labels)
        )
    # The term of a negative is the loss with this negative alone, minus the loss with the negative masked.
    alone_N = loss(own_N, negative_N1, weight_N1 + MASKED, **objective.family_arguments)
    phi_N = loss(own_N, negative_N1, weight_N1, **objective.family_arguments) - alone_N
    log_phi_N = ops.where(phi_N > 0, ops.log(ops.maximum(phi_N, 1e-30)), MASKED)
    return log_rho_BL + ops.reshape(log_phi_N, (rows, labels))
