"""Loss families over a positive's logit and its weighted negatives [METHODS §2, §4].

A family is a row of `LOSSES`. Every one is called with

    positive_B: logits of the positives, float32 [B].
    negative_BM: logits of the negatives, float32 [B, M].
    log_weight_BM: natural log of the negatives' weights w, float32 [B, M]; `MASKED` leaves a negative out, of the
        value and of the gradient.

and returns the losses of the rows, float32 [B], in nats unless it says otherwise. f_y is the positive's logit and
f_y' a negative's. Families raise nothing: a recipe is checked before.

Hits are draws that are a positive of their row, which a recipe masks or keeps (`hits`); `Family.hits` is the default.
What a family says it converges to is of a query with p(y|x), where the scores are free and draws many; ν is the implied
noise [METHODS §9].

Legend: `B` positives, `M` negatives.

The examples of this file are of one positive with logit 1 and two negatives of weight 1 with logits 0 and −1:

    >>> import numpy as np
    >>> row = np.float32([1]), np.float32([[0, -1]]), np.float32([[0, 0]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses.hits import Hits
from longtail.trainer.losses.weights import MASKED, is_masked

Phi = Callable[[Tensor], Tensor]
"""A falling margin loss φ, or a function of gaps, element by element."""
Activation = Literal["tanh", "arctan", "relu"]
"""What `pairwise_softmax` has in the place of the exponential."""


def softmax(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Sampled softmax cross-entropy [R21 eq. 7].

    `log[1 + Σ w_yy' exp(f_y' − f_y)] = softplus(logsumexp_y'(f_y' + log w_yy') − f_y)`

    A row whose negatives are all masked has loss 0.

    Hits: masked. With weight `importance`, `tail` or `logit_adjusted` it converges to f + log ν = log p. With others it
    does not, however many draws: with ρ_yy' = row_y·col_y', c_y = row_y·col_y and s = softmax(f + log col), masked it
    converges to s(1 − s + s/c) ∝ p and kept to s(1 + s/c) ∝ p. In-batch `unit` weights are c_y = (B − 1)·π_y: of
    p = .5 among four labels, masking makes s = .73 where c = 10 and .96 where c = 1000, keeping .49 and .50.

    Relations: with sampler `full` and weight `importance`, the full softmax cross-entropy; with in-batch negatives
    and weight `relative`, TensorFlow Recommenders' `Retrieval` with sampling probabilities.

    Example:
        >>> softmax(*row).numpy().round(4)  # log(1 + e⁻¹ + e⁻²)
        array([0.4076], dtype=float32)
    """
    return ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))


def bilateral_softmax(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, power: float = 1.0) -> Tensor:
    """Return the bilateral softmax loss: `−f_y + ρ·log Σ w exp(f_y')` (Wu et al. 2023, BSL) [METHODS §10].

    The positive stands in its own term alone. In training that is the query's: of rows of a batch that ask the same,
    the mean of exp(f_y) takes the place of each one's (`pooled`), so that a positive far below the others, which may be
    noise, pulls less; with `top_k`, and in a task of TensorFlow Recommenders, which is not told queries, it is each
    row's own. ρ is the ratio of two temperatures, of positives and of negatives; above 1 it weighs hard negatives more.

    A row whose negatives are all masked has the loss −f_y.

    Args:
        power: ρ; 1 to 1.3 [Wu et al. 2023]. Other than 1, a constant added to all logits changes the loss: they must
            be bounded, cosines over a temperature.

    Hits: kept, as `softmax` over draws that may be the positive; with ρ = 1 and no two rows of a batch that ask the
    same it converges to f + log ν = log p. Pooled positives are one term, which one label fills: no λ gives p back.

    Relations: with ρ = 1 and the positive among the negatives, `softmax`.

    Example:
        >>> bilateral_softmax(*row, power=1.2).numpy().round(4)  # 1.2·log(1 + e⁻¹) − 1
        array([-0.6241], dtype=float32)
    """
    some_B = ops.logical_not(ops.all(is_masked(log_weight_BM), axis=1))
    total_B = ops.logsumexp(negative_BM + log_weight_BM, axis=1)
    return power * ops.where(some_B, total_B, 0.0) - positive_B


