"""Loss families over a positive's logit and its weighted negatives [METHODS §2, §4].

A family is a row of `LOSSES`. The arguments of every family are

    positive_B: logits of the positives, float32 [B].
    negative_BM: logits of the negatives, float32 [B, M].
    log_weight_BM: natural log of the negatives' weights w, float32 [B, M]; `MASKED` excludes a negative from the value
        and from the gradient.

It returns the losses of the rows, float32 [B], in nats unless its docstring says otherwise. f_y is the positive's logit
and f_y' a negative's. Families raise no errors, as the recipe is checked before.

Hits are draws that are a positive of their row, which a recipe masks or keeps (`hits`); `Family.hits` is the default.
Statements about convergence hold for a query with p(y|x), with free scores and many draws; ν is the implied noise
[METHODS §9].

Legend: `B` positives, `M` negatives.

The examples of this file have one positive with logit 1 and two negatives of weight 1 with logits 0 and −1:

    >>> import numpy as np
    >>> row = np.float32([1]), np.float32([[0, -1]]), np.float32([[0, 0]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.weights import MASKED, is_masked

Phi = Callable[[Tensor], Tensor]
"""A decreasing margin loss φ, or a function of gaps, applied to every element."""
Positive = Annotated[float, Field(gt=0)]
Activation = Literal["tanh", "arctan", "relu"]
"""Functions that `pairwise_softmax` uses instead of the exponential."""


def softmax(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Compute the sampled softmax cross-entropy [R21 eq. 7].

    `log[1 + Σ w_yy' exp(f_y' − f_y)] = softplus(logsumexp_y'(f_y' + log w_yy') − f_y)`

    A row whose negatives are all masked has loss 0.

    Hits: masked. With weight `importance`, `tail` or `logit_adjusted` the loss converges to f + log ν = log p. With
    other weights it does not, even with many draws. Let ρ_yy' = row_y·col_y', c_y = row_y·col_y and
    s = softmax(f + log col). With masked hits the loss converges to s(1 − s + s/c) ∝ p, with kept hits to
    s(1 + s/c) ∝ p. In-batch `unit` weights have c_y = (B − 1)·π_y. For p = .5 among four labels, masked hits give
    s = .73 with c = 10 and .96 with c = 1000; kept hits give .49 and .50.

    Relations: equals the full softmax cross-entropy with sampler `full` and weight `importance`, and `Retrieval` of
    TensorFlow Recommenders, with sampling probabilities, with in-batch negatives and weight `relative`.

    Example:
        >>> softmax(*row).numpy().round(4)  # log(1 + e⁻¹ + e⁻²)
        array([0.4076], dtype=float32)
    """
    return ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))


def bilateral_softmax(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, power: Positive = 1.0
) -> Tensor:
    """Compute the bilateral softmax loss: `−f_y + ρ·log Σ w exp(f_y')` (Wu et al. 2023, BSL) [METHODS §10].

    The positive occurs only in the first term. In training, rows of a batch with the same query share this term: the
    mean of exp(f_y) over these rows replaces exp(f_y) of each (`pool_positives`). A positive with a much lower score
    than the others, which may be noise, then has a smaller gradient. Rows do not share the term with `top_k`, nor in a
    task of TensorFlow Recommenders, which does not know the queries. ρ is the ratio of two temperatures, of
    positives and of negatives; above 1 it weighs hard negatives more.

    A row whose negatives are all masked has the loss −f_y.

    Args:
        power: ρ; 1 to 1.3 [Wu et al. 2023]. With ρ ≠ 1, a constant added to all logits changes the loss, so logits
            must be bounded: cosines divided by a temperature.

    Hits: kept, as in a `softmax` over draws that may be the positive. With ρ = 1 and distinct queries in a batch, the
    loss converges to f + log ν = log p. With pooled positives no λ recovers p, as one well-scored positive satisfies
    their common term.

    Relations: equals `softmax` with ρ = 1 and the positive among the negatives.

    Example:
        >>> bilateral_softmax(*row, power=1.2).numpy().round(4)  # 1.2·log(1 + e⁻¹) − 1
        array([-0.6241], dtype=float32)
    """
    some_B = ops.logical_not(ops.all(is_masked(log_weight_BM), axis=1))
    total_B = ops.logsumexp(negative_BM + log_weight_BM, axis=1)  # about MASKED without a negative
    return power * ops.where(some_B, total_B, 0.0) - positive_B


