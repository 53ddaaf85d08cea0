"""Log-probabilities for the weights of a step: π of labels in the data, and q of labels in the draws.

Frequencies are counted, or estimated from the stream of batches as in [Yi19 Algorithm 2], for data that are never
counted. The algorithm keeps the time of a label's last occurrence and a moving average of the gaps between its
occurrences; 1/gap is the frequency. This implementation differs in three ways. Time counts pairs, not steps: a label
that occurs c times in one batch has c gaps there, while gaps in steps are at least one and would truncate every
frequency at 1/B. The first gaps are averaged plainly, not with a fixed rate from the start. And every label has a cell
of its own instead of a hashed one.

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


class StreamingFrequencies:
    """Average the gaps of every label: plainly over the first 1/rate gaps, then exponentially.

    The exponential average is `(1 − rate)·gap + rate·seen`. For a label of frequency π, the relative error of the
    estimate has a standard deviation of about √(rate·(1 − π)/(2 − rate)).

    Args:
        initial_gap: gap of a label before its first occurrence, in pairs.
    """

    def __init__(self, labels: int, *, rate: float = 0.02, initial_gap: float) -> None:
        self.labels, self.rate = labels, rate
        self._gap = untrained_variable(np.full(labels, initial_gap, np.float32), "gaps")
        self._gaps_seen = untrained_variable(np.zeros(labels, np.float32), "gaps_seen")
        self._last = untrained_variable(np.zeros(labels, np.int32), "last_seen")
        self._now = keras.Variable(0, dtype="int32", trainable=False, name="pairs_seen")

    @property
    def variables(self) -> list[keras.Variable]:
        """List the variables of the state, for checkpoints."""
        return [self._gap, self._gaps_seen, self._last, self._now]

    def log_frequencies(self, labels: Tensor) -> Tensor:
        """Estimate log π of label rows, float32 of their shape; nats, at most 0."""
        return -ops.log(ops.maximum(backend.gather(self._gap, labels), 1.0))

    def update(self, labels_B: Tensor) -> None:
        """Count a batch's labels, int32 [B]."""
        now = self._now.value + labels_B.shape[0]
        labels_U, positions_B = backend.unique(labels_B, self.labels)
        hits_U = backend.count(positions_B, labels_U)
        gap_U, seen_U = backend.gather(self._gap, labels_U), backend.gather(self._gaps_seen, labels_U)
        # The c gaps of a label that occurs c times in the batch sum to the time since its last occurrence.
        new_U = ops.cast(now - backend.gather(self._last, labels_U), "float32") / ops.maximum(hits_U, 1.0)
        # Weight of the old gap after c new ones: a plain mean at first, then c exponential updates at once.
        kept_U = ops.where(
            seen_U * self.rate < 1, seen_U / ops.maximum(seen_U + hits_U, 1.0), ops.power(1 - self.rate, hits_U)
        )
        backend.scatter(self._gap, labels_U, kept_U * gap_U + (1 - kept_U) * new_U)
        backend.scatter(self._gaps_seen, labels_U, seen_U + hits_U)
        backend.scatter(self._last, labels_U, ops.zeros_like(labels_U) + now)
        self._now.assign(now)


class Frequencies:
    """Look up log π and log q of labels: counted, or estimated by `streaming` during training."""

    def __init__(self, log_pi_L: Float64, sampler: Sampler, streaming: StreamingFrequencies | None) -> None:
        self._log_pi_L = untrained_variable(log_pi_L.astype(np.float32), "log_pi")
        self._log_q_L = None if sampler.log_q_L is None else untrained_variable(sampler.log_q_L, "log_q")
        self._sampler, self._streaming = sampler, streaming

    @property
    def variables(self) -> list[keras.Variable]:
        """List the variables that steps change."""
        return [] if self._streaming is None else self._streaming.variables

    @property
    def constants(self) -> list[keras.Variable]:
        """List the variables that steps only read."""
        return [self._log_pi_L, *([] if self._log_q_L is None else [self._log_q_L])]

    def update(self, positive_B: Tensor) -> None:
        """Count the labels of a batch, int32 [B], if frequencies are streamed."""
        if self._streaming is not None:
            self._streaming.update(positive_B)

    def log_pi(self, labels: Tensor) -> Tensor:
        """Return log label frequencies, float32 of the shape of `labels`."""
        if self._streaming is not None:
            return self._streaming.log_frequencies(labels)
        return backend.gather(self._log_pi_L, labels)

    def log_q(self, context: DrawContext, labels: Tensor, log_pi: Tensor) -> Tensor:
        """Return log-probabilities that the sampler draws these labels, [B] or [B, M], for their rows; float32."""
        if self._sampler.log_q is not None:
            return self._sampler.log_q(context, labels)
        if self._streaming is not None and self._sampler.q_of_pi is not None:
            return self._sampler.q_of_pi(log_pi)
        return backend.gather(self._log_q_L, labels)
