"""Interactions as integer pairs.

Legend: `N` pairs, `Q` queries, `A` requests (a query in one context, with the attributes of one time).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Array, Bools, Float32, Float64, Int32, Int64

_AT_ONCE = 1 << 24


def occurrences(rows_N: Int32, rows: int) -> Int64:
    """Count the occurrences of every row, int64 [rows]."""
    # `bincount` copies its input to int64; blocks keep the copy small.
    counts = np.zeros(rows, np.int64)
    for start in range(0, len(rows_N), _AT_ONCE):
        counts += np.bincount(rows_N[start : start + _AT_ONCE], minlength=rows)
    return counts


@dataclass(frozen=True)
class Requests:
    """Hold the distinct requests: a query, its context, and its attributes at a time.

    Attributes:
        queries: int32 [A], rows of `Dataset.query_ids`.
        contexts: int32 [A], rows of `Dataset.contexts`; None if no feature is read from the interactions.
        attributes: int32 [A], rows of `Dataset.query_table`; None if row q of the table belongs to query q.
    """

    queries: Int32
    contexts: Int32 | None = None
    attributes: Int32 | None = None


@dataclass(frozen=True)
class Pairs:
    """Hold query-label pairs, sorted by query, then time, then place in the file.

    Attributes:
        queries: int32 [N], rows of `Dataset.query_ids`.
        labels: int32 [N], rows of `Dataset.label_ids`.
        weights: float32 [N], or None if every pair weighs 1.
        times: float64 [N], or None.
        events: int32 [N], index of each pair's type in `data.events.weights`; None without event types.
        requests: int32 [N], rows of `Dataset.requests`; None if every query has exactly one request.
        shown_rows: int32 [N], rows of `Dataset.impressions`; None without impressions.
        objectives: int32 [N], indices in `Recipe.objectives`; None without objectives.
    """

    queries: Int32
    labels: Int32
    weights: Float32 | None = None
    times: Float64 | None = None
    events: Int32 | None = None
    requests: Int32 | None = None
    shown_rows: Int32 | None = None
    objectives: Int32 | None = None

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def request_rows(self) -> Int32:
        """Return the request row of every pair, or its query row without requests, int32 [N]."""
        return self.queries if self.requests is None else self.requests

    @property
    def owner_keys(self) -> Int64:
        """Return a number per query, or per query and objective, int64 [N]: the owner of the pair's positive."""
        return self._of_objectives(self.queries)

    @property
    def request_keys(self) -> Int64:
        """Return a number per request, or per request and objective, int64 [N]."""
        return self._of_objectives(self.request_rows)

    def weight_of_owner(self) -> Float32:
        """Return the total weight of the pairs of each pair's owner, float32 [N]; 1 for a total of 0."""
        owners = self.owner_keys
        weight_N = np.ones(len(self)) if self.weights is None else self.weights.astype(np.float64)
        total_N = np.bincount(owners, weight_N)[owners]
        # Pairs of total weight 0 have no loss, but are divided by this number.
        return np.where(total_N > 0, total_N, 1).astype(np.float32)

    def _of_objectives(self, rows_N: Int32) -> Int64:
        # Queries times objectives may exceed int32.
        rows = rows_N.astype(np.int64)
        if self.objectives is None or not len(self):
            return rows
        return rows * (int(self.objectives.max()) + 1) + self.objectives

    def take(self, rows: npt.NDArray[np.integer] | Bools | slice) -> Pairs:
        """Return the pairs of some rows: numbers int [n], a mask bool [N], or a slice (without a copy)."""
        return Pairs(**{name: column[rows] for name, column in self.columns().items()})

    def sorted(self) -> Pairs:
        """Sort pairs by query, then time, stably."""
        return self.take(np.lexsort((self.queries,) if self.times is None else (self.times, self.queries)))

    def insertion_points(self, later: Pairs) -> Int64:
        """Find where to insert later pairs, int64 [n]; both sets are sorted.

        A later pair comes after the pairs of its query with an equal time, or after all of them without times.
        """
        # The range of each later pair's query among these pairs; the pair goes to the end, or by time.
        low_n = np.searchsorted(self.queries, later.queries, side="left")
        at_n = np.searchsorted(self.queries, later.queries, side="right")
        if self.times is not None and later.times is not None:
            while (open_n := low_n < at_n).any():  # binary search by time within a query, for all pairs at once
                middle_n = (low_n + at_n) // 2
                before_n = self.times.take(middle_n, mode="clip") <= later.times
                low_n = np.where(open_n & before_n, middle_n + 1, low_n)
                at_n = np.where(open_n & ~before_n, middle_n, at_n)
        return at_n

    def merge_later(self, later: Pairs) -> Pairs:
        """Merge two sorted sets of pairs; `later` comes after if times are equal or absent."""
        at_n, others = self.insertion_points(later), later.columns()
        return Pairs(
            **{name: np.insert(column, at_n, others[name]) for name, column in self.columns().items() if name in others}
        )

    def per_query(self) -> Int64:
        """Count the pairs of each query, int64."""
        return occurrences(self.queries, int(self.queries.max(initial=-1)) + 1)

    def columns(self) -> dict[str, Array]:
        """Return the columns that are not None, [N] each, by name."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if column is not None}


def keep_latest(pairs: Pairs) -> Pairs:
    """Keep every pair once per objective: the latest, in its place, with the largest weight.

    Args:
        pairs: sorted, as in a data set.
    """
    # Reversed keys, because `unique` returns the first occurrence, and the latest pair is kept.
    keys = pairs.owner_keys * (int(pairs.labels.max(initial=0)) + 1) + pairs.labels
    distinct, last_from_end, inverse = np.unique(keys[::-1], return_index=True, return_inverse=True)
    if len(distinct) == len(keys):
        return pairs
    rows = len(keys) - 1 - last_from_end
    order = np.argsort(rows)
    latest = pairs.take(rows[order])
    if pairs.weights is None:
        return latest
    largest = np.zeros(len(distinct), np.float32)
    np.maximum.at(largest, inverse, pairs.weights[::-1])
    return replace(latest, weights=largest[order])
