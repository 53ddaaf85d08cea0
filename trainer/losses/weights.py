"""The weight of every negative, `log w_yy' = row_y + col_y'` [METHODS §2.2; R21, Tables 1 and 2], and of every pair.

A weight is a row of `WEIGHTS`: a function from log label frequencies π and log sampling probabilities q to the
two terms. Nothing is clipped: a label of probability 1e-9 is corrected as any other.

Legend: `B` positives, `M` negatives (shared, [M], or one set per row, [B, M]).

The examples of this file are of a positive with π = 0.1 among two negatives with π = 0.2 and 0.05, drawn in
proportion to π:

    >>> import numpy as np
    >>> pi_B, pi_M = np.log(np.float32([0.1])), np.log(np.float32([0.2, 0.05]))
    >>> log = LogProbabilities(pi_B, pi_M, pi_B, pi_M, miss=np.float32([0]), m=np.log(np.float32([2])))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Float32, Float64
from longtail.trainer.backend import Tensor, ops

MASKED = -1e30
"""The log of weight 0: its exponential is exactly 0 in float32, and unlike −inf it makes no NaN in gradients."""


def is_masked(log_weight_BM: Tensor) -> Tensor:
    """Get which negatives have weight 0, bool of the same shape; `MASKED` plus any finite logs is below half of it."""
    return ops.less(log_weight_BM, MASKED / 2)


class LogProbabilities(NamedTuple):
    """What a weight may depend on; float32, natural logs.

    Attributes:
        pi_positive: [B], label frequency of each row's positive.
        pi_negative: [M] or [B, M].
        q_positive: [B], probability that the sampler draws the positive.
        q_negative: [M] or [B, M].
        miss: [B], log(1 − q_y) where the sampler never draws the positive, so that draws are of q_y' / (1 − q_y); 0
            where it may, whether such a draw is then masked or kept.
        m: [B], log of the number of the row's draws, masked or not.
    """

    pi_positive: Tensor
    pi_negative: Tensor
    q_positive: Tensor
    q_negative: Tensor
    miss: Tensor
    m: Tensor


class LogWeight(NamedTuple):
    """A separable log-weight, float32: `row` [B] of the positive, `col` [M] or [B, M] of the negative."""

    row: Tensor
    col: Tensor

    def matrix(self) -> Tensor:
        """log w of every negative, float32 [B, M]."""
        return self.row[:, None] + self.col


def unit(log: LogProbabilities) -> LogWeight:
    """No correction: `w = 1`, one constant for all negatives [R21 §2.2].

    With in-batch negatives, where q = π, frequent labels are negatives more often than rare ones, and training divides
    p(y|x) by π [METHODS §9].

    Relations: `constant` times m. `relative` where q is uniform.

    Example:
        >>> np.exp(unit(log).matrix()).round(2)
        array([[1., 1.]], dtype=float32)
    """
    return LogWeight(ops.zeros_like(log.m), ops.zeros_like(log.q_negative))


def constant(log: LogProbabilities) -> LogWeight:
    """Return the mean over negatives in place of their sum: `w = 1/m` [R21, Table 2].

    With in-batch negatives the implicit loss has `ρ = π_y'`, an equalised loss, which [R21 §4.1] expects to help the
    tail.

    Relations: `equalised` with power 1 where q = π. Unlike `unit` its scale does not depend on the number of
    negatives.

    Example:
        >>> np.exp(constant(log).matrix()).round(2)
        array([[0.5, 0.5]], dtype=float32)
    """
    return LogWeight(-log.m, ops.zeros_like(log.q_negative))


def relative(log: LogProbabilities) -> LogWeight:
    """logQ correction of both sides: `w = q_y / q_y'` [Yi19; R21, Table 1]; [R21 §4.1] expects it to favour the head.

    The same as subtracting log q from every logit, the positive's included: TensorFlow Recommenders'
    `candidate_sampling_probability`.

    Relations: `importance` times `m q_y`, a factor of the positive alone. `unit` where q is uniform.

    Example:
        >>> np.exp(relative(log).matrix()).round(2)
        array([[0.5, 2. ]], dtype=float32)
    """
    return LogWeight(log.q_positive, -log.q_negative)


def margin(log: LogProbabilities, rho: LogWeight) -> LogWeight:
    """Return the loss of a separable margin ρ through any sampler: `w = ρ_yy' / (m q_y')` [R21 Prop. 4].

    In expectation over the m draws, `Σ w exp(f_y' − f_y)` is `Σ ρ_yy' exp(f_y' − f_y)` over all labels that are not
    masked. A sampler that never draws the positive makes it `w = ρ_yy' (1 − q_y) / (m q_y')`. The rows `importance`,
    `logit_adjusted`, `tail`, `equalised` and `adaptive` are margins.
    """
    return LogWeight(log.miss - log.m + rho.row, rho.col - log.q_negative)


def importance(log: LogProbabilities) -> LogWeight:
    """Importance weights: `w = 1 / (m q_y')`, the margin `ρ = 1` [R21, Table 2].

    In expectation over draws from q, whatever that is, the sum over all labels that are not masked: of a decoupled
    family the full loss, of `softmax` what stands inside the logarithm of the full softmax cross-entropy [R21 Lemma 2].

    Relations: `logit_adjusted` with τ = 0. With sampler `full`, exact and not only in expectation.

    Example:
        >>> np.exp(importance(log).matrix()).round(2)
        array([[ 2.5, 10. ]], dtype=float32)
    """
    return margin(log, unit(log))


def logit_adjusted(log: LogProbabilities, *, tau: float = 1.0) -> LogWeight:
    """Logit adjustment: the margin `ρ = (π_y' / π_y)^τ` (Menon et al. 2020) [R21 eq. 6].

    Converges to `log p(y|x) − τ log π_y` [METHODS §9]; at τ = 1 the highest logit is then the label of least balanced
    error (Menon et al. 2020).

    Args:
        tau: τ; 0 is plain softmax.

    Relations: τ = 0 is `importance`, τ = 1 is `tail`.

    Example:
        >>> np.exp(logit_adjusted(log, tau=1.0).matrix()).round(2)
        array([[5., 5.]], dtype=float32)
    """
    return margin(log, LogWeight(-tau * log.pi_positive, tau * log.pi_negative))


def tail(log: LogProbabilities) -> LogWeight:
    """Return the balanced error's weight: `w = π_y' / (m q_y' π_y)` [R21 eq. 16].

    Relations: `logit_adjusted` with τ = 1. Where q = π, `constant` times `1 / π_y`, a factor of the positive alone.

    Example:
        >>> np.exp(tail(log).matrix()).round(2)
        array([[5., 5.]], dtype=float32)
    """
    return logit_adjusted(log)


def equalised(log: LogProbabilities, *, power: float = 1.0, threshold: float = 0.0) -> LogWeight:
    """Rare labels are spared as negatives: the margin `ρ = F(π_y')`, `F(π) = π^power` if π ≥ threshold, else 0.

    "Equalised" as [R21 §2.1] reads Tan et al. (2020): any increasing F, and no chance in it. Their own loss has power 0
    and spares a rare label with a probability γ, drawn anew every time; in expectation that is `ρ = 1 − γ` below the
    threshold, and with γ = 1 it is this one.

    Args:
        threshold: labels less frequent than this are no negatives at all.

    Relations: `power = 1` is what in-batch negatives with `constant` do by themselves. `power = 0` without a
    threshold is `importance`.

    Example:
        >>> np.exp(equalised(log, threshold=0.1).matrix()).round(2)
        array([[0.5, 0. ]], dtype=float32)
    """
    log_f = power * log.pi_negative
    if threshold > 0:
        log_f = ops.where(ops.exp(log.pi_negative) < threshold, MASKED, log_f)
    return margin(log, LogWeight(ops.zeros_like(log.m), log_f))


def adaptive(log: LogProbabilities, *, exponent: float = 0.25, scale: float | None = None) -> LogWeight:
    """Rare positives must stand further above their negatives: the margin `ρ = π_y^−exponent` [R21 §2.1].

    [R21] prints Cao et al. (2019) so. LDAM's own is the margin Δ_y ∝ n_y^−¼ of the *logits*, `log ρ ∝ π_y^−exponent`;
    with `scale` it is that. Δ_y = C n_y^−¼ of N pairs is `scale = C·N^−¼`.

    Args:
        scale: Δ_y = scale·π_y^−exponent, logits, in place of the logarithm's; None for [R21]'s form.

    Relations: `exponent = 0` is `importance`. `exponent = 1` is `tail` without its factor π_y' of the negative.

    Example:
        >>> np.exp(adaptive(log, exponent=1.0).matrix()).round(2)
        array([[ 25., 100.]], dtype=float32)
    """
    log_rho_B = -exponent * log.pi_positive
    if scale is not None:
        log_rho_B = scale * ops.exp(log_rho_B)
    return margin(log, LogWeight(log_rho_B, ops.zeros_like(log.q_negative)))


def pair_weights(log_pi_L: Float64, share_L: Float64, *, reweight: float) -> Float32:
    """Return what the loss of a pair is multiplied by, by its label: `π_y^−reweight`, mean 1 over the pairs, float32
    [L].

    Re-weighting by frequency, which rare labels' pairs gain from [R21 §2.1]: 1 counts every label alike. It scales a
    whole row, positive and negatives, where a weight of `WEIGHTS` scales the negatives alone.

    Args:
        share_L: share of an epoch's visits that a label has; sums to 1.
        reweight: exponent of 1/π_y; 0 leaves pairs as they are.

    Example:
        >>> pair_weights(np.log([0.5, 0.25, 0.25]), np.array([0.5, 0.25, 0.25]), reweight=1).round(3)
        array([0.667, 1.333, 1.333], dtype=float32)
    """
    log_weight_L = -reweight * log_pi_L
    weight_L = np.exp(log_weight_L - log_weight_L.max())
    normalised_L: Float32 = (weight_L / (share_L @ weight_L)).astype(np.float32)
    return normalised_L


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
"""What every negative weighs, by the name that a recipe's `[loss] weight` calls it.

A row is a function of `LogProbabilities` that returns a `LogWeight`; its keyword-only parameters are the keys that a
recipe may set. A paper is added by adding its row.

Example:
    >>> list(WEIGHTS)[:4]
    ['unit', 'constant', 'importance', 'relative']
"""

MARGINS = ("importance", "tail", "logit_adjusted", "equalised", "adaptive")
"""Weights that are a margin ρ through any sampler [R21 Prop. 4]; the others have a ρ that depends on q."""
