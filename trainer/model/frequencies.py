"""Log-probabilities that a step's weights depend on: of labels in the data, π, and in the draws, q.

Legend: `B` batch, `M` candidates, `L` labels.
"""

from __future__ import annotations

import keras
import numpy as np

from longtail.bundle.arrays import Float64
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor
from longtail.trainer.sampling import DrawContext, Sampler
from longtail.trainer.sampling.streaming import StreamingFrequencies


class Frequencies:
    """log π and log q of any labels: counted, `log_pi_L` float64 [L], or estimated while training by `streaming`."""

    def __init__(self, log_pi_L: Float64, sampler: Sampler, streaming: StreamingFrequencies | None) -> None:
        self._log_pi_L = untrained_variable(log_pi_L.astype(np.float32), "log_pi")
        self._log_q_L = None if sampler.log_q_L is None else untrained_variable(sampler.log_q_L, "log_q")
        self._sampler, self._streaming = sampler, streaming

    @property
    def variables(self) -> list[keras.Variable]:
        """Return what steps change."""
        return [] if self._streaming is None else self._streaming.variables

    @property
    def constants(self) -> list[keras.Variable]:
        """Return what they read."""
        return [self._log_pi_L, *([] if self._log_q_L is None else [self._log_q_L])]

    def update(self, positive_B: Tensor) -> None:
        """See the labels of a batch, int32 [B]."""
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
