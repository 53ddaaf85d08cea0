"""The weight of every negative, `log w_yy' = row_y + col_y'` [METHODS §2.2; R21, Tables 1 and 2].

A weight is a row of `WEIGHTS`: a function from log-frequencies and log sampling probabilities to the
two terms. Nothing is clipped: a label of probability 1e-9 is corrected as any other.

Legend: `B` positives, `M` negatives (shared, [M], or one set per row, [B, M]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from longtail.trainer.losses.families import MASKED

Tensor = Any
"""A backend tensor; shapes are in the names."""


class LogProbabilities(NamedTuple):
    """What a weight may depend on; float32, natural logs.

    Attributes:
        pi_positive: [B], label frequency of each row's positive.
        pi_negative: [M] or [B, M].
        q_positive: [B], probability that the sampler draws the positive.
        q_negative: [M] or [B, M].
        miss: [B], log(1 − q_y): a draw is another label than the positive. Negatives left after masking
            are draws from q_y' / (1 − q_y), which is what makes importance weights exact.
        m: [B], log of the number of negatives that are left in the row after masking.
    """

    pi_positive: Tensor
    pi_negative: Tensor
    q_positive: Tensor
    q_negative: Tensor
    miss: Tensor
    m: Tensor


class LogWeight(NamedTuple):
    """A separable log-weight: `row` [B] of the positive, `col` [M] or [B, M] of the negative."""

    row: Tensor
    col: Tensor


def unit(log: LogProbabilities) -> LogWeight:
    """`w = 1`."""
    return LogWeight(ops.zeros_like(log.m), ops.zeros_like(log.q_negative))


def constant(log: LogProbabilities) -> LogWeight:
    """`w = 1/m`: with in-batch negatives the equalised loss, which helps the tail [R21, Table 2]."""
    return LogWeight(-log.m, ops.zeros_like(log.q_negative))


def relative(log: LogProbabilities) -> LogWeight:
    """`w = q_y/q_y'`: logQ on both sides [Yi19; R21, Table 1]; favours the head."""
    return LogWeight(log.q_positive, -log.q_negative)


def margin(log: LogProbabilities, rho: LogWeight) -> LogWeight:
    """`w = ρ_yy' (1 − q_y) / (m·q_y')`: the loss of any separable margin ρ through any sampler [R21 Prop. 4].

    Args:
        log: of the batch.
        rho: log of the margin.
    """
    return LogWeight(log.miss - log.m + rho.row, rho.col - log.q_negative)


def importance(log: LogProbabilities) -> LogWeight:
    """The margin `ρ = 1`: in expectation the full softmax cross-entropy [R21, Table 2]."""
    return margin(log, unit(log))


def logit_adjusted(log: LogProbabilities, *, tau: float = 1.0) -> LogWeight:
    """The margin `ρ = (π_y'/π_y)^τ` (Menon et al. 2020) [R21 eq. 4]: τ = 0 plain softmax, 1 balanced error."""
    return margin(log, LogWeight(-tau * log.pi_positive, tau * log.pi_negative))


def tail(log: LogProbabilities) -> LogWeight:
    """`logit_adjusted` with τ = 1: w = π_y'/(m·q_y'·π_y) [R21 eq. 14]."""
    return logit_adjusted(log)


def equalised(log: LogProbabilities, *, power: float = 1.0, threshold: float = 0.0) -> LogWeight:
    """The margin `ρ = F(π_y') = π_y'^power if π_y' ≥ threshold else 0` (Tan et al. 2020) [R21 eq. 4].

    A threshold takes rare labels out of the negatives altogether; `power = 1` is what in-batch negatives with
    `constant` do by themselves.
    """
    log_f = power * log.pi_negative
    if threshold > 0:
        log_f = ops.where(ops.exp(log.pi_negative) < threshold, MASKED, log_f)
    return margin(log, LogWeight(ops.zeros_like(log.m), log_f))


def adaptive(log: LogProbabilities, *, exponent: float = 0.25) -> LogWeight:
    """The margin `ρ = π_y^−exponent`, LDAM (Cao et al. 2019) [R21 eq. 4]: rare positives need a larger gap."""
    return margin(log, LogWeight(-exponent * log.pi_positive, ops.zeros_like(log.q_negative)))


WEIGHTS: dict[str, Callable[..., LogWeight]] = {
    "unit": unit,
    "constant": constant,
    "importance": importance,
    "relative": relative,
    "tail": tail,
    "logit_adjusted": logit_adjusted,
    "equalised": equalised,
    "adaptive": adaptive,
}
