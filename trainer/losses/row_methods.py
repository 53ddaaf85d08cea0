"""Methods without columns of their own: η of every pair, and sampled ranks of mining.

Legend: `B` batch, `M` candidates, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.backend.tensors import Tensors
from longtail.trainer.losses.batch import StepInputs
from longtail.trainer.losses.loss_term import LossTerm
from longtail.trainer.losses.mining import Mining


class Eta(LossTerm):
    """Keep log η of all training pairs for `augment_and_reduce`; `Objective.with_eta` updates it."""

    def __init__(self, *, pairs: int, labels: int, steps_per_epoch: int) -> None:
        # log L is the bracket of a model that scores all labels alike.
        self._log_eta_N = untrained_variable(np.full(pairs, np.log(labels), np.float32), "log_eta")
        self._steps_per_epoch, self.variables = steps_per_epoch, [self._log_eta_N]

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Return log η and its step size."""
        log_eta_B = backend.gather(self._log_eta_N, step.batch["_pair"])
        epochs_done = step.steps_done // self._steps_per_epoch
        # Robbins-Monro steps t^−0.9 over epochs; below 1, because `next_log_eta` takes log(1 − rate).
        rate = ops.minimum(ops.power(1.0 + ops.cast(epochs_done, "float32"), -0.9), 1 - 1e-6)
        return {"log_eta": log_eta_B, "eta_rate": ops.zeros_like(log_eta_B) + rate}

    def update_state(self, batch: Mapping[str, Tensor], visited: Tensors) -> None:
        """Write the new log η."""
        backend.scatter(self._log_eta_N, batch["_pair"], visited["log_eta"])


class SampledRanks(LossTerm):
    """Draw the ranks of mining in proportion to ϑ [Re19 §3.1]."""

    def __init__(self, mining: Mining) -> None:
        self._mining = mining

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Draw ranks for every row, int32 [B, N]."""
        return {"ranks": self._mining.ranks(step.positive_B.shape[0], step.candidates.shape[-1], step.seed)}
