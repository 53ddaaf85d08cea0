"""Stochastic Negative Mining: of the drawn negatives, the hardest count [Re19 Algorithm 1; METHODS §3].

Mining may follow any sampler and weight, and precede any family: it scales the weight of a row's j-th
highest-scored negative by ϑ_j.

Legend: `B` positives, `M` drawn negatives, `K` of them kept, `N` of those taken where ϑ is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Float64
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.losses.weights import MASKED, is_masked

if TYPE_CHECKING:
    from keras.random import SeedGenerator


@dataclass(frozen=True)
class Mining:
    """ϑ, one weight for each rank of a row's negatives, non-increasing, times what a negative weighs anyhow.

    With `theta`, as given, whatever its sum. Else Σ_j ϑ_j = 1 over the top `keep`, uniform or `ϑ_j ∝ j^−power`. Ranks
    beyond weigh `epsilon` each: enough of it keeps the loss calibrated [Re19 Theorem 4; METHODS §3].

    [Re19 §3.1] has no weights but ϑ. Its ϑ is ours as it stands with weight `unit`; with weight `importance` and
    uniform negatives that are never the positive (`exclude_positive`), as it draws them, its ϑ_j, and its ε, are (L −
    1)/m times ours, so that `keep = k` is its (L − 1)/(k·m), which over all labels is 1/k on the top k. Where the
    positive may be drawn, and is masked, the factor is L/m. `keep = m` is negative sampling, and with sampler `full`
    and weight `importance` top-k mining is the top-k loss.

    Attributes:
        keep: k; None keeps all.
        power: exponent of the power law; 0 weighs what is kept equally.
        theta: ϑ of the first ranks, in place of `keep` and `power`.
        epsilon: ϑ of every rank beyond `keep` or `theta`.
        draw: N; ϑ is sampled: N ranks, j with probability ϑ_j/Σϑ, each weighing Σϑ/N, so that what a rank weighs is ϑ_j
            on average and the family sees N negatives [Re19 §3.1]. None takes all that ϑ weighs.
    """

    keep: int | None = None
    power: float = 0.0
    theta: tuple[float, ...] | None = None
    epsilon: float = 0.0
    draw: int | None = None

    @property
    def kept(self) -> int | None:
        """K, the negatives of a row that may weigh anything; None for all."""
        return None if self.epsilon else self.named

    @property
    def named(self) -> int | None:
        """Return ranks before ε begins; None for all."""
        return self.keep if self.theta is None else len(self.theta)

    def theta_of(self, negatives: int) -> Float64:
        """ϑ of the kept ranks of a row with that many negatives, float64 [K].

        Example:
            >>> Mining(keep=2, epsilon=0.125).theta_of(4)
            array([0.5  , 0.5  , 0.125, 0.125])
        """
        if self.theta is not None:
            first_K: Float64 = np.array(self.theta, np.float64)
        else:
            first_K = np.arange(1.0, (self.keep or negatives) + 1) ** -self.power
            first_K /= first_K.sum()
        beyond = max(negatives - len(first_K), 0) if self.epsilon else 0
        return np.pad(first_K, (0, beyond), constant_values=self.epsilon)

    def ranks(self, rows: int, negatives: int, seed: SeedGenerator) -> Tensor:
        """Return ranks drawn for every row, 0 the highest-scored, int32 [B, N], independently and with replacement."""
        cumulative_K = np.cumsum(self.theta_of(negatives))
        size = self.draw or len(cumulative_K)
        below_K = ops.convert_to_tensor(cumulative_K[:-1] / cumulative_K[-1], "float32")
        drawn = ops.searchsorted(below_K, keras.random.uniform((rows * size,), seed=seed), side="right")
        return ops.reshape(ops.cast(drawn, "int32"), (rows, size))

    def __call__(
        self, negative_BM: Tensor, log_weight_BM: Tensor, ranks_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the kept logits, float32 [B, K], highest first, and their log-weights with log ϑ added, float32 [B,
        K].

        Example:
            >>> import numpy as np
            >>> Mining(keep=1)(np.float32([[0.5, 2.0]]), np.float32([[0, 0]]))[0].numpy()
            array([[2.]], dtype=float32)
        """
        theta_K = self.theta_of(negative_BM.shape[1])
        log_theta = np.where(theta_K > 0, np.log(np.where(theta_K > 0, theta_K, 1)), MASKED).astype(np.float32)
        scores_BM = ops.where(is_masked(log_weight_BM), MASKED, negative_BM)
        _, order = ops.top_k(ops.stop_gradient(scores_BM), len(theta_K))
        if ranks_BN is not None:
            order, log_theta = ops.take_along_axis(order, ranks_BN, axis=1), np.log(theta_K.sum() / ranks_BN.shape[1])
        return (
            ops.take_along_axis(negative_BM, order, axis=1),
            ops.take_along_axis(log_weight_BM, order, axis=1) + log_theta,
        )
