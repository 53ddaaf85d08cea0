"""Stochastic Negative Mining: of the drawn negatives, the hardest count [Re19 Algorithm 1; METHODS §3].

Mining may follow any sampler and weight, and precede any family: it scales the weight of a row's j-th
highest-scored negative by ϑ_j.

Legend: `B` positives, `M` drawn negatives, `K` of them kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.losses.weights import MASKED, is_masked


@dataclass(frozen=True)
class Mining:
    """ϑ, non-increasing, with Σ_j ϑ_j = 1: uniform over the top `keep`, or `ϑ_j ∝ j^−power`; or both.

    With uniform negatives and `importance` weights (L − 1)/M, top-k mining is [Re19]'s ϑ_j = (L − 1)/(k·M).
    `keep = M` is negative sampling, and with sampler `full` top-k mining is the top-k loss.

    Attributes:
        keep: k; None keeps all.
        power: exponent of the power law; 0 weighs what is kept equally.
    """

    keep: int | None = None
    power: float = 0.0

    def __call__(self, negative_BM: Tensor, log_weight_BM: Tensor) -> tuple[Tensor, Tensor]:
        """The kept logits, float32 [B, K], highest first, and their log-weights with log ϑ added, float32 [B, K].

        Args:
            negative_BM: logits, float32; negatives are ranked by these, whatever their weight.
            log_weight_BM: their log-weights, float32; what is `MASKED` is never kept before what is not.

        Example:
            >>> import numpy as np
            >>> Mining(keep=1)(np.float32([[0.5, 2.0]]), np.float32([[0, 0]]))[0].numpy()
            array([[2.]], dtype=float32)
        """
        kept = negative_BM.shape[1] if self.keep is None else self.keep
        scores_BM = ops.where(is_masked(log_weight_BM), MASKED, negative_BM)
        _, order_BK = ops.top_k(ops.stop_gradient(scores_BM), kept)
        log_theta_K = -self.power * np.log(np.arange(1, kept + 1))
        log_theta_K = (log_theta_K - np.logaddexp.reduce(log_theta_K)).astype(np.float32)
        return (
            ops.take_along_axis(negative_BM, order_BK, axis=1),
            ops.take_along_axis(log_weight_BM, order_BK, axis=1) + log_theta_K,
        )
