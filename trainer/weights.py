"""The weight of every negative, `log w_yy' = row_y + col_y'` [METHODS §2.2; R21, Tables 1 and 2].

A weight is a row of `WEIGHTS`: a function from log-frequencies and log sampling probabilities to the
two terms. Nothing is clipped: a label of probability 1e-9 is corrected as any other.

Legend: `B` positives, `M` negatives (shared, [M], or one set per row, [B, M]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

Tensor = Any
"""A backend tensor; shapes are in the names."""


class LogProbabilities(NamedTuple):
    """What a weight may depend on; float32, natural logs.

    Attributes:
        pi_positive: [B], label frequency of each row's positive.
        pi_negative: [M] or [B, M].
        q_positive: [B], probability that the sampler draws the positive.
        q_negative: [M] or [B, M].
        m: [B], log of the number of negatives that are left in the row after masking.
    """

    pi_positive: Tensor
    pi_negative: Tensor
    q_positive: Tensor
    q_negative: Tensor
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


def importance(log: LogProbabilities) -> LogWeight:
    """`w = 1/(m·q_y')`: in expectation the full softmax cross-entropy [R21, Table 2]."""
    return LogWeight(-log.m, -log.q_negative)


def relative(log: LogProbabilities) -> LogWeight:
    """`w = q_y/q_y'`: logQ on both sides [Yi19; R21, Table 1]; favours the head."""
    return LogWeight(log.q_positive, -log.q_negative)


def tail(log: LogProbabilities) -> LogWeight:
    """`w = π_y'/(m·q_y'·π_y)`: in expectation the logit-adjusted loss [R21 eq. 16]."""
    return LogWeight(-log.m - log.pi_positive, log.pi_negative - log.q_negative)


WEIGHTS: dict[str, Callable[[LogProbabilities], LogWeight]] = {
    "unit": unit,
    "constant": constant,
    "importance": importance,
    "relative": relative,
    "tail": tail,
}
