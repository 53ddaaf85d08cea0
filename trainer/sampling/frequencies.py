"""Log-probabilities for the weights of a step: π of labels in the data, and q of labels in the draws.

Frequencies are counted, or estimated from the stream of batches as in [Yi19 Algorithm 2], which keeps the time of a
label's last occurrence and a moving average of the gaps between its occurrences; 1/gap is the frequency. Three things
differ. Time counts pairs, because gaps in steps are at least one and would truncate every frequency at 1/B. The first
gaps are averaged plainly. Every label has a cell of its own instead of a hashed one.

Legend: `B` batch, `M` candidates, `U` distinct labels of a batch, `L` labels.
"""

from __future__ import annotations

import keras
import numpy as np

from longtail.bundle.arrays import Float64
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.sampling.base import DrawContext, Sampler


class Frequencies:
    """Look up labels' log π and their draws' log q, as the data count."""

    def __init__(self, log_pi_L: Float64, sampler: Sampler) -> None:
        self._log_pi_L = untrained_variable(log_pi_L.astype(np.float32), "log_pi")
        self._log_q_L = None if sampler.log_q_L is None else untrained_variable(sampler.log_q_L, "log_q")
        self._sampler = sampler
        # Variables that steps change, and variables that steps only read.
        self.variables: list[keras.Variable] = []
        self.constants = [self._log_pi_L, *([] if self._log_q_L is None else [self._log_q_L])]

    def log_pi(self, labels: Tensor) -> Tensor:
        """Return log label frequencies, float32 of the shape of `labels`, nats."""
        return backend.gather(self._log_pi_L, labels)

    def log_q(self, context: DrawContext, labels: Tensor, log_pi: Tensor) -> Tensor:  # noqa: ARG002
        """Return log-probabilities that the sampler draws these labels, [B] or [B, M], for their rows; float32."""
        if self._sampler.log_q is not None:
            return self._sampler.log_q(context, labels)
        return backend.gather(self._log_q_L, labels)


class StreamingFrequencies(Frequencies):
    """Estimate π during training: average the gaps of every label, plainly up to 1/rate gaps, then exponentially.

    The exponential average is `(1 − rate)·gap + rate·new`. For a label of frequency π, the relative error of the
    estimate has a standard deviation of about √(rate·(1 − π)/(2 − rate)).

    Args:
        initial_gap: gap of a label before its first occurrence, in pairs.
    """

    def __init__(self, log_pi_L: Float64, sampler: Sampler, *, rate: float = 0.02, initial_gap: float) -> None:
        super().__init__(log_pi_L, sampler)
        self.labels, self.rate = len(log_pi_L), rate
        self._gap = untrained_variable(np.full(self.labels, initial_gap, np.float32), "gaps")
        self._gap_counts = untrained_variable(np.zeros(self.labels, np.float32), "gaps_seen")
        self._last = untrained_variable(np.zeros(self.labels, np.int32), "last_seen")
        self._pair_count = keras.Variable(0, dtype="int32", trainable=False, name="pairs_seen")
        self.variables = [self._gap, self._gap_counts, self._last, self._pair_count]

    def log_pi(self, labels: Tensor) -> Tensor:
        """Estimate log label frequencies, float32 of the shape of `labels`, nats, at most 0."""
        return -ops.log(ops.maximum(backend.gather(self._gap, labels), 1.0))

    def log_q(self, context: DrawContext, labels: Tensor, log_pi: Tensor) -> Tensor:
        """Return log-probabilities of draws; q follows the estimated π if the sampler draws by frequency."""
        if self._sampler.log_q is None and self._sampler.q_of_pi is not None:
            return self._sampler.q_of_pi(log_pi)
        return super().log_q(context, labels, log_pi)

    def update(self, labels_B: Tensor) -> None:
        """Count a batch's labels, int32 [B]."""
        pair_count = self._pair_count.value + labels_B.shape[0]
        labels_U, positions_B = backend.unique(labels_B, self.labels)
        hits_U = backend.count(positions_B, labels_U)
        gap_U, count_U = backend.gather(self._gap, labels_U), backend.gather(self._gap_counts, labels_U)
        # The c gaps of a label that occurs c times in the batch sum to the time since its last occurrence.
        new_U = ops.cast(pair_count - backend.gather(self._last, labels_U), "float32") / ops.maximum(hits_U, 1.0)
        # Weight of the old gap after c new ones: a plain mean at first, then c exponential updates at once.
        old_weight_U = ops.where(
            count_U * self.rate < 1, count_U / ops.maximum(count_U + hits_U, 1.0), ops.power(1 - self.rate, hits_U)
        )
        backend.scatter(self._gap, labels_U, old_weight_U * gap_U + (1 - old_weight_U) * new_U)
        backend.scatter(self._gap_counts, labels_U, count_U + hits_U)
        backend.scatter(self._last, labels_U, ops.zeros_like(labels_U) + pair_count)
        self._pair_count.assign(pair_count)
