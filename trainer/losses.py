"""Loss families over a positive's logit and its weighted negatives [METHODS §2].

A family is a row of `LOSSES`. A negative whose log-weight is `MASKED` has weight 0: it takes no part,
in the value or in the gradient.

Legend: `B` positives, `M` negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

Tensor = Any
"""A backend tensor; shapes are in the names."""

MASKED = -1e30
"""The log of weight 0: its exponential is exactly 0 in float32, and unlike −inf it makes no NaN in gradients."""


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
    return ops.softplus(ops.logsumexp(negative_BM + log_weight_BM, axis=1) - positive_B)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"softmax": softmax}
