"""Loss families over a positive's logit and its weighted negatives [METHODS §2, §4].

A family is a row of `LOSSES`. A negative whose log-weight is `MASKED` has weight 0: it takes no part,
in the value or in the gradient.

Legend: `B` positives, `M` negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

Tensor = Any
"""A backend tensor; shapes are in the names."""

MASKED = -1e30
"""The log of weight 0: its exponential is exactly 0 in float32, and unlike −inf it makes no NaN in gradients."""


def is_masked(log_weight_BM: Tensor) -> Tensor:
    """Which negatives have weight 0, bool; `MASKED` plus any finite logs is below half of it."""
    return ops.less(log_weight_BM, MASKED / 2)


def softmax(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Sampled softmax cross-entropy [R21 eq. 7].

    `log[1 + Σ w_yy' exp(f_y' − f_y)] = softplus(logsumexp_y'(f_y' + log w_yy') − f_y)`

    Args:
        positive_B: logits of the positives, float32.
        negative_BM: logits of the negatives, float32.
        log_weight_BM: natural log of the weights; `MASKED` leaves a negative out.

    Returns:
        float32 [B], nats. A row whose negatives are all masked has loss 0.
    """
    return ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))


def refined_softmax(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Refined logQ: the positive leaves the denominator, the row is weighed by 1 − p (arXiv 2507.09331).

    `sg(1 − p)·(logsumexp_y'(f_y' + log w_yy') − f_y)` with `p = 1/(1 + Σ w_yy' exp(f_y' − f_y))`, the
    model's own estimate from the same negatives. Its gradient is that of `softmax`, row by row: in eq. 7 the
    positive was never given a sampling correction, which is the error that the refinement mends in logQ.
    """
    odds_B = ops.where(
        ops.all(is_masked(log_weight_BM), axis=1), 0.0, _log_odds(positive_B, negative_BM, log_weight_BM)
    )
    return ops.stop_gradient(ops.sigmoid(odds_B)) * odds_B


def _log_odds(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """log of `Σ w_yy' exp(f_y' − f_y)`, [B]: the odds against the positive."""
    return ops.logsumexp(negative_BM + log_weight_BM, axis=1) - positive_B


def _decoupled(phi: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A family from a falling margin loss φ: of each logit by itself, or of the gaps between them."""

    def loss(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, pairwise: bool = False) -> Tensor:
        """`φ(f_y) + Σ w φ(−f_y')` [R21 eq. 8; Re19 BOWL], or `Σ w φ(f_y − f_y')` if `pairwise` [Re19 POWL]."""
        gaps_BM = positive_B[:, None] - negative_BM if pairwise else -negative_BM
        negatives_B = _weighted_sum(phi, gaps_BM, log_weight_BM)
        return negatives_B if pairwise else phi(positive_B) + negatives_B

    return loss


def _weighted_sum(phi: Callable[[Tensor], Tensor], x_BM: Tensor, log_weight_BM: Tensor) -> Tensor:
    """Σ w φ(x), [B]; what is masked is replaced before φ, so that 0·∞ cannot arise."""
    masked_BM = is_masked(log_weight_BM)
    return ops.sum(ops.exp(log_weight_BM) * phi(ops.where(masked_BM, 0.0, x_BM)), axis=1)


def contrastive(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: float = 0.0) -> Tensor:
    """Cosine contrastive loss `(1 − f_y)² + Σ w max(f_y' − margin, 0)²` [R21 §5.1], of cosines as they are."""
    negatives_B = _weighted_sum(lambda f: ops.square(ops.relu(f - margin)), negative_BM, log_weight_BM)
    return ops.square(1 - positive_B) + negatives_B


def ramp(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, margin: float = 1.0, pairwise: bool = False
) -> Tensor:
    """The ramp φ(u) = clip(1 − u/margin, 0, 1): bounded, not convex [Re19 §3]; see `_decoupled` for the forms."""
    return _decoupled(lambda u: ops.clip(1 - u / margin, 0.0, 1.0))(
        positive_B, negative_BM, log_weight_BM, pairwise=pairwise
    )


def augment_and_reduce(positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, log_eta_B: Tensor) -> Tensor:
    """Augment & Reduce: the softmax bound with one variational parameter η per training pair (Ruiz et al. 2018).

    `log η + (1 + Σ w exp(f_y' − f_y))/η − 1 ≥ log[1 + Σ w exp(f_y' − f_y)]`, linear in the sum, so that an
    importance-weighted sample of negatives estimates it without bias.

    Args:
        log_eta_B: log η of the batch's pairs; equality where η is the bracket.
    """
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))
    return log_eta_B + ops.exp(bracket_B - log_eta_B) - 1


def reduce_eta(
    positive_B: Tensor, negative_BM: Tensor, log_weight_BM: Tensor, *, log_eta_B: Tensor, rate: Tensor
) -> Tensor:
    """Natural-gradient step of `augment_and_reduce`: η ← (1 − rate)·η + rate·(1 + Σ w exp(f_y' − f_y)), as log [B]."""
    bracket_B = ops.softplus(_log_odds(positive_B, negative_BM, log_weight_BM))
    return ops.logaddexp(ops.log1p(-rate) + log_eta_B, ops.log(rate) + bracket_B)


logistic = _decoupled(lambda u: ops.softplus(-u))
hinge = _decoupled(lambda u: ops.relu(1 - u))
squared_hinge = _decoupled(lambda u: ops.square(ops.relu(1 - u)))
exponential = _decoupled(lambda u: ops.exp(-u))


@dataclass(frozen=True)
class Family:
    """One loss and what it asks of the rest.

    Attributes:
        loss: of positives [B], negatives [B, M], log-weights [B, M] and the family's own parameters; float32 [B].
        cosine: defined on cosines as they are: similarity cosine, temperature 1, no label bias.
        weights: the weights that belong to its definition; None for any.
        shifted: logits are `f − log(m·q)` on both sides, and draws that hit the positive count as any other, with
            which it learns log p(y|x) itself [BM20 §5].
        stateful: keeps a number η per training pair.
    """

    loss: Callable[..., Tensor]
    cosine: bool = False
    weights: tuple[str, ...] | None = None
    shifted: bool = False
    stateful: bool = False


LOSSES: dict[str, Family] = {
    "softmax": Family(softmax),
    "refined_softmax": Family(refined_softmax),
    "logistic": Family(logistic),
    "contrastive": Family(contrastive, cosine=True),
    "hinge": Family(hinge),
    "squared_hinge": Family(squared_hinge),
    "exponential": Family(exponential),
    "ramp": Family(ramp),
    "nce": Family(lambda *logits: logistic(*logits), weights=("unit",), shifted=True),
    "augment_and_reduce": Family(augment_and_reduce, weights=("importance",), stateful=True),
}
"""`logistic` is in nats; [Re19]'s, with log2, is 1/ln 2 times as large. One-vs-Each (Titsias 2016) is `logistic`
with `pairwise`, uniform negatives and `importance` weights."""
