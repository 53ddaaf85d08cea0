"""The weight of every negative, `log w_yy' = row_y + col_y'` [METHODS §2.2; R21, Tables 1 and 2], and of every pair.

A weight is a row of `WEIGHTS`: a function from log label frequencies π and log sampling probabilities q to the two
terms. Weights are never clipped: the correction is exact even for a label of probability 1e-9.

Legend: `B` positives, `M` negatives (shared, [M], or one set per row, [B, M]).

The examples of this file have a positive with π = 0.1 and two negatives with π = 0.2 and 0.05, drawn in proportion to
π:

    >>> import numpy as np
    >>> pi_B, pi_M = np.log(np.float32([0.1])), np.log(np.float32([0.2, 0.05]))
    >>> log = LogProbabilities(pi_B, pi_M, pi_B, pi_M, miss=np.float32([0]), m=np.log(np.float32([2])))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from longtail.bundle.arrays import Float32, Float64
from longtail.trainer.backend import Tensor, ops

MASKED = -1e30
"""The log of weight 0: its exponential is exactly 0 in float32, and unlike −inf it causes no NaN in gradients."""


def is_masked(log_weight_BM: Tensor) -> Tensor:
    """Return whether negatives have weight 0, bool of the same shape."""
    # Terms are added to MASKED, so compare with half of it: no finite log-weight comes near.
    return ops.less(log_weight_BM, MASKED / 2)


class LogProbabilities(NamedTuple):
    """Hold the inputs of a weight; float32, natural logs.

    Attributes:
        pi_positive: [B], label frequency of each row's positive.
        pi_negative: [M] or [B, M], label frequency of the negatives.
        q_positive: [B], probability that the sampler draws the positive.
        q_negative: [M] or [B, M], probability that the sampler draws the negative.
        miss: [B], log(1 − q_y) for a sampler that never draws the positive and so draws from q_y' / (1 − q_y). 0 for a
            sampler that may draw the positive, even if `hits` masks this draw.
        m: [B], log of the number of the row's draws, masked or not.
    """

    pi_positive: Tensor
    pi_negative: Tensor
    q_positive: Tensor
    q_negative: Tensor
    miss: Tensor
    m: Tensor


class LogWeight(NamedTuple):
    """Hold a separable log-weight, float32: `row` [B] of the positive, `col` [M] or [B, M] of the negative."""

    row: Tensor
    col: Tensor

    def matrix(self) -> Tensor:
        """Return log w of every negative, float32 [B, M]."""
        return self.row[:, None] + self.col


def unit(log: LogProbabilities) -> LogWeight:
    """Apply no correction: `w = 1` for all negatives [R21 §2.2].

    With in-batch negatives q = π: frequent labels are negatives more often than rare ones, and training divides p(y|x)
    by π [METHODS §9].

    Relations: equals `constant` times m, and `relative` if q is uniform.

    Example:
        >>> np.exp(unit(log).matrix()).round(2)
        array([[1., 1.]], dtype=float32)
    """
    return LogWeight(ops.zeros_like(log.m), ops.zeros_like(log.q_negative))


def constant(log: LogProbabilities) -> LogWeight:
    """Average over negatives instead of summing: `w = 1/m` [R21, Table 2].

    With in-batch negatives the implicit loss has `ρ = π_y'`, an equalised loss, which [R21 §4.1] expects to help the
    tail. Unlike with `unit`, the scale of the loss does not depend on the number of negatives.

    Relations: equals `equalised` with power 1 if q = π.

    Example:
        >>> np.exp(constant(log).matrix()).round(2)
        array([[0.5, 0.5]], dtype=float32)
    """
    return LogWeight(-log.m, ops.zeros_like(log.q_negative))


def relative(log: LogProbabilities) -> LogWeight:
    """Apply the logQ correction to positives and negatives: `w = q_y / q_y'` [Yi19; R21, Table 1].

    This equals subtracting log q from every logit, the positive's included, as `candidate_sampling_probability` of
    TensorFlow Recommenders does. [R21 §4.1] expects it to favour the head.

    Relations: equals `importance` times `m q_y`, a factor of the positive alone, and `unit` if q is uniform.

    Example:
        >>> np.exp(relative(log).matrix()).round(2)
        array([[0.5, 2. ]], dtype=float32)
    """
    return LogWeight(log.q_positive, -log.q_negative)


def margin(log: LogProbabilities, rho: LogWeight) -> LogWeight:
    """Realise a separable margin ρ with any sampler: `w = ρ_yy' / (m q_y')` [R21 Prop. 4].

    In expectation over the m draws, `Σ w exp(f_y' − f_y)` is `Σ ρ_yy' exp(f_y' − f_y)` over all labels that are not
    masked. For a sampler that never draws the positive, `w = ρ_yy' (1 − q_y) / (m q_y')`. The weights `importance`,
    `logit_adjusted`, `tail`, `equalised` and `adaptive` are margins.
    """
    return LogWeight(log.miss - log.m + rho.row, rho.col - log.q_negative)


def importance(log: LogProbabilities) -> LogWeight:
    """Weigh by importance: `w = 1 / (m q_y')`, the margin `ρ = 1` [R21, Table 2].

    For every q, the expectation over draws is the sum over all labels that are not masked. This sum is the full loss of
    a decoupled family, and the argument of the logarithm in the full softmax cross-entropy for `softmax`
    [R21 Lemma 2].

    Relations: equals `logit_adjusted` with τ = 0. With sampler `full` it is exact, not only in expectation.

    Example:
        >>> np.exp(importance(log).matrix()).round(2)
        array([[ 2.5, 10. ]], dtype=float32)
    """
    return margin(log, unit(log))


def logit_adjusted(log: LogProbabilities, *, tau: float = 1.0) -> LogWeight:
    """Adjust logits by the margin `ρ = (π_y' / π_y)^τ` (Menon et al. 2020) [R21 eq. 6].

    The logits converge to `log p(y|x) − τ log π_y` [METHODS §9]. With τ = 1 the label with the highest logit minimises
    the balanced error (Menon et al. 2020).

    Args:
        tau: τ; 0 gives the plain softmax.

    Relations: equals `importance` with τ = 0, and `tail` with τ = 1.

    Example:
        >>> np.exp(logit_adjusted(log, tau=1.0).matrix()).round(2)
        array([[5., 5.]], dtype=float32)
    """
    return margin(log, LogWeight(-tau * log.pi_positive, tau * log.pi_negative))


def tail(log: LogProbabilities) -> LogWeight:
    """Weigh for the balanced error: `w = π_y' / (m q_y' π_y)` [R21 eq. 16].

    Relations: equals `logit_adjusted` with τ = 1. If q = π, it equals `constant` times `1 / π_y`, a factor of the
    positive alone.

    Example:
        >>> np.exp(tail(log).matrix()).round(2)
        array([[5., 5.]], dtype=float32)
    """
    return logit_adjusted(log)


def equalised(
    log: LogProbabilities, *, power: float = 1.0, threshold: Annotated[float, Field(ge=0, lt=1)] = 0.0
) -> LogWeight:
    """Weigh rare negatives less: the margin `ρ = F(π_y')` with `F(π) = π^power`, and 0 below the threshold.

    [R21 §2.1] calls any increasing F an equalised loss. The loss of Tan et al. (2020) has power 0 and drops a rare
    label at random, with probability γ at each occurrence. In expectation this is `ρ = 1 − γ` below the threshold; with
    γ = 1 it equals this weight.

    Args:
        power: exponent of π_y'.
        threshold: labels with a lower frequency are never negatives.

    Relations: with power 1, equals `constant` with in-batch negatives. With power 0 and no threshold, equals
    `importance`.

    Example:
        >>> np.exp(equalised(log, threshold=0.1).matrix()).round(2)
        array([[0.5, 0. ]], dtype=float32)
    """
    log_f = power * log.pi_negative
    if threshold > 0:
        log_f = ops.where(ops.exp(log.pi_negative) < threshold, MASKED, log_f)
    return margin(log, LogWeight(ops.zeros_like(log.m), log_f))


def adaptive(
    log: LogProbabilities, *, exponent: float = 0.25, scale: Annotated[float, Field(gt=0)] | None = None
) -> LogWeight:
    """Require larger margins of rare positives: `ρ = π_y^−exponent` [R21 §2.1].

    This is the form in which [R21] prints LDAM (Cao et al. 2019). LDAM itself has a margin Δ_y ∝ n_y^−¼ of the
    *logits*, which is `log ρ ∝ π_y^−exponent`; `scale` selects this form. Δ_y = C n_y^−¼ with N pairs corresponds to
    `scale = C·N^−¼`.

    Args:
        exponent: exponent of 1/π_y.
        scale: uses the margin Δ_y = scale·π_y^−exponent of the logits; None uses the form of [R21].

    Relations: with exponent 0, equals `importance`. With exponent 1, equals `tail` without the factor π_y' of the
    negative.

    Example:
        >>> np.exp(adaptive(log, exponent=1.0).matrix()).round(2)
        array([[ 25., 100.]], dtype=float32)
    """
    log_rho_B = -exponent * log.pi_positive
    if scale is not None:
        log_rho_B = scale * ops.exp(log_rho_B)
    return margin(log, LogWeight(log_rho_B, ops.zeros_like(log.q_negative)))


def pair_weights(log_pi_L: Float64, share_L: Float64, *, reweight: float) -> Float32:
    """Compute the weight of pairs by label: `π_y^−reweight`, mean 1 over pairs, float32 [L].

    Re-weighting by frequency raises the weight of rare labels [R21 §2.1]; exponent 1 gives every label the same total
    weight. It scales a whole row, positive and negatives, while a weight of `WEIGHTS` scales only the negatives.

    Args:
        share_L: each label's share of an epoch's visits; the sum is 1.
        reweight: exponent of 1/π_y; 0 weighs all pairs alike.

    Example:
        >>> pair_weights(np.log([0.5, 0.25, 0.25]), np.array([0.5, 0.25, 0.25]), reweight=1).round(3)
        array([0.667, 1.333, 1.333], dtype=float32)
    """
    log_weight_L = -reweight * log_pi_L
    weight_L = np.exp(log_weight_L - log_weight_L.max())  # the largest exponent is 0, so nothing overflows
    mean_one_L: Float32 = (weight_L / (share_L @ weight_L)).astype(np.float32)
    return mean_one_L


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
"""Weights of negatives, by their names in a recipe's `[loss] weight`.

A row is a function of `LogProbabilities` that returns a `LogWeight`. Its keyword-only parameters are the keys that a
recipe may set. To add the weight of a paper, add a row.

Example:
    >>> list(WEIGHTS)[:4]
    ['unit', 'constant', 'importance', 'relative']
"""

MARGINS = ("importance", "tail", "logit_adjusted", "equalised", "adaptive")
"""Weights that realise the same margin ρ with any sampler [R21 Prop. 4]; the ρ of the others depends on q."""
