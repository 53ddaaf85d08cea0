"""Interactions as integer pairs.

Legend: `N` pairs, `Q` queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class Pairs:
    """Query-label pairs, sorted by query, then time, then place in the file.

    Attributes:
        queries: int32 [N], rows of `Dataset.query_ids`.
        labels: int32 [N], rows of `Dataset.label_ids`.
        weights: float32 [N], or None where every pair weighs 1.
        times: float64 [N], or None.
        events: int32 [N], each pair's place among the types of `data.events.weights`; None where these have no column.
    """

    queries: Int32
    labels: Int32
    weights: Float32 | None = None
    times: Float64 | None = None
    events: Int32 | None = None

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: npt.NDArray[np.integer] | Bools | slice) -> Pairs:
        """The pairs of some rows: numbers int [n], a mask bool [N], or a slice."""
        return Pairs(
            self.queries[rows],
            self.labels[rows],
            None if self.weights is None else self.weights[rows],
            None if self.times is None else self.times[rows],
            None if self.events is None else self.events[rows],
        )

    def sorted(self) -> Pairs:
        """Sorted by query, then time; equals keep their order."""
        keys = (self.queries,) if self.times is None else (self.times, self.queries)
        return self.take(np.lexsort(keys))

    def followed_by(self, later: Pairs) -> Pairs:
        """Both, sorted; where times are equal or absent, `later` comes after."""

        def join(a: npt.NDArray[_T] | None, b: npt.NDArray[_T] | None) -> npt.NDArray[_T] | None:
            return None if a is None or b is None else np.concatenate([a, b])

        return Pairs(
            np.concatenate([self.queries, later.queries]),
            np.concatenate([self.labels, later.labels]),
            join(self.weights, later.weights),
            join(self.times, later.times),
            join(self.events, later.events),
        ).sorted()

    def offsets(self, queries: int) -> Int64:
        """Start of every query's pairs, int64 [Q + 1]."""
        return np.searchsorted(self.queries, np.arange(queries + 1)).astype(np.int64)
