"""Stochastic Negative Mining: only the hardest of the drawn negatives count [Re19 Algorithm 1; METHODS §3].

Mining works with any sampler, weight and family. It multiplies the weight of the negative with the j-th highest score
of a row by ϑ_j.

Legend: `B` positives, `M` drawn negatives, `K` kept negatives, `N` ranks drawn if ϑ is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Float64
from longtail.trainer.backend import Tensor, Tensors, keras, ops
from longtail.trainer.losses.batch import StepInputs
from longtail.trainer.losses.loss_term import LossTerm
from longtail.trainer.losses.weights import MASKED, is_masked

if TYPE_CHECKING:
    from keras.random import SeedGenerator


@dataclass(frozen=True)
class Mining:
    """Multiply the weights of negatives by ϑ, one non-increasing factor per rank.

    `theta` is used without normalisation. Otherwise Σ_j ϑ_j = 1 over the top `keep`, uniform or `ϑ_j ∝ j^−power`. Every
    further rank has ϑ = `epsilon`; a large enough epsilon keeps the loss calibrated [Re19 Theorem 4; METHODS §3].

    With weight `unit`, ϑ is that of [Re19 §3.1]. With weight `importance` and uniform negatives that are never the
    positive, the paper's ϑ_j and ε are (L − 1)/m times these; if the positive may be drawn and is masked, L/m times.
    `keep = m` is negative sampling. With sampler `full` and weight `importance`, top-k mining is the top-k loss.

    Attributes:
        keep: k; None keeps all.
        power: exponent of the power law; 0 weighs all kept negatives equally.
        theta: ϑ of the first ranks, instead of `keep` and `power`.
        epsilon: ϑ of every rank beyond `keep` or `theta`.
        draw: N; samples N ranks, rank j with probability ϑ_j/Σϑ, each with factor Σϑ/N. A rank then has factor ϑ_j on
            average, and the family sees N negatives [Re19 §3.1]. None takes all ranks with ϑ > 0.
    """

    keep: int | None = None
    power: float = 0.0
    theta: tuple[float, ...] | None = None
    epsilon: float = 0.0
    draw: int | None = None

    @property
    def kept_count(self) -> int | None:
        """Return K, the number of negatives of a row with ϑ > 0; None for all."""
        return None if self.epsilon else self.named_count

    @property
    def named_count(self) -> int | None:
        """Return the number of ranks before epsilon applies; None for all."""
        return self.keep if self.theta is None else len(self.theta)

    def compute_theta(self, negatives: int) -> Float64:
        """Compute ϑ of the kept ranks of a row with `negatives` negatives, float64 [K].

        Example:
            >>> Mining(keep=2, epsilon=0.125).compute_theta(4)
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
        """Draw ranks for every row, independently and with replacement, int32 [B, N]; 0 has the highest score."""
        # Inverse transform sampling: a uniform number falls into rank j's part of the cumulative ϑ.
        cumulative_K = np.cumsum(self.compute_theta(negatives))
        size = self.draw or len(cumulative_K)
        below_K = ops.convert_to_tensor(cumulative_K[:-1] / cumulative_K[-1], "float32")
        drawn = ops.searchsorted(below_K, keras.random.uniform((rows * size,), seed=seed), side="right")
        return ops.reshape(ops.cast(drawn, "int32"), (rows, size))

    def __call__(
        self, negative_BM: Tensor, log_weight_BM: Tensor, ranks_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return mined logits, highest first, and log-weights plus log ϑ, float32 [B, K] both.

        Example:
            >>> import numpy as np
            >>> Mining(keep=1)(np.float32([[0.5, 2.0]]), np.float32([[0, 0]]))[0].numpy()
            array([[2.]], dtype=float32)
        """
        theta_K = self.compute_theta(negative_BM.shape[1])
        log_theta = np.where(theta_K > 0, np.log(np.where(theta_K > 0, theta_K, 1)), MASKED).astype(np.float32)
        # Masked negatives get the last ranks, and ranks themselves have no gradient.
        scores_BM = ops.where(is_masked(log_weight_BM), MASKED, negative_BM)
        _, order = ops.top_k(ops.stop_gradient(scores_BM), len(theta_K))
        if ranks_BN is not None:  # sampled ranks share the total weight Σϑ equally
            order, log_theta = ops.take_along_axis(order, ranks_BN, axis=1), np.log(theta_K.sum() / ranks_BN.shape[1])
        return (
            ops.take_along_axis(negative_BM, order, axis=1),
            ops.take_along_axis(log_weight_BM, order, axis=1) + log_theta,
        )


class SampledRanks(LossTerm):
    """Draw the ranks of mining in proportion to ϑ [Re19 §3.1]."""

    def __init__(self, mining: Mining) -> None:
        self._mining = mining

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Draw ranks for every row, int32 [B, N]."""
        return {"ranks": self._mining.ranks(step.positive_B.shape[0], step.candidates.shape[-1], step.seed)}
