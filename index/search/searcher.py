"""Answer queries from a FAISS index under any filter; labels can be hidden.

A `filters.Filter` states which labels one query may get. It becomes an `Eligible`, a bitmap over label rows, which
FAISS reads during the search; the bitmaps of buckets and selections are cached for later queries.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.bundle.sets import is_in
from longtail.index.errors import QueryError
from longtail.index.manifests import FilteredParams, SearchParams, SearchParamsAt
from longtail.index.search.candidates import best_columns, has_blank, no_results, top_k
from longtail.index.search.dial_params import DialParams
from longtail.index.search.eligible import Eligible
from longtail.index.search.exact import ExactRows
from longtail.index.search.faiss_index import MEASURED_DEPTH, NEARLY_WHOLE, FaissIndex
from longtail.index.search.filters import NO_FILTER, Filter, FilterMask, check_rows

_SCORE_EXACTLY_SHARE = 0.02
"""Share of eligible labels below which all of them are scored exactly: quicker than a search that skips the other 98
in a hundred."""
_EXCLUDE_BY_OVERFETCH_UP_TO = 256
"""Longest list of excluded labels that is handled by fetching extra results and dropping the excluded ones, in one
search for many queries. For a longer list an `Eligible` of its own costs less than the extra results."""
_MORE_LISTS = 8
"""Factor on the visited lists when a query's lists hold too few labels."""
_SCORED_UP_TO = 1 << 17
"""Most labels of a flat index of which every one is scored by one product, twice to three times as fast as by FAISS."""
_SCORES_AT_ONCE = 1 << 22
"""Most scores that are held at once: 16 MiB."""
ALL_BUCKETS = frozenset(range(len(BUCKET_NAMES)))
NO_MASK = FilterMask(np.empty(0, np.bool_))
"""Stands for queries without a mask in caches."""
Hits = tuple[Float32, Int64]
"""Scores, descending, and label rows."""
_Sets = WeakKeyDictionary[FilterMask, dict[frozenset[int], Eligible]]