def pairwise_softmax(
    positive_B: Tensor,
    negative_BM: Tensor,
    log_weight_BM: Tensor,
    *,
    activation: Activation = "tanh",
    width: float = 20.0,
) -> Tensor:
    """Return the pairwise softmax loss: `log Σ w σ(d)^c` with `d = (f_y' − f_y)/c`, c = `width` (Yang et al. 2024,
    PSL).

    σ takes the place of the exponential of gaps: 1 + tanh d, 1 + arctan d or max(1 + d, 0). All are 1 and have slope 1
    at 0, so that small gaps count as in `softmax`; of large ones a negative far above its positive, which may be a
    false one, pulls less, and with `relu` one that is c below is no negative at all. The paper has halves of cosines
    and exponents 1/τ: c = 2/T, the widest gap that cosines over a temperature can have.

    A row none of whose negatives counts has loss 0.

    Args:
        width: c, in logits; > 0.

    Hits: masked, for a pair of a label and itself is a constant.

    Relations: as c grows, `bilateral_softmax` with ρ = 1.

    Example:
        >>> pairwise_softmax(*row, width=2.0).numpy().round(4)  # (1 − tanh ½)² + (1 − tanh 1)²
        array([-1.0609], dtype=float32)
    """
    log_term_BM = log_weight_BM + width * _LOG_OF[activation]((negative_BM - positive_B[:, None]) / width)
    some_B = ops.logical_not(ops.all(is_masked(log_term_BM), axis=1))
    return ops.where(some_B, ops.logsumexp(ops.maximum(log_term_BM, MASKED), axis=1), 0.0)


def _log_of_positive(x: Tensor) -> Tensor:
    """log x, and that of weight 0, without a gradient, where x is not above 0."""
    above = ops.greater(x, 0.0)
    return ops.where(above, ops.log(ops.where(above, x, 1.0)), MASKED)


_LOG_OF: dict[str, Phi] = {
    "tanh": lambda d: math.log(2) - ops.softplus(-2 * d),
    "arctan": lambda d: _log_of_positive(1 + ops.arctan(d)),
    "relu": lambda d: _log_of_positive(1 + d),
}


def pooled(positive_B: Tensor, groups_B: Tensor) -> Tensor:
    """log of the mean of exp(f_y) over the rows of a group, float32 [B], in place of each row's own f_y.

    Args:
        positive_B: logits of the positives, float32.
        groups_B: the group of every row, int32, below B.

    Example:
        >>> pooled(np.log(np.float32([1, 2, 3])), np.int32([0, 1, 0])).numpy().round(4)  # log 2 everywhere
        array([0.6931, 0.6931, 0.6931], dtype=float32)
    """
    groups = positive_B.shape[0]
    most_B = ops.stop_gradient(ops.take(ops.segment_max(positive_B, groups_B, num_segments=groups), groups_B))
    sums_G = ops.segment_sum(ops.exp(positive_B - most_B), groups_B, num_segments=groups)
    sizes_G = ops.segment_sum(ops.ones_like(positive_B), groups_B, num_segments=groups)
    return most_B + ops.log(ops.take(sums_G, groups_B)) - ops.log(ops.take(sizes_G, groups_B))


