"""What searchers of every engine have in common: queries of like filters share a search, labels can be hidden.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index.errors import QueryError
from longtail.index.search.candidates import no_results, top_k
from longtail.index.search.exact import ExactRows
from longtail.index.search.filters import Filter, Selection, check_rows, without_rows

SCORE_EXACTLY_SHARE = 0.02
"""Share of the labels below which the eligible ones are scored one by one: quicker than a search that skips
the other 98 in a hundred, and exact."""
_EXCLUDE_BY_OVERFETCH_UP_TO = 256
"""Excluded labels that are fetched and dropped, in one search for many queries; longer lists become a set of eligible
labels of their own, which costs less than to fetch so many."""
EVERYTHING = frozenset(range(len(BUCKET_NAMES)))


class _Countable(Protocol):
    """Labels of an index that may be answered, as its engine has them. Immutable."""

    @property
    def count(self) -> int:
        """How many they are."""

    def without(self, rows_R: Int64) -> Self:
        """The same but for some label rows, int64 [R], which may repeat."""


Eligible = TypeVar("Eligible", bound=_Countable)
_OfSelection = WeakKeyDictionary[Selection, dict[frozenset[int], Eligible]]


class FilteringSearcher(ABC, Generic[Eligible]):
    """Top k labels for augmented queries [METHODS §6] under a filter for each. Concurrent searches are safe.

    Args:
        bundle: the labels' rows, popularity and buckets.

    Attributes:
        labels: L.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.labels = len(bundle.embeddings)
        self._exact = ExactRows(bundle)
        self._buckets_L = bundle.labels.buckets
        self._hidden_R: Int64 = np.empty(0, np.int64)
        self._visible_of_buckets: dict[frozenset[int], Eligible] = {}
        self._visible_of_selection: _OfSelection[Eligible] = WeakKeyDictionary()

    @abstractmethod
    def _every_of(self, buckets: frozenset[int]) -> Eligible:
        """Labels of some buckets, those hidden among them."""

    @abstractmethod
    def _selected(self, eligible: Eligible, selection: Selection) -> Eligible:
        """Those of them that a selection has."""

    @abstractmethod
    def _allowed(self, eligible: Eligible, filter_: Filter) -> Eligible:
        """Those of them that a filter with `allow` lets pass."""

    @abstractmethod
    def _best(self, queries_bE: Float32, k: int, eligible: Eligible) -> tuple[Float32, Int64]:
        """The best k of some labels that a search finds, descending; −inf and −1 beyond what it finds."""

    @abstractmethod
    def _filled(self, query_1E: Float32, k: int, eligible: Eligible) -> tuple[Float32, Int64]:
        """The best k for a query that `_best` leaves short: as many as there are, in the end."""

    @abstractmethod
    def found(self, queries_BE: Float32, k: int) -> tuple[Float32, Int64]:
        """What the index finds by itself: as `search`, but a query that ends up short is not answered again exactly.

        Args:
            queries_BE: float32 [B, E], B >= 1.
            k: results per query.
        """

    def patience(self) -> AbstractContextManager[None]:
        """While this lasts, no client waits for what is searched."""
        return nullcontext()

    def without(self, rows_R: Int64) -> Self:
        """A searcher over the same index that never answers some label rows, nor those that this one hides.

        Takes milliseconds, for a catalogue of a million labels, and microseconds more for every search.

        Args:
            rows_R: integer label rows, which may repeat.

        Raises:
            QueryError: a row that does not exist, or no array of rows.
        """
        check_rows("hidden labels", rows_R, self.labels)
        searcher = copy.copy(self)
        searcher._hidden_R = np.union1d(self._hidden_R, rows_R.astype(np.int64))
        searcher._visible_of_buckets = {}
        searcher._visible_of_selection = WeakKeyDictionary()
        return searcher

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """The k best eligible labels of every query, best first.

        Args:
            queries_BE: float32 [B, E], from `Augmentation.queries`.
            k: results per query, >= 1.
            filters: one per query, or None for none.

        Returns:
            scores float32 [B, k] (row · query) and label rows int64 [B, k]; −inf and −1 where fewer than k labels
            are eligible. On an approximate index the best may be missed, but k are found when k are eligible.

        Raises:
            QueryError: a wrong shape or type, k < 1, a value that is not finite, or a filter that does not fit.
            EngineUnavailableError: of an engine that is a server of its own, which does not answer.
        """
        self._check(queries_BE, k, filters)
        if filters is None and len(queries_BE):
            return self._search(queries_BE, k, self._bucket_labels(EVERYTHING))
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        searches: list[tuple[list[int], Callable[[], tuple[Float32, Int64]]]] = []
        groups: dict[tuple[frozenset[int], Selection | None, int], list[int]] = defaultdict(list)
        for query, filter_ in enumerate(filters or ()):
            if filter_ is not None and (filter_.allow is not None or _size(filter_) > _EXCLUDE_BY_OVERFETCH_UP_TO):
                searches.append(([query], partial(self._search_alone, queries_BE[query : query + 1], k, filter_)))
            else:
                # Queries with like numbers of excluded labels share one search.
                selection = None if filter_ is None else filter_.selection
                groups[_buckets(filter_), selection, _next_power_of_two(_size(filter_))].append(query)
        for (buckets, selection, excluded), queries in groups.items():
            excludes = [_exclude(filters[query]) for query in queries] if excluded and filters else None
            picked = queries_BE if len(queries) == len(queries_BE) else queries_BE[queries]
            searches.append((queries, partial(self._search_group, picked, k, buckets, selection, excluded, excludes)))
        found = self._each([search for _, search in searches])
        for (queries, _), (scores_bK, rows_bK) in zip(searches, found, strict=True):
            scores_BK[queries], rows_BK[queries] = scores_bK, rows_bK
        return scores_BK, rows_BK

    def _each(self, searches: Sequence[Callable[[], tuple[Float32, Int64]]]) -> Iterable[tuple[Float32, Int64]]:
        """What each search finds, in order: one after the other, unless an engine can do them at once."""
        return (search() for search in searches)

    def _search_group(
        self,
        queries_bE: Float32,
        k: int,
        buckets: frozenset[int],
        selection: Selection | None,
        excluded: int,
        excludes: Sequence[Int64] | None,
    ) -> tuple[Float32, Int64]:
        """Queries of the same buckets and selection."""
        return self._search(queries_bE, k, self._visible(buckets, selection), excluded, excludes)

    def _search_alone(self, query_1E: Float32, k: int, filter_: Filter) -> tuple[Float32, Int64]:
        """One query whose eligible labels are its own."""
        if filter_.allow is None:
            visible = self._visible(_buckets(filter_), filter_.selection)
            return self._search(query_1E, k, visible.without(_exclude(filter_)))
        if len(filter_.allow) <= self.labels * SCORE_EXACTLY_SHARE:
            rows_R = without_rows(filter_.allowed(self._buckets_L), self._hidden_R)
            return self._exact.top(query_1E, rows_R, k)
        return self._search(query_1E, k, self._allowed(self._bucket_labels(EVERYTHING), filter_))

    def _search(
        self,
        queries_bE: Float32,
        k: int,
        eligible: Eligible,
        excluded: int = 0,
        excludes: Sequence[Int64] | None = None,
    ) -> tuple[Float32, Int64]:
        """Queries that share their eligible labels, but for up to `excluded` of each query's own."""
        scores_bK, rows_bK = self._best(queries_bE, k + excluded, eligible)
        if excludes is not None:
            scores_bK[self._is_excluded(rows_bK, excludes)] = -np.inf
            scores_bK, rows_bK = top_k([scores_bK], [rows_bK], k)
        if not (rows_bK[:, k - 1] < 0).any():
            return scores_bK, rows_bK
        for query in np.flatnonzero(rows_bK[:, min(k, eligible.count) - 1] < 0).tolist():
            own = eligible if excludes is None else eligible.without(excludes[query])
            if own.count > np.count_nonzero(rows_bK[query] >= 0):
                found = self._filled(queries_bE[query : query + 1], k, own)
                scores_bK[query], rows_bK[query] = found[0][0], found[1][0]
        return scores_bK, rows_bK

    def _is_excluded(self, rows_bC: Int64, excludes: Sequence[Int64]) -> Bools:
        """Which candidates stand in their query's own list, bool [b, C]."""
        places = [np.full(len(rows), query * self.labels) for query, rows in enumerate(excludes)]
        keys = np.sort(np.concatenate(places) + np.concatenate(excludes, dtype=np.int64, casting="same_kind"))
        keys_bC = rows_bC + np.arange(len(rows_bC))[:, None] * self.labels
        found_bC = np.minimum(np.searchsorted(keys, keys_bC), len(keys) - 1)
        excluded_bC: Bools = (keys[found_bC] == keys_bC) & (rows_bC >= 0)
        return excluded_bC

    def _visible(self, buckets: frozenset[int], selection: Selection | None) -> Eligible:
        """Labels of some buckets and a selection that are not hidden; kept as long as the selection lives."""
        if selection is None:
            return self._bucket_labels(buckets)
        of_buckets = self._visible_of_selection.setdefault(selection, {})
        eligible = of_buckets.get(buckets)
        if eligible is None:
            eligible = of_buckets[buckets] = self._selected(self._bucket_labels(buckets), selection)
        return eligible

    def _bucket_labels(self, buckets: frozenset[int]) -> Eligible:
        """Labels of some buckets that are not hidden; kept, for there are sixteen such sets."""
        eligible = self._visible_of_buckets.get(buckets)
        if eligible is None:
            eligible = self._visible_of_buckets[buckets] = self._every_of(buckets).without(self._hidden_R)
        return eligible

    def _check(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None) -> None:
        if queries_BE.dtype != np.float32 or queries_BE.ndim != 2 or queries_BE.shape[1] != self._exact.dim:
            raise QueryError(
                f"queries: expected float32 [B, {self._exact.dim}] from Augmentation.queries, "
                f"received {queries_BE.dtype} {list(queries_BE.shape)}"
            )
        if k < 1:
            raise QueryError(f"k: expected at least 1, received {k}")
        if not np.isfinite(queries_BE).all():
            first = np.isfinite(queries_BE).all(axis=1).argmin()
            raise QueryError(f"queries: expected finite values, received NaN or infinity in query {first}")
        if filters is None:
            return
        if len(filters) != len(queries_BE):
            raise QueryError(f"filters: expected one per query, {len(queries_BE)}, received {len(filters)}")
        for query, filter_ in enumerate(filters):
            if filter_ is not None:
                filter_.check(self.labels, query)
                if filter_.selection is not None and filter_.selection.labels != self.labels:
                    raise QueryError(
                        f"query {query}, filter selection: expected one of {self.labels} labels, received one of "
                        f"{filter_.selection.labels}"
                    )


def _buckets(filter_: Filter | None) -> frozenset[int]:
    return EVERYTHING if filter_ is None or filter_.buckets is None else filter_.buckets


def _exclude(filter_: Filter | None) -> Int64:
    return np.empty(0, np.int64) if filter_ is None or filter_.exclude is None else filter_.exclude


def _size(filter_: Filter | None) -> int:
    return 0 if filter_ is None or filter_.exclude is None else len(filter_.exclude)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
