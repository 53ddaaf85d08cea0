"""Interactions as integer pairs.

Legend: `N` pairs, `Q` queries, `A` queries as they are asked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class Asked:
    """Queries as they are asked: who asks, in which context, with the attributes of which time. Distinct.

    Attributes:
        queries: int32 [A], rows of `Dataset.query_ids`.
        contexts: int32 [A], rows of `Dataset.contexts`; None where no feature is read from the interactions.
        attributes: int32 [A], rows of `Dataset.query_table`; None where its row q is query q's.
    """

    queries: Int32
    contexts: Int32 | None = None
    attributes: Int32 | None = None


@dataclass(frozen=True)
class Pairs:
    """Query-label pairs, sorted by query, then time, then place in the file.

    Attributes:
        queries: int32 [N], rows of `Dataset.query_ids`.
        labels: int32 [N], rows of `Dataset.label_ids`.
        weights: float32 [N], or None where every pair weighs 1.
        times: float64 [N], or None.
        events: int32 [N], each pair's place among the types of `data.events.weights`; None where these have no column.
        asked: int32 [N], rows of `Dataset.asked`; None where a query is asked in one way alone.
        shown: int32 [N], rows of `Dataset.impressions`; None without.
        objectives: int32 [N], places in `Recipe.objectives`; None without.
    """

    queries: Int32
    labels: Int32
    weights: Float32 | None = None
    times: Float64 | None = None
    events: Int32 | None = None
    asked: Int32 | None = None
    shown: Int32 | None = None
    objectives: Int32 | None = None

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def askings(self) -> Int32:
        """Rows of the queries as they are asked, int32 [N]: of `Dataset.asked`, or of `Dataset.query_ids` without."""
        return self.queries if self.asked is None else self.asked

    @property
    def owners(self) -> Int64:
        """Whose positive the label is: a number for each query, or for each query and objective, int64 [N]."""
        return self._of_objectives(self.queries)

    @property
    def asked_for(self) -> Int64:
        """What is asked: a number for each of `askings`, or for each of them and objective, int64 [N]."""
        return self._of_objectives(self.askings)

    def weight_of_owners(self, chances_N: Float64 | None = None) -> Float32:
        """What the pairs of each pair's owner weigh together in an epoch, float32 [N]; 1 where that is nothing.

        Args:
            chances_N: float64, how often an epoch visits each pair; None: once.
        """
        owners = self.owners
        weight_N = np.ones(len(self)) if self.weights is None else self.weights.astype(np.float64)
        total_N = np.bincount(owners, weight_N if chances_N is None else weight_N * chances_N)[owners]
        return np.where(total_N > 0, total_N, 1).astype(np.float32)

    def _of_objectives(self, rows_N: Int32) -> Int64:
        rows = rows_N.astype(np.int64)
        if self.objectives is None or not len(self):
            return rows
        return rows * (int(self.objectives.max()) + 1) + self.objectives

    def take(self, rows: npt.NDArray[np.integer] | Bools | slice) -> Pairs:
        """The pairs of some rows: numbers int [n], a mask bool [N], or a slice."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        taken = {name: column[rows] for name, column in columns.items() if column is not None}
        return Pairs(**taken)

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
            join(self.asked, later.asked),
            join(self.shown, later.shown),
            join(self.objectives, later.objectives),
        ).sorted()

    def offsets(self, queries: int) -> Int64:
        """Start of every query's pairs, int64 [Q + 1]."""
        return np.searchsorted(self.queries, np.arange(queries + 1)).astype(np.int64)