def pairwise_softmax(
    positive_B: Tensor,
    negative_BM: Tensor,
    log_weight_BM: Tensor,
    *,
    activation: Activation = "tanh",
    width: Positive = 20.0,
) -> Tensor:
    """Compute the pairwise softmax loss: `log Σ w σ(d)^c`, `d = (f_y' − f_y)/c` (Yang et al. 2024, PSL).

    σ replaces the exponential of gaps: 1 + tanh d, 1 + arctan d or max(1 + d, 0). All have value 1 and slope 1 at 0, so
    small gaps count as in `softmax`. A negative with a much higher score than its positive, which may be a false
    negative, has a smaller gradient than in `softmax`. With `relu`, a negative that is more than c below the positive
    has no effect. The paper halves cosines and has exponents 1/τ: c = 2/T, the largest gap of cosines divided by a
    temperature.

    A row whose negatives all have no effect has loss 0.

    Args:
        activation: σ, which replaces the exponential.
        width: c, in logits.

    Hits: masked, because the gap between a label and itself is constant.

    Relations: approaches `bilateral_softmax` with ρ = 1 as c grows.

    Example:
        >>> pairwise_softmax(*row, width=2.0).numpy().round(4)  # the log of (1 − tanh ½)² + (1 − tanh 1)²
        array([-1.0609], dtype=float32)
    """
    log_term_BM = log_weight_BM + width * _LOG_OF[activation]((negative_BM - positive_B[:, None]) / width)
    some_B = ops.logical_not(ops.all(is_masked(log_term_BM), axis=1))
    return ops.where(some_B, ops.logsumexp(ops.maximum(log_term_BM, MASKED), axis=1), 0.0)


def _log_positive(x: Tensor) -> Tensor:
    """Compute log x; `MASKED`, without a gradient, if x ≤ 0."""
    above = ops.greater(x, 0.0)
    # The inner `where` keeps log(0) out of the gradient: 0 · ∞ would be NaN.
    return ops.where(above, ops.log(ops.where(above, x, 1.0)), MASKED)


_LOG_OF: dict[str, Phi] = {
    # 1 + tanh d = 2 / (1 + e^(−2d)), whose log is finite for any d.
    "tanh": lambda d: math.log(2) - ops.softplus(-2 * d),
    "arctan": lambda d: _log_positive(1 + ops.arctan(d)),
    "relu": lambda d: _log_positive(1 + d),
}


def pool_positives(positive_B: Tensor, groups_B: Tensor) -> Tensor:
    """Compute the log of the mean exp(f_y) in each row's group, float32 [B].

    Args:
        positive_B: logits of the positives, float32.
        groups_B: the group of every row, int32, below B.

    Example:
        >>> pool_positives(np.log(np.float32([1, 2, 3])), np.int32([0, 1, 0])).numpy().round(4)  # log 2 everywhere
        array([0.6931, 0.6931, 0.6931], dtype=float32)
    """
    groups = positive_B.shape[0]
    # logsumexp per group: subtract the group's largest logit first, so that exp cannot overflow.
    most_B = ops.stop_gradient(ops.take(ops.segment_max(positive_B, groups_B, num_segments=groups), groups_B))
    sums_G = ops.segment_sum(ops.exp(positive_B - most_B), groups_B, num_segments=groups)
    sizes_G = ops.segment_sum(ops.ones_like(positive_B), groups_B, num_segments=groups)
    return most_B + ops.log(ops.take(sums_G, groups_B)) - ops.log(ops.take(sizes_G, groups_B))


