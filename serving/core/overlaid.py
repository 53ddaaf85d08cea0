"""Search over an index and the rows that came after it: the first of them indexed too, the last scored one by one.

Legend: `B` queries, `b` some of them, `E` coordinates of an augmented row, `K` results, `M` added rows, counted from 0,
`A` those that are indexed, `Z` places in their index, `N` those that are scored one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np

from longtail.bundle.arrays import Float32, Int8, Int64
from longtail.index import NO_ROW, Filter, Searcher, Selection, kth_best, no_results, top_k
from longtail.serving.core.ranking import LabelSearcher

_SCORES_AT_ONCE = 1 << 22
"""Exact scores held at a time, at most: 16 MiB."""


@dataclass(frozen=True)
class IndexedRows:
    """The first A of some added rows, in an index of their own. Immutable.

    Attributes:
        searcher: finds places 0 … Z − 1, but for those whose rows are gone.
        places_A: int64 [A], the place of every row, ascending.
    """

    searcher: Searcher
    places_A: Int64
    _selections: WeakKeyDictionary[Selection, Selection] = field(default_factory=WeakKeyDictionary)

    @classmethod
    def of(cls, searcher: Searcher) -> Self:
        """All the rows that a searcher finds."""
        return cls(searcher, np.arange(searcher.labels))

    def __len__(self) -> int:
        return len(self.places_A)

    def without(self, rows: Sequence[int]) -> IndexedRows:
        """The same but for some of the M rows; those after them move up."""
        gone = [row for row in rows if row < len(self)]
        if not gone:
            return self
        return IndexedRows(self.searcher.without(self.places_A[gone]), np.delete(self.places_A, gone))

    def search(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None]) -> tuple[Float32, Int64]:
        """As `LabelSearcher.search`, over the A rows; filters are of all M."""
        asked = [None if filter_ is None else self._of_places(filter_) for filter_ in filters]
        given = None if all(filter_ is None for filter_ in asked) else asked
        scores_BK, places_BK = self.searcher.search(queries_BE, min(k, self.searcher.labels), given)
        rows_BK = np.searchsorted(self.places_A, places_BK)
        rows_BK[places_BK == NO_ROW] = NO_ROW
        return scores_BK, rows_BK

    def _of_places(self, filter_: Filter) -> Filter:
        exclude, allow = (
            None if rows is None else self.places_A[rows[rows < len(self)]] for rows in (filter_.exclude, filter_.allow)
        )
        return Filter(exclude, allow, filter_.buckets, filter_.selection and self._selection(filter_.selection))

    def _selection(self, selection: Selection) -> Selection:
        """A selection of the M rows as one of places; queries that share the one share the other."""
        found = self._selections.get(selection)
        if found is None:
            mask_Z = np.zeros(self.searcher.labels, np.bool_)
            mask_Z[self.places_A] = selection.mask[: len(self)]
            found = self._selections[selection] = Selection(mask_Z)
        return found


class OverlaidSearcher:
    """Searches an index and the rows of an overlay; best first, whichever they come from.

    Args:
        base: finds rows 0 … first − 1.
        first: number of labels L in the index; row of the first overlay label.
        rows_ME: float32, augmented rows of the labels first, first + 1, …
        buckets_M: int8, the bucket of each of those labels.
        indexed: the first of these rows, where they are too many to score one by one.
    """

    def __init__(
        self, base: LabelSearcher, first: int, rows_ME: Float32, buckets_M: Int8, indexed: IndexedRows | None = None
    ) -> None:
        self.labels = first + len(rows_ME)
        self._base = base
        self._first = first
        self._rows_ME = rows_ME
        self._buckets_M = buckets_M
        self._indexed = indexed

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """As `index.Searcher.search`, over the rows of both.

        Args:
            queries_BE: float32, augmented queries.
            k: K.
            filters: one or None for each query; None leaves all labels eligible.

        Returns:
            Scores float32 [B, K], descending, and rows int64 [B, K]; −inf and −1 where too few are eligible.

        Raises:
            QueryError: names the query and the row or bucket that does not exist.
        """
        below: list[Filter | None] | None = None
        above: Sequence[Filter | None] = [None] * len(queries_BE)
        if filters is not None:
            for query, filter_ in enumerate(filters):
                if filter_ is not None:
                    filter_.check(self.labels, query)
            below = [self._filter_of_base(filter_) for filter_ in filters]
            above = [None if filter_ is None else self._filter_of_added(filter_) for filter_ in filters]
        found = [self._base.search(queries_BE, min(k, self._first), below)]
        indexed = 0
        if self._indexed is not None:
            indexed = len(self._indexed)
            scores_BK, rows_BK = self._indexed.search(queries_BE, k, above)
            found.append((scores_BK, np.where(rows_BK == NO_ROW, NO_ROW, rows_BK + self._first)))
        if indexed < len(self._rows_ME):
            found.append(self._scan(queries_BE, kth_best(found[0][0], k), above, indexed))
        return top_k([scores for scores, _ in found], [rows for _, rows in found], k)

    def _scan(
        self, queries_BE: Float32, least_B: Float32, filters: Sequence[Filter | None], start: int
    ) -> tuple[Float32, Int64]:
        """The rows from `start` on, N of them, that score as `least_B` or higher; filters are of all M."""
        rows_NE, buckets_N = self._rows_ME[start:], self._buckets_M[start:]
        step = max(1, _SCORES_AT_ONCE // len(rows_NE))
        scores, places = [], []
        for first in range(0, len(queries_BE), step):
            scores_bN = queries_BE[first : first + step] @ rows_NE.T
            for query, scores_N in enumerate(scores_bN, start=first):
                places_C = np.flatnonzero(scores_N >= least_B[query])
                if (filter_ := filters[query]) is not None:
                    mask_N = Filter(*_rows_from(start, filter_), filter_.buckets).mask(buckets_N)
                    if filter_.selection is not None:
                        mask_N &= filter_.selection.mask[start:]
                    places_C = places_C[mask_N[places_C]]
                scores.append(scores_N[places_C])
                places.append(places_C)
        scores_BC, rows_BC = no_results(len(queries_BE), max(map(len, places), default=0))
        for query, places_C in enumerate(places):
            scores_BC[query, : len(places_C)] = scores[query]
            rows_BC[query, : len(places_C)] = places_C + (self._first + start)
        return scores_BC, rows_BC

    def _filter_of_base(self, filter_: Filter | None) -> Filter | None:
        """The part of a filter that concerns labels of the index; None if it leaves them all in."""
        if filter_ is None:
            return None
        exclude, allow = (
            None if rows is None else rows[rows < self._first] for rows in (filter_.exclude, filter_.allow)
        )
        rules_out = allow is not None or filter_.buckets is not None or filter_.selection is not None
        if not rules_out and (exclude is None or not exclude.size):
            return None
        return Filter(exclude, allow, filter_.buckets, filter_.selection)

    def _filter_of_added(self, filter_: Filter) -> Filter:
        """The part of a filter that concerns labels of the overlay, its rows counted from the overlay's first."""
        return Filter(*_rows_from(self._first, filter_), filter_.buckets, filter_.beyond)


def _rows_from(first: int, filter_: Filter) -> tuple[Int64 | None, Int64 | None]:
    """What a filter excludes and allows from a row on, counted from it."""
    exclude, allow = (
        None if rows is None else rows[rows >= first] - first for rows in (filter_.exclude, filter_.allow)
    )
    return exclude, allow
