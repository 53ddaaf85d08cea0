"""Label frequencies estimated from the stream of batches, for data that is never counted, after [Yi19 Algorithm 2].

Each label hashes to a cell that keeps when the label last came and a moving average of the gap between its
occurrences; 1/gap is its frequency. Time is counted in pairs, not in batches: a label that comes c times in one
batch has c gaps there, where a count of batches would never see a gap below one batch and so truncate every
frequency at 1/B. That, and a plain mean of the first gaps, is where this differs from Algorithm 2, whose time is the
global step, whose average has one rate from the start, and whose 1/gap is the probability of being in a batch.

Legend: `B` batch, `U` distinct cells of a batch, `H` hash functions, `R` cells of each.
"""

from __future__ import annotations

import keras
import numpy as np

from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops

_MULTIPLIERS = (1_640_531_527, 97_654_321, 1_181_783_497)


class StreamingFrequencies:
    """Moving averages of gaps: the plain mean of a label's first 1/rate gaps, then `(1 − rate)·gap + rate·seen`.

    For a label of frequency π the estimate's relative error has a standard deviation of about
    √(rate·(1 − π)/(2 − rate)); labels that share a cell are taken for one, so of several hash functions the
    rarest estimate counts. The first is the label modulo R: with as many rows as labels none is shared.

    Args:
        initial_gap: gap of a cell that nothing came to yet, in pairs.
    """

    def __init__(self, rows: int, *, hashes: int = 2, rate: float = 0.02, initial_gap: float) -> None:
        self.rows, self.hashes, self.rate = rows, hashes, rate
        shape = (hashes * rows,)
        self._gap = keras.Variable(np.full(shape, initial_gap, np.float32), trainable=False, name="gaps")
        self._gaps_seen = keras.Variable(np.zeros(shape, np.float32), trainable=False, name="gaps_seen")
        self._last = keras.Variable(np.zeros(shape, np.int32), dtype="int32", trainable=False, name="last_seen")
        self._now = keras.Variable(0, dtype="int32", trainable=False, name="pairs_seen")

    @property
    def variables(self) -> list[keras.Variable]:
        """Return the state, for checkpoints."""
        return [self._gap, self._gaps_seen, self._last, self._now]

    def log_frequencies(self, labels: Tensor) -> Tensor:
        """log π of label rows, float32 of their shape; nats, at most 0."""
        gaps = ops.stack([backend.gather(self._gap, cells) for cells in self._cells(labels)])
        return -ops.log(ops.maximum(ops.max(gaps, axis=0), 1.0))

    def update(self, labels_B: Tensor) -> None:
        """Take in a batch's labels, int32 [B]."""
        batch = labels_B.shape[0]
        now = self._now.value + batch
        for cells_B in self._cells(labels_B):
            cells_U, positions_B = backend.unique(cells_B, self.hashes * self.rows)
            hits_U = backend.count(positions_B, cells_U)
            gap_U, seen_U = backend.gather(self._gap, cells_U), backend.gather(self._gaps_seen, cells_U)
            new_U = ops.cast(now - backend.gather(self._last, cells_U), "float32") / ops.maximum(hits_U, 1.0)
            kept_U = ops.where(
                seen_U * self.rate < 1, seen_U / ops.maximum(seen_U + hits_U, 1.0), ops.power(1 - self.rate, hits_U)
            )
            backend.scatter(self._gap, cells_U, kept_U * gap_U + (1 - kept_U) * new_U)
            backend.scatter(self._gaps_seen, cells_U, seen_U + hits_U)
            backend.scatter(self._last, cells_U, ops.zeros_like(cells_U) + now)
        self._now.assign(now)

    def _cells(self, labels: Tensor) -> list[Tensor]:
        """Cell of every label under every hash function, int32; products wrap around."""
        cells = [ops.mod(labels, self.rows)]
        for at, multiplier in enumerate(_MULTIPLIERS[: self.hashes - 1], start=1):
            product = labels * multiplier
            mixed = ops.bitwise_xor(product, ops.right_shift(product, 15))
            cells.append(ops.mod(mixed, self.rows) + at * self.rows)
        return cells
