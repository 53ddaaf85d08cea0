"""One query and its six labels, and negatives for it by the ten thousand: what proofs take their means over.

Every row is the same pair (x, Y) with draws of its own from the real samplers; losses come from the real
`Objective`. Legend: `B` rows, `M` draws a row, `L` labels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from longtail.trainer.losses import Objective, SampledLogits
from longtail.trainer.sampling import SAMPLERS, DrawContext, SamplerSetup

PI = np.array([0.30, 0.25, 0.20, 0.12, 0.08, 0.05])
LOGITS = np.array([0.4, -0.6, 1.1, 0.2, -1.3, 0.7])
Y = 1
L = len(PI)
OTHERS = np.array([0, 2, 3, 4, 5])


@dataclass(frozen=True)
class Sample:
    """Draws of many rows.

    Attributes:
        drawn_BM: label rows.
        log_q_L: what the sampler says of every label.
        undrawn: number of first positions of a row that are no draws.
        log_miss: log(1 − q_Y) of a sampler that draws another label than Y; None of one that may draw it.
    """

    drawn_BM: np.ndarray
    log_q_L: np.ndarray
    undrawn: int = 0
    log_miss: float | None = None

    @property
    def m(self) -> int:
        """Draws of every row."""
        return self.drawn_BM.shape[1] - self.undrawn

    def losses(self, objective: Objective) -> np.ndarray:
        """float64 [B]; draws of Y are masked."""
        rows, log_pi_L = np.zeros(len(self.drawn_BM), np.float32), np.log(PI).astype(np.float32)
        losses_B = objective(
            SampledLogits(
                ops.convert_to_tensor(rows + np.float32(LOGITS[Y])),
                ops.convert_to_tensor(LOGITS.astype(np.float32)[self.drawn_BM]),
                ops.convert_to_tensor(self.drawn_BM == Y),
                ops.convert_to_tensor(rows + log_pi_L[Y]),
                ops.convert_to_tensor(log_pi_L[self.drawn_BM]),
                ops.convert_to_tensor(rows + self.log_q_L[Y]),
                ops.convert_to_tensor(self.log_q_L[self.drawn_BM]),
                m_B=ops.convert_to_tensor(rows + np.float32(self.m)),
                log_miss_B=None if self.log_miss is None else ops.convert_to_tensor(rows + np.float32(self.log_miss)),
            )
        )
        return ops.convert_to_numpy(losses_B).astype(np.float64)


@functools.cache
def draw(name: str, *, rows: int, negatives: int, seed: int = 0, **arguments: Any) -> Sample:
    """What a sampler draws for rows of their own."""
    sampler = SAMPLERS[name](
        SamplerSetup(np.log(PI), rows), negatives=negatives, **{"shared": False, **arguments}
    )  # fmt: skip
    context = DrawContext(ops.full((rows,), Y, "int32"), {}, None)
    drawn_BM = np.asarray(sampler.draw(keras.random.SeedGenerator(seed), context))
    log_miss = None if sampler.log_miss is None else float(np.asarray(sampler.log_miss(sampler.log_q_L[[Y]])).item())
    return Sample(drawn_BM, sampler.log_q_L, log_miss=log_miss)


@functools.cache
def batches(*, rows: int, size: int, seed: int = 0) -> Sample:
    """One row each of many batches: its own label Y first, then those of `size − 1` pairs of the data."""
    others_BM = np.random.default_rng(seed).choice(L, (rows, size - 1), p=PI)
    log_q_L = SAMPLERS["in_batch"](SamplerSetup(np.log(PI), size)).log_q_L
    return Sample(np.concatenate([np.full((rows, 1), Y), others_BM], axis=1), log_q_L, undrawn=1)


def condition_on_others(q_L: np.ndarray) -> np.ndarray:
    """q_y'/(1 − q_Y) of labels other than Y, 0 of Y: what a sampler that never draws Y draws."""
    return np.where(np.arange(L) == Y, 0, q_L / (1 - q_L[Y]))


def assert_mean(values_B: np.ndarray, expected: float) -> None:
    """Within four standard errors, and what float32 rounds."""
    error = 4 * values_B.std() / np.sqrt(len(values_B))
    assert abs(values_B.mean() - expected) <= error + 1e-6 * (1 + abs(expected)), (values_B.mean(), expected, error)