class Searcher:
    """Find the top k labels for augmented queries [METHODS §6], each with its own filter. Thread-safe.

    A batch of one runs on the calling thread, except for threads of NumPy's BLAS; larger batches use OpenMP's threads.

    Args:
        params: parameters that suffice at every setting of the dials.
        filtered: further settings where only a share of the labels is eligible.
        params_at: cheaper parameters that suffice at single dial points.

    Example:
        An opened release has a searcher; every query may have its own λ and filter.

        >>> from longtail.index import Filter, build, open_releases
        >>> manifest = build("runs/model", "releases", name="first")
        >>> release = open_releases("releases").open("first")
        >>> bundle, searcher = release.bundle, release.searcher
        >>> queries = bundle.augmentation.queries(bundle.calibration_queries[:2], bias_removal=0.5)
        >>> tail = Filter(buckets=frozenset({2}))
        >>> scores, rows = searcher.search(queries, k=3, filters=[None, tail])
        >>> scores.shape, rows.shape
        ((2, 3), (2, 3))
        >>> bundle.labels.buckets[rows[1]].tolist()
        [2, 2, 2]
        >>> hidden = searcher.without(rows[0])
        >>> bool(set(hidden.search(queries, k=3)[1][0]) & set(rows[0]))
        False
    """

    def __init__(
        self,
        bundle: Bundle,
        index: FaissIndex,
        params: SearchParams,
        filtered: Sequence[FilteredParams] = (),
        params_at: Sequence[SearchParamsAt] = (),
    ) -> None:
        self._prepare(bundle)
        self.index = index
        self.params = params
        self.dial_params = DialParams(bundle, params, params_at)
        self.filtered = sorted(filtered, key=lambda params: params.selectivity)
        self._scores_all = index.kind == "flat" and index.gpu is None and self.labels <= _SCORED_UP_TO

    def _prepare(self, bundle: Bundle) -> None:
        self.labels = len(bundle.embeddings)
        self._exact, self._scores_all = ExactRows(bundle), False
        self._buckets_L = bundle.labels.buckets
        self._visible = Eligible.from_mask(np.ones(self.labels, np.bool_))
        self._all_sets: _Sets = WeakKeyDictionary()
        """Sets by mask and buckets, hidden labels included, which the searchers of one index share."""
        self._visible_sets: _Sets = WeakKeyDictionary()
        self._latest_sets: _Sets = WeakKeyDictionary()
        """The same sets without hidden labels, each by the last searcher of one index that made it."""

    def with_params(self, params: SearchParams) -> Self:
        """Create a searcher over the same index with the same parameters for all unfiltered queries."""
        searcher = copy.copy(self)
        searcher.dial_params = self.dial_params.fix(params)
        return searcher

    def without(self, rows_R: Int64) -> Self:
        """Create a searcher over the same index that also hides some label rows.

        Creation copies a bit for every label, and every later search takes microseconds more.
        """
        check_rows("hidden labels", rows_R, self.labels)
        searcher = copy.copy(self)
        searcher._visible = self._visible.without(rows_R)
        # The copy needs its own cache: its sets exclude the hidden labels.
        searcher._visible_sets = WeakKeyDictionary()
        return searcher

    def restrict(self, eligible: Eligible) -> Self:
        """Create a searcher over the same index that finds labels of a set alone; costs a bit for every label."""
        searcher = copy.copy(self)
        latest = self._latest_sets.setdefault(NO_MASK, {})
        visible = self._visible.intersect(eligible).succeeding(latest.get(ALL_BUCKETS))
        searcher._visible = latest[ALL_BUCKETS] = visible
        searcher._visible_sets = WeakKeyDictionary()
        return searcher

    def search(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None) -> Hits:
        """Find the k best eligible labels of every query, best first.

        Args:
            queries_BE: float32 [B, E], from `Augmentation.queries`.
            k: results per query, >= 1.
            filters: one per query, or None for none.

        Returns:
            scores float32 [B, k] (row · query) and label rows int64 [B, k]; −inf and −1 where fewer than k labels
            are eligible. An approximate index may miss some of the best, but returns k labels if k are eligible.

        Raises:
            QueryError: a wrong shape or type, k < 1, a value that is not finite, or a filter that does not fit.
        """
        self._check(queries_BE, k, filters)
        # FAISS and `np.concatenate` need at least one row.
        if not len(queries_BE):
            return no_results(0, k)
        if self._scores_all and not any(map(self._is_short, filters or ())):
            step = max(1, _SCORES_AT_ONCE // self.labels)
            parts = [slice(start, start + step) for start in range(0, len(queries_BE), step)]
            hits = [best_columns(self._all_scores(queries_BE[part], filters and filters[part]), k) for part in parts]
            if len(hits) == 1:
                return hits[0]
            return np.concatenate([scores for scores, _ in hits]), np.concatenate([rows for _, rows in hits])
        if filters is None:
            return self._search_group(queries_BE, k, None)
        groups = group_queries(filters)
        if len(groups) == 1:
            return self._search_group(queries_BE, k, groups[0][1])
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        for queries, filters_b in groups:
            scores_BK[queries], rows_BK[queries] = self._search_group(queries_BE[queries], k, filters_b)
        return scores_BK, rows_BK

    def scores(self, query_E: Float32, rows_R: Int64, filter_: Filter | None = None) -> Float32:
        """Score some label rows exactly for one query that `search` accepts.

        The cost grows with the rows and the filter's lists, not with the catalogue.

        Args:
            rows_R: int64 [R], ascending.

        Returns:
            scores float32 [R]; −inf where a row is not eligible.
        """
        filter_ = filter_ or NO_FILTER
        eligible = self._eligible(filter_.buckets, filter_.selection)
        scores_R = self._exact.scores(query_E, rows_R)
        if not eligible.is_complete:
            scores_R[~eligible.contains(rows_R)] = -np.inf
        if filter_.allow is not None:
            scores_R[~is_in(rows_R, np.sort(filter_.allow))] = -np.inf
        if rows_R.size and filter_.excluded.size:
            positions = np.minimum(np.searchsorted(rows_R, filter_.excluded), len(rows_R) - 1)
            scores_R[positions[rows_R[positions] == filter_.excluded]] = -np.inf
        return scores_R

    def all_scores(self, queries_BE: Float32, filters: Sequence[Filter | None]) -> Float32 | None:
        """Score every label exactly for queries that `search` accepts, float32 [B, L]; −inf where not eligible.

        Returns None if the scores are too many.
        """
        is_cheap = self._scores_all and len(queries_BE) * self.labels <= _SCORES_AT_ONCE
        return self._all_scores(queries_BE, filters) if is_cheap else None

    def _all_scores(self, queries_BE: Float32, filters: Sequence[Filter | None] | None) -> Float32:
        scores_BL: Float32 = queries_BE @ self.index.columns[: self._exact.dim]
        for scores_L, filter_ in zip(scores_BL, filters or [None] * len(scores_BL), strict=True):
            eligible = self._visible if filter_ is None else self._eligible(filter_.buckets, filter_.selection)
            if not eligible.is_complete:
                scores_L[eligible.excluded_rows] = -np.inf
            if filter_ is None:
                continue
            if filter_.allow is not None:
                allowed_R = scores_L[filter_.allow]
                scores_L[:] = -np.inf
                scores_L[filter_.allow] = allowed_R
            if filter_.exclude is not None:
                scores_L[filter_.exclude] = -np.inf
        return scores_BL

    def _is_short(self, filter_: Filter | None) -> bool:
        """Return whether a filter allows so few labels that those alone are scored."""
        return (
            filter_ is not None
            and filter_.allow is not None
            and len(filter_.allow) <= self.labels * _SCORE_EXACTLY_SHARE
        )

    def search_index(self, queries_BE: Float32, k: int) -> Hits:
        """Search the index without filling up queries left short, to measure the index alone."""
        return self._search_eligible(queries_BE, k, self._visible)

    def _search_group(self, queries_bE: Float32, k: int, filters_b: Sequence[Filter] | None) -> Hits:
        """Answer one query, or queries whose filters differ only in short lists of excluded labels."""
        first = filters_b[0] if filters_b else NO_FILTER
        excludes: list[Int64] = []
        if first.allow is not None:
            if self._is_short(first):
                rows_R = first.allowed(self._buckets_L)
                return self._exact.top(queries_bE, rows_R[self._visible.contains(rows_R)], k)
            eligible = Eligible.from_mask(first.mask(self._buckets_L)).intersect(self._visible)
        else:
            eligible = self._eligible(first.buckets, first.selection)
            if filters_b and first.exclude is not None:
                eligible, excludes = exclude_rows(eligible, filters_b)
        hits = self._search_eligible(queries_bE, k + overfetch(excludes) if excludes else k, eligible)
        return self._complete(queries_bE, k, hits, eligible, excludes, self._fill)

    def _complete(
        self, queries_bE: Float32, k: int, hits: Hits, eligible: Eligible, excludes: Sequence[Int64],
        fill: Callable[[Float32, int, Eligible], Hits],
    ) -> Hits:  # fmt: skip
        """Drop excluded labels, and fill up queries whose k results are incomplete."""
        scores_bK, rows_bK = hits
        if excludes:
            scores_bK[self._is_excluded(rows_bK, excludes)] = -np.inf
            scores_bK, rows_bK = top_k([scores_bK], [rows_bK], k)
        # Results are sorted: a query is short if the last position that eligible labels could fill is empty.
        last = min(k, max(eligible.count, 1)) - 1
        for query in np.flatnonzero(rows_bK[:, last] < 0).tolist() if has_blank(rows_bK, last) else ():
            rest = eligible.without(excludes[query]) if excludes else eligible
            if rest.count > np.count_nonzero(rows_bK[query] >= 0):
                scores_1K, rows_1K = fill(queries_bE[query : query + 1], k, rest)
                scores_bK[query], rows_bK[query] = scores_1K[0], rows_1K[0]
        return scores_bK, rows_bK

    def _search_eligible(self, queries_bE: Float32, k: int, eligible: Eligible) -> Hits:
        """Find the best k eligible labels, descending, with the measured parameters; −inf and −1 beyond."""
        if not eligible.count:
            return no_results(len(queries_bE), k)
        depth, boost = k, 1.0
        if eligible.share < NEARLY_WHOLE:
            # The selectivities were measured at a few shares: take the neighbours above and below this one.
            above = bisect_left(self.filtered, eligible.share, key=lambda params: params.selectivity)
            measured = self.filtered[max(0, above - 1) : above + 1]
            exactly = eligible.share <= _SCORE_EXACTLY_SHARE or any(params.exact for params in measured)
            if exactly and self.index.kind != "flat":
                return self._exact.top(queries_bE, eligible.rows, k)
            depth, boost = max(k, MEASURED_DEPTH), max((params.boost for params in measured), default=1.0)
        groups = self.dial_params.group(queries_bE, depth)
        if len(groups) == 1:
            return self._search_index(queries_bE, k, groups[0][0], eligible, boost)
        scores_bK, rows_bK = no_results(len(queries_bE), k)
        for params, queries in groups:
            scores_bK[queries], rows_bK[queries] = self._search_index(queries_bE[queries], k, params, eligible, boost)
        return scores_bK, rows_bK

    def _search_index(
        self, queries_bE: Float32, k: int, params: SearchParams, eligible: Eligible, boost: float
    ) -> Hits:
        """Find the best k of the index with exact scores; −inf and −1 beyond."""
        scores_bC, rows_bC = self.index.search(queries_bE, k, params, eligible, boost)
        if self.index.lossy:
            scores_bC = self._exact.rescore(queries_bE, rows_bC)
        elif rows_bC.shape[1] == k and self.index.gpu is None:
            return scores_bC, rows_bC
        return top_k([scores_bC], [rows_bC], k)

    def _fill(self, query_1E: Float32, k: int, eligible: Eligible) -> Hits:
        """Answer a query whose lists hold fewer than k labels: visit more lists, finally score every label."""
        if self.index.has_lists and eligible.share >= NEARLY_WHOLE:
            params = self.params
            while params.nprobe < self.index.list_count:
                params = params.increase_nprobe(_MORE_LISTS)
                scores_1K, rows_1K = self._search_index(query_1E, k, params, eligible, 1.0)
                if rows_1K[0, min(k, eligible.count) - 1] >= 0:
                    return scores_1K, rows_1K
        return self._exact.top(query_1E, eligible.rows, k)

    def _eligible(self, buckets: frozenset[int] | None, mask: FilterMask | None) -> Eligible:
        """Get the visible labels of some buckets and a mask; cached while the mask lives."""
        if mask is None and (buckets is None or buckets == ALL_BUCKETS):
            return self._visible
        buckets, mask = ALL_BUCKETS if buckets is None else buckets, mask or NO_MASK
        # Two threads may build the same set at once; both are equal, and the last one stays cached.
        sets = self._visible_sets.setdefault(mask, {})
        eligible = sets.get(buckets)
        if eligible is None:
            latest = self._latest_sets.setdefault(mask, {})
            eligible = self._with_hidden(buckets, mask).intersect(self._visible).succeeding(latest.get(buckets))
            sets[buckets] = latest[buckets] = eligible
        return eligible

    def _with_hidden(self, buckets: frozenset[int], mask: FilterMask) -> Eligible:
        """Get the labels of some buckets and a mask, hidden ones included."""
        sets = self._all_sets.setdefault(mask, {})
        eligible = sets.get(buckets)
        if eligible is None:
            filter_ = Filter(
                buckets=None if buckets == ALL_BUCKETS else buckets, selection=None if mask is NO_MASK else mask
            )
            eligible = sets[buckets] = Eligible.from_mask(filter_.mask(self._buckets_L))
        return eligible

    def _is_excluded(self, rows_bC: Int64, excludes: Sequence[Int64]) -> Bools:
        """Compute which candidates are in their own query's list of excluded labels, bool [b, C]."""
        # The key `query · L + row` is unique over all lists, so one sorted array serves the whole batch.
        offsets = [np.full(len(rows), query * self.labels) for query, rows in enumerate(excludes)]
        keys = np.sort(np.concatenate(offsets) + np.concatenate(excludes, dtype=np.int64, casting="same_kind"))
        excluded_bC: Bools = is_in(rows_bC + np.arange(len(rows_bC))[:, None] * self.labels, keys) & (rows_bC >= 0)
        return excluded_bC

    def _check(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None) -> None:
        if queries_BE.dtype != np.float32 or queries_BE.ndim != 2 or queries_BE.shape[1] != self._exact.dim:
            raise QueryError(
                f"queries: expected float32 [B, {self._exact.dim}] from Augmentation.queries, "
                f"received {queries_BE.dtype} {list(queries_BE.shape)}"
            )
        if k < 1:
            raise QueryError(f"k: expected at least 1, received {k}")
        # One sum of squares is cheap and is not finite if any value is not; only then every value is checked.
        if not math.isfinite(np.vdot(queries_BE, queries_BE)) and not np.isfinite(queries_BE).all():
            first = np.isfinite(queries_BE).all(axis=1).argmin()
            raise QueryError(f"queries: expected finite values, received NaN or infinity in query {first}")
        if filters is not None and len(filters) != len(queries_BE):
            raise QueryError(f"filters: expected one per query, {len(queries_BE)}, received {len(filters)}")
        for query, filter_ in enumerate(filters or ()):
            if filter_ is not None:
                filter_.check(self.labels, query)
                if filter_.selection is not None and filter_.selection.labels != self.labels:
                    raise QueryError(
                        f"query {query}, filter selection: expected one of {self.labels} labels, received one of "
                        f"{filter_.selection.labels}"
                    )


def group_queries(filters: Sequence[Filter | None]) -> list[tuple[list[int], list[Filter]]]:
    """Group queries that can share a search: FAISS takes one selector for a batch.

    They have the same buckets and mask, and about the same number of excluded labels.
    """
    groups: dict[Hashable, tuple[list[int], list[Filter]]] = defaultdict(lambda: ([], []))
    for query, filter_ in enumerate(filter_ or NO_FILTER for filter_ in filters):
        key: Hashable = query
        if filter_.allow is None and len(filter_.excluded) <= _EXCLUDE_BY_OVERFETCH_UP_TO:
            buckets = ALL_BUCKETS if filter_.buckets is None else filter_.buckets
            key = buckets, filter_.selection, _next_power_of_two(len(filter_.excluded))
        queries, filters_b = groups[key]
        queries.append(query)
        filters_b.append(filter_)
    return list(groups.values())


def exclude_rows(eligible: Eligible, filters_b: Sequence[Filter]) -> tuple[Eligible, list[Int64]]:
    """Exclude one query's long list, or get short lists to drop after the search."""
    excluded_R = filters_b[0].excluded
    if len(excluded_R) > _EXCLUDE_BY_OVERFETCH_UP_TO:
        return eligible.without(excluded_R), []
    return eligible, [filter_.excluded for filter_ in filters_b] if len(excluded_R) else []


def overfetch(excludes: Sequence[Int64]) -> int:
    """Return how many more results leave k; all queries of a group round to the same number."""
    return _next_power_of_two(max(map(len, excludes)))


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