def logistic(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Return the logistic loss, binary cross-entropy: `φ(u) = log(1 + exp(−u))` [R21 eq. 8].

    `φ(f_y) + Σ w φ(−f_y')`, each logit against 0, as BOWL [Re19 Definition 4]; pairwise `Σ w φ(f_y − f_y')`, each
    negative against the positive, as POWL [Re19 Definition 3].

    Hits: kept, as [BM20 eq. 2] has it: it converges to f + log ν = log p + const(x) [BM20 Theorem 1]; with weight
    `importance` to f = log p itself. Masked, to f + log ν = log(p/(1 − p)) + const(x) where the weight has no term of
    the positive: the same ranking, but p = .70 beside three labels of .10 comes out as .875. Pairwise they are
    masked, since a pair of a label and itself is a constant: f + log ν = log p + const(x).

    In training a constant is added to logits, at which one positive balances its negatives (`balance`).

    Relations: in nats; [Re19]'s, with log2, is 1/ln 2 times as large. With uniform negatives and weight `unit` the
    usual sampled binary cross-entropy. Pairwise with uniform negatives and `importance` weights, One-vs-Each
    (Titsias 2016), an upper bound of `softmax`; with weight `unit` and one negative, BPR (Rendle et al. 2009).

    Example:
        >>> logistic(*row).numpy().round(4), logistic(*row, pairwise=True).numpy().round(4)
        (array([1.3197], dtype=float32), array([0.4402], dtype=float32))
    """
    return _decoupled(lambda u: ops.softplus(-u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def contrastive(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: float = 0.0) -> Tensor:
    """Cosine contrastive loss: `(1 − f_y)² + Σ w max(f_y' − margin, 0)²` [R21 §5.1].

    Of cosines as they are: a recipe needs `similarity = "cosine"`, temperature 1, and no label bias. No unit.

    Hits: masked. Kept with margin 0 it converges to f = p/(p + ρ), which is no log-probability.

    Args:
        margin: the cosine below which a negative costs nothing.

    Example:
        >>> contrastive(np.float32([0.5]), np.float32([[0.25, -1]]), np.float32([[0, 0]])).numpy()
        array([0.3125], dtype=float32)
    """
    negatives_B = _weighted_sum(lambda f: ops.square(ops.relu(f - margin)), negative_BM, log_weight_BM)
    return ops.square(1 - positive_B) + negatives_B


def hinge(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Return the hinge loss: `φ(u) = max(1 − u, 0)` [Re19 §3], in the two forms of `logistic`. No unit.

    Hits: masked. Kept, it converges to f = 1 where p > ρ and −1 where p < ρ: it has no likelihood.

    Relations: pairwise with weight `unit`, the margin ranking loss with margin 1.

    Example:
        >>> hinge(*row).numpy(), hinge(*row, pairwise=True).numpy()
        (array([1.], dtype=float32), array([0.], dtype=float32))
    """
    return _decoupled(lambda u: ops.relu(1 - u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def squared_hinge(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Return the squared hinge loss: `φ(u) = max(1 − u, 0)²` [Re19 §3], in the two forms of `logistic`. No unit.

    Hits: masked. Kept, it converges to f = (p − ρ)/(p + ρ), which is no log-probability.

    Example:
        >>> squared_hinge(*row).numpy(), squared_hinge(*row, pairwise=True).numpy()
        (array([1.], dtype=float32), array([0.], dtype=float32))
    """
    return _decoupled(lambda u: ops.square(ops.relu(1 - u)), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def exponential(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
    """Return the exponential loss: `φ(u) = exp(−u)` [Re19 §3], in the two forms of `logistic`. No unit.

    Hits: masked. Kept, it converges to f + ½ log ν = ½ log p + const(x).

    Relations: pairwise, `exp(softmax) − 1`, row by row.

    Example:
        >>> exponential(*row, pairwise=True).numpy().round(4)  # e⁻¹ + e⁻²
        array([0.5032], dtype=float32)
    """
    return _decoupled(lambda u: ops.exp(-u), positive_B, negative_BM, log_weight_BM, pairwise=pairwise)


def ramp(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: float = 1.0, pairwise: bool = False
) -> Tensor:
    """Return the ramp loss: `φ(u) = clip(1 − u/margin, 0, 1)`, bounded, not convex [Re19 §3]; the two forms of
    `logistic`.

    Args:
        margin: width of the slope, in logits; > 0.

    Hits: masked. Kept, it converges to f ≥ margin where p > ρ and f ≤ −margin where p < ρ: it has no likelihood.

    Relations: `hinge` clipped at 1 where margin = 1. No unit.

    Example:
        >>> ramp(*row, margin=2.0).numpy()  # 1 − ½ of the positive, then 1 and 1 − ½ of the negatives
        array([2.], dtype=float32)
    """
    return _decoupled(
        lambda u: ops.clip(1 - u / margin, 0.0, 1.0), positive_B, negative_BM, log_weight_BM, pairwise=pairwise
    )


def nce(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Noise contrastive estimation (Gutmann and Hyvärinen 2010): `logistic` of `f − log(m·q)` [BM20 §5].

    The shift of the logits is the objective's (`Family.shifted`), so that the family is called with logits that have
    it already. In training −log L is added to logits too (`balance`): they start as log p of any label.

    Hits: kept, by definition: draws that hit the positive count as noise like any other, and the model learns
    log p(y|x) itself, up to that constant.

    Relations: `logistic` of unshifted logits learns `log p(y|x) − log(m·q_y)` in place of log p(y|x).

    Example:
        >>> bool(nce(*row) == logistic(*row))
        True
    """
    return logistic(positive_B, negative_BM, log_weight_BM)


def augment_and_reduce(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, log_eta_B: Tensor) -> Tensor:
    """Augment & Reduce: the softmax bound with one variational parameter η per training pair (Ruiz et al. 2018).

    `log η + (1 + Σ w exp(f_y' − f_y))/η − 1 ≥ log[1 + Σ w exp(f_y' − f_y)]`, linear in the sum, so that an
    importance-weighted sample of negatives estimates it without bias.

    Args:
        log_eta_B: log η of the batch's pairs, float32 [B], kept by the training step.

    Hits: masked; it converges to log p, as `softmax` with weight `importance`.

    Relations: `softmax` where η is the bracket, its upper bound elsewhere.

    Example:
        >>> augment_and_reduce(*row, log_eta_B=softmax(*row)).numpy().round(4)
        array([0.4076], dtype=float32)
    """
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))
    return log_eta_B + ops.exp(bracket_B - log_eta_B) - 1


def next_log_eta(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, log_eta_B: Tensor, rate: Tensor
) -> Tensor:
    """log η of `augment_and_reduce` after a natural-gradient step, float32 [B] (Ruiz et al. 2018).

    `η ← (1 − rate)·η + rate·(1 + Σ w exp(f_y' − f_y))`
    """
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))
    return ops.logaddexp(ops.log1p(-rate) + log_eta_B, ops.log(rate) + bracket_B)