def logistic(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Compute the logistic loss (binary cross-entropy): `φ(u) = log(1 + exp(−u))` [R21 eq. 8].

    `φ(f_y) + Σ w φ(−f_y')` compares each logit with 0, as BOWL [Re19 Definition 4]. The pairwise form
    `Σ w φ(f_y − f_y')` compares each negative with the positive, as POWL [Re19 Definition 3].

    Hits: kept, as in [BM20 eq. 2]. The loss converges to f + log ν = log p + const(x) [BM20 Theorem 1], and with weight
    `importance` to f = log p itself. With masked hits, and a weight without a term of the positive, it converges to
    f + log ν = log(p/(1 − p)) + const(x). The ranking is the same, but p = .70 among three labels with .10 each comes
    out as .875. The pairwise form masks hits, because the gap between a label and itself is constant; it converges to
    f + log ν = log p + const(x).

    Training adds a constant to logits, at which one positive balances its negatives (`balance`).

    Args:
        pairwise: compares every negative with the positive.

    Relations: [Re19] uses log2, which makes the loss 1/ln 2 times as large. With uniform negatives and weight `unit` it
    is the usual sampled binary cross-entropy. The pairwise form is One-vs-Each (Titsias 2016), an upper bound of
    `softmax`, with uniform negatives and `importance` weights, and BPR (Rendle et al. 2009) with weight `unit` and one
    negative.

    Example:
        >>> logistic(*row).numpy().round(4), logistic(*row, pairwise=True).numpy().round(4)
        (array([1.3197], dtype=float32), array([0.4402], dtype=float32))
    """
    return _decoupled(lambda u: ops.softplus(-u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def contrastive(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: Annotated[float, Field(ge=-1)] = 0.0
) -> Tensor:
    """Compute the cosine contrastive loss: `(1 − f_y)² + Σ w max(f_y' − margin, 0)²` [R21 §5.1].

    Logits must be plain cosines: a recipe needs `similarity = "cosine"`, temperature 1, and no label bias. The loss has
    no unit.

    Hits: masked. With kept hits and margin 0 the loss converges to f = p/(p + ρ), which is no log-probability.

    Args:
        margin: the cosine below which a negative costs nothing.

    Example:
        >>> contrastive(np.float32([0.5]), np.float32([[0.25, -1]]), np.float32([[0, 0]])).numpy()
        array([0.3125], dtype=float32)
    """
    negatives_B = _weighted_sum(lambda f: ops.square(ops.relu(f - margin)), negative_BM, log_weight_BM)
    return ops.square(1 - positive_B) + negatives_B


def hinge(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Compute the hinge loss: `φ(u) = max(1 − u, 0)` [Re19 §3], in the two forms of `logistic`.

    The loss has no unit.

    Args:
        pairwise: compares every negative with the positive.

    Hits: masked. With kept hits it converges to f = 1 if p > ρ and −1 if p < ρ, and has no likelihood.

    Relations: the pairwise form with weight `unit` is the margin ranking loss with margin 1.

    Example:
        >>> hinge(*row).numpy(), hinge(*row, pairwise=True).numpy()
        (array([1.], dtype=float32), array([0.], dtype=float32))
    """
    return _decoupled(lambda u: ops.relu(1 - u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def squared_hinge(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Compute the squared hinge loss: `φ(u) = max(1 − u, 0)²` [Re19 §3], in the two forms of `logistic`.

    The loss has no unit.

    Args:
        pairwise: compares every negative with the positive.

    Hits: masked. With kept hits it converges to f = (p − ρ)/(p + ρ), which is no log-probability.

    Example:
        >>> squared_hinge(*row).numpy(), squared_hinge(*row, pairwise=True).numpy()
        (array([1.], dtype=float32), array([0.], dtype=float32))
    """
    return _decoupled(lambda u: ops.square(ops.relu(1 - u)), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def exponential(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Compute the exponential loss: `φ(u) = exp(−u)` [Re19 §3], in the two forms of `logistic`.

    The loss has no unit.

    Args:
        pairwise: compares every negative with the positive.

    Hits: masked. With kept hits it converges to f + ½ log ν = ½ log p + const(x).

    Relations: the pairwise form equals `exp(softmax) − 1` in every row.

    Example:
        >>> exponential(*row, pairwise=True).numpy().round(4)  # e⁻¹ + e⁻²
        array([0.5032], dtype=float32)
    """
    return _decoupled(lambda u: ops.exp(-u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def ramp(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: Positive = 1.0, pairwise: bool = False
) -> Tensor:
    """Compute the ramp loss: `φ(u) = clip(1 − u/margin, 0, 1)` [Re19 §3], in the two forms of `logistic`.

    The loss is bounded and not convex, and has no unit.

    Args:
        margin: width of the slope, in logits.
        pairwise: compares every negative with the positive.

    Hits: masked. With kept hits it converges to f ≥ margin if p > ρ and f ≤ −margin if p < ρ, and has no likelihood.

    Relations: equals `hinge` clipped at 1 with margin 1.

    Example:
        >>> ramp(*row, margin=2.0).numpy()  # 1 − ½ of the positive, then 1 and 1 − ½ of the negatives
        array([2.], dtype=float32)
    """
    return _decoupled(
        lambda u: ops.clip(1 - u / margin, 0.0, 1.0), positive_B, negative_BM, log_weight_BM, pairwise=pairwise
    )


def nce(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Compute noise contrastive estimation: `logistic` of `f − log(m·q)` (Gutmann and Hyvärinen 2010) [BM20 §5].

    The objective shifts the logits (`Family.shifted`), so this function gets logits with the shift. Training also adds
    −log L to logits (`balance`), so that they begin at the log-probability of a uniform distribution.

    Hits: kept, by definition. Draws of the positive count as noise like any other draw, and the model learns log p(y|x)
    itself, up to the constant −log L.

    Relations: `logistic` with unshifted logits learns `log p(y|x) − log(m·q_y)` instead of log p(y|x).

    Example:
        >>> bool(nce(*row) == logistic(*row))
        True
    """
    return logistic(positive_B, negative_BM, log_weight_BM)


def augment_and_reduce(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, log_eta_B: Tensor) -> Tensor:
    """Compute Augment & Reduce's bound of the softmax, one η per pair (Ruiz et al. 2018).

    `log η + (1 + Σ w exp(f_y' − f_y))/η − 1 ≥ log[1 + Σ w exp(f_y' − f_y)]`. The bound is linear in the sum, so an
    importance-weighted sample of negatives estimates it without bias. η is a variational parameter of every training
    pair.

    Args:
        log_eta_B: log η of the batch's pairs, float32 [B], kept by the training step.

    Hits: masked. The loss converges to log p, as `softmax` with weight `importance` does.

    Relations: equals `softmax` if η is the bracket 1 + Σ w exp(f_y' − f_y), and is an upper bound of `softmax` for any
    other η.

    Example:
        >>> augment_and_reduce(*row, log_eta_B=softmax(*row)).numpy().round(4)
        array([0.4076], dtype=float32)
    """
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))
    return log_eta_B + ops.exp(bracket_B - log_eta_B) - 1


def next_log_eta(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, log_eta_B: Tensor, rate: Tensor
) -> Tensor:
    """Take a natural-gradient step of log η of `augment_and_reduce`, float32 [B] (Ruiz et al. 2018).

    `η ← (1 − rate)·η + rate·(1 + Σ w exp(f_y' − f_y))`
    """
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))  # log of the bracket
    return ops.logaddexp(ops.log1p(-rate) + log_eta_B, ops.log(rate) + bracket_B)


def _log_odds(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Compute the log-odds against the positive, log `Σ w_yy' exp(f_y' − f_y)`, [B]."""
    return ops.logsumexp(negative_BM + log_weight_BM, axis=1) - positive_B


def _decoupled(phi: Phi, positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool) -> Tensor:
    """Compute `φ(f_y) + Σ w φ(−f_y')` [R21 eq. 8], or `Σ w φ(f_y − f_y')` if `pairwise`; [B]."""
    gaps_BM = positive_B[:, None] - negative_BM if pairwise else -negative_BM
    negatives_B = _weighted_sum(phi, gaps_BM, log_weight_BM)
    return negatives_B if pairwise else phi(positive_B) + negatives_B


def _weighted_sum(phi: Phi, x_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Compute Σ w φ(x), [B]."""
    masked_BM = is_masked(log_weight_BM)
    # Masked logits are replaced before φ, because 0 · ∞ would be NaN.
    return ops.sum(ops.exp(log_weight_BM) * phi(ops.where(masked_BM, 0.0, x_BM)), axis=1)


@dataclass(frozen=True)
class Family:
    """Describe one loss and its requirements.

    Attributes:
        loss: function of positives [B], negatives [B, M], log-weights [B, M] and the family's own parameters; float32
            [B].
        cosine: the loss is defined on plain cosines: similarity cosine, temperature 1, no label bias.
        weights: allowed weights; None for any.
        shifted: logits of positives and negatives are `f − log(m·q)`, so the loss learns log p(y|x) itself [BM20 §5].
        balanced: logits are log-odds against the negatives' total weight. Training adds the constant at which logits
            of 0 balance positive and negatives.
        stateful: the loss keeps a number η per training pair.
        pooled: rows of a batch with the same query share one positive term (`pool_positives`).
        ranks: the loss compares the positive with its negatives and so grows with the rank of the positive. Otherwise
            it compares each logit with 0, except in the pairwise form.
        hits: default of a recipe's `hits`.
        link: slope of the optimal logit in log(p(y|x)/ν) [METHODS §9]; None if the optimum is not linear in it.
    """

    loss: Callable[..., Tensor]
    cosine: bool = False
    weights: tuple[str, ...] | None = None
    shifted: bool = False
    balanced: bool = False
    stateful: bool = False
    pooled: bool = False
    ranks: bool = True
    hits: Hits = "mask"
    link: float | None = 1.0


LOSSES: dict[str, Family] = {
    "softmax": Family(softmax),
    "bilateral_softmax": Family(bilateral_softmax, pooled=True, hits="keep"),
    "pairwise_softmax": Family(pairwise_softmax, link=None),
    "logistic": Family(logistic, balanced=True, ranks=False, hits="keep"),
    "contrastive": Family(contrastive, cosine=True, ranks=False, link=None),
    "hinge": Family(hinge, ranks=False, link=None),
    "squared_hinge": Family(squared_hinge, ranks=False, link=None),
    "exponential": Family(exponential, ranks=False, link=0.5),
    "ramp": Family(ramp, ranks=False, link=None),
    "nce": Family(nce, weights=("unit",), shifted=True, balanced=True, ranks=False, hits="keep"),
    "augment_and_reduce": Family(augment_and_reduce, weights=("importance",), stateful=True),
}
"""Loss families, by their names in a recipe's `[loss] family`.

A row is a `Family`. The keyword-only parameters of its function are the keys that a recipe may set. To add the loss of
a paper, add a row.

Example:
    >>> LOSSES["nce"].weights
    ('unit',)
"""
