"""Weigh repeated pairs of a query and a label, and the pairs of a visit.

Legend: `N` pairs, sorted by time, `L` labels, `n` pairs in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Float64, Int64

_VISIT = 86_400.0
"""Seconds before a pair in which its query's pairs are one visit."""


class WeighedPairs(NamedTuple):
    """Pairs by time, [N] each.

    Attributes:
        labels_N: label rows.
        times_N: seconds since 1970.
        previous_N: row of the previous pair of the query and label, among all pairs; −1 for none.
        gaps_N: seconds since this previous pair; +∞ without one.
        weights_N: largest weight of a pair and its earlier repeats.
        increases_N: increase of this largest weight by the pair; the weight without an earlier repeat.
    """

    queries_N: npt.NDArray[np.integer]
    labels_N: Int64
    times_N: Float64
    previous_N: Int64
    gaps_N: Float64
    weights_N: Float64
    increases_N: Float64

    @classmethod
    def weigh(
        cls, queries_N: npt.NDArray[np.integer], labels_N: npt.NDArray[np.integer], times_N: Float64,
        weights_N: Float64 | None = None, visits: float = 0.0,
    ) -> WeighedPairs:  # fmt: skip
        """Sort pairs by time and weigh them.

        Args:
            weights_N: weights of the pairs by their types of events; None for 1 each.
            visits: power by which the rank of a pair in its query's visit divides its weight.
        """
        order_N = np.argsort(times_N, kind="stable")
        weights_N = np.ones(len(order_N)) if weights_N is None else weights_N[order_N]
        queries_N, times_N = queries_N[order_N], times_N[order_N]
        rows_N: Int64 = labels_N[order_N].astype(np.int64)
        previous_N = _previous_pairs(queries_N, rows_N)
        gaps_N = np.where(previous_N < 0, np.inf, times_N - times_N[previous_N])
        weights_N = weights_N * visit_weights(queries_N, times_N, gaps_N, visits)
        weighed = _largest_weights(weights_N, queries_N, rows_N)
        return cls(queries_N, rows_N, times_N, previous_N, gaps_N, *weighed)

    def select(self, rows: slice) -> WeighedPairs:
        """Select a range of the pairs."""
        return WeighedPairs(*(column[rows] for column in self))  # type: ignore[arg-type]  # of several types

    def select_between(self, after: float, until: float) -> WeighedPairs:
        """Select the pairs later than `after`, up to `until`."""
        return self.select(slice(*np.searchsorted(self.times_N, (after, until), side="right")))

    def once_after(self, after: float) -> Float64:
        """Weigh the pairs so that a query counts once at its largest weight; the mean weight is 1, float64 [N]."""
        first_N = self.times_N - self.gaps_N <= after
        weights_N = np.where(first_N, self.weights_N, self.increases_N)
        return np.asarray(weights_N * (first_N.sum() / (weights_N.sum() or 1.0)))

    def pairs_after(self, after: float, labels: int) -> Float64:
        """Count each label's pairs, a query once at its largest weight; the mean weight is 1, float64 [L]."""
        return np.bincount(self.labels_N, self.once_after(after), labels).astype(np.float64)

    def votes_after(self, after: float, labels: int) -> Float64:
        """Spread one vote of every query over its labels, float64 [L]: what a mean over queries counts."""
        first_N = self.times_N - self.gaps_N <= after
        _, query_n, pairs_n = np.unique(self.queries_N[first_N], return_inverse=True, return_counts=True)
        return np.bincount(self.labels_N[first_N], 1 / pairs_n[query_n], labels).astype(np.float64)


def _previous_pairs(queries_N: npt.NDArray[np.integer], labels_N: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Find the previous pair of each pair's query and label: rows, int64 [N]; −1 for none."""
    order_N = np.lexsort((labels_N, queries_N))
    same_n = (np.diff(queries_N[order_N]) == 0) & (np.diff(labels_N[order_N]) == 0)
    previous_N = np.full(len(order_N), -1)
    previous_N[order_N[1:][same_n]] = order_N[:-1][same_n]
    return previous_N


def _largest_weights(
    weights_N: Float64, queries_N: npt.NDArray[np.integer], labels_N: npt.NDArray[np.integer]
) -> tuple[Float64, Float64]:
    """Find the largest weight up to each repeated pair, and its increase, float64 [N] each.

    The pairs are sorted by time. The increase of a pair without an earlier repeat is its weight.
    """
    order_N = np.lexsort((labels_N, queries_N))
    values, codes_N = np.unique(weights_N, return_inverse=True)
    new_N = np.ones(len(order_N), np.bool_)
    new_N[1:] = (np.diff(queries_N[order_N]) != 0) | (np.diff(labels_N[order_N]) != 0)
    # Keys rise from one query and label to the next, so that one running maximum serves all of them.
    keys_N = np.maximum.accumulate(np.cumsum(new_N) * len(values) + codes_N[order_N])
    largest_N, increases_N = np.empty_like(weights_N), np.empty_like(weights_N)
    largest_N[order_N] = sorted_N = values[keys_N % max(len(values), 1)]
    increases_N[order_N] = np.where(new_N, sorted_N, np.diff(sorted_N, prepend=0))
    return largest_N, increases_N


def visit_weights(queries_N: npt.NDArray[np.integer], times_N: Float64, gaps_N: Float64, power: float) -> Float64:
    """Compute j^−power for a query's j-th label within a day, float64 [N]; pairs of one time share one j.

    A visitor who chooses sixty labels says less by each of them than sixty visitors do.

    Args:
        gaps_N: see `WeighedPairs`; a label that is repeated within a day does not raise j.
    """
    weights_N = np.ones(len(times_N))
    if not power or not len(times_N):
        return weights_N
    order_N = np.lexsort((times_N, queries_N))
    query_n, since_n = queries_N[order_N], times_N[order_N] - times_N.min()
    # Times rise from one query to the next, further apart than a visit, so that one search serves all queries.
    since_n = since_n + np.cumsum(np.diff(query_n, prepend=query_n[0]) != 0) * (since_n.max() + 2 * _VISIT)
    labels_n = np.append(0, np.cumsum(gaps_N[order_N] >= _VISIT))
    ends_n, begins_n = (np.searchsorted(since_n, since_n - before, side="right") for before in (0, _VISIT))
    weights_N[order_N] = np.maximum(labels_n[ends_n] - labels_n[begins_n], 1.0) ** -power
    return weights_N