def _log_odds(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """log of `Σ w_yy' exp(f_y' − f_y)`, [B]: the odds against the positive."""
    return ops.logsumexp(negative_BM + log_weight_BM, axis=1) - positive_B


def _decoupled(phi: Phi, positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool) -> Tensor:
    """`φ(f_y) + Σ w φ(−f_y')` [R21 eq. 8], or `Σ w φ(f_y − f_y')` if `pairwise`; [B]."""
    gaps_BM = positive_B[:, None] - negative_BM if pairwise else -negative_BM
    negatives_B = _weighted_sum(phi, gaps_BM, log_weight_BM)
    return negatives_B if pairwise else phi(positive_B) + negatives_B


def _weighted_sum(phi: Phi, x_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Σ w φ(x), [B]; what is masked is replaced before φ, so that 0·∞ cannot arise."""
    masked_BM = is_masked(log_weight_BM)
    return ops.sum(ops.exp(log_weight_BM) * phi(ops.where(masked_BM, 0.0, x_BM)), axis=1)


@dataclass(frozen=True)
class Family:
    """One loss and what it asks of the rest.

    Attributes:
        loss: of positives [B], negatives [B, M], log-weights [B, M] and the family's own parameters; float32 [B].
        cosine: defined on cosines as they are: similarity cosine, temperature 1, no label bias.
        weights: the weights that belong to its definition; None for any.
        shifted: logits are `f − log(m·q)` on both sides, with which it learns log p(y|x) itself [BM20 §5].
        balanced: its logits are log-odds against the negatives' total weight; training adds the constant at which
            logits of 0 balance the two.
        pooled: rows of a batch that ask the same query share one positive term, as `pooled` makes it.
        ranks: a row's loss is of its positive against its negatives, so that it grows with the rank of the positive;
            otherwise each of them is against 0, but for a pairwise form.
        hits: what a recipe that does not say gets.
        link: slope of the optimal logit in log(p(y|x)/ν) [METHODS §9]; None of a loss whose optimum is no such line.
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
"""Loss families by the name that a recipe's `[loss] family` calls them.

A row is a `Family`; the keyword-only parameters of its function are the keys that a recipe may set. A paper is added
by adding its row.

Example:
    >>> LOSSES["nce"].weights
    ('unit',)
"""
