"""Parts of a loss that need no column of their own: η of every pair, ranks that mining draws.

Legend: `B` batch, `M` candidates, `N` training pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.backend.tensors import Tensors
from longtail.trainer.losses.method import Method, Visit
from longtail.trainer.losses.mining import Mining


class Eta(Method):
    """log η of all training pairs, beginning at log L, for `augment_and_reduce`; `Objective.with_eta` moves it."""

    def __init__(self, *, pairs: int, labels: int, steps_per_epoch: int) -> None:
        self._log_eta_N = untrained_variable(np.full(pairs, np.log(labels), np.float32), "log_eta")
        self._steps_per_epoch, self.variables = steps_per_epoch, [self._log_eta_N]

    def of_rows(self, visit: Visit) -> Tensors:
        """Get log η and its step size."""
        log_eta_B = backend.gather(self._log_eta_N, visit.batch["_pair"])
        epochs_done = visit.steps_done // self._steps_per_epoch
        rate = ops.minimum(ops.power(1.0 + ops.cast(epochs_done, "float32"), -0.9), 1 - 1e-6)
        return {"log_eta": log_eta_B, "eta_rate": ops.zeros_like(log_eta_B) + rate}

    def keep(self, batch: Mapping[str, Tensor], visited: Tensors) -> None:
        """Write the new log η."""
        backend.scatter(self._log_eta_N, batch["_pair"], visited["log_eta"])


class SampledRanks(Method):
    """Ranks that mining draws by its ϑ, in place of all that it weighs [Re19 §3.1]."""

    def __init__(self, mining: Mining) -> None:
        self._mining = mining

    def of_rows(self, visit: Visit) -> Tensors:
        """Draw them, int32 [B, N]."""
        return {"ranks": self._mining.ranks(visit.positive_B.shape[0], visit.candidates.shape[-1], visit.seed)}
