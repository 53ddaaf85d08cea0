"""Answer queries from the bands of an index: search band by band, merge by score, filter, fill up.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bundle import BUCKET_NAMES, Bundle
from bundle.augment import Float32
from index.band import Band
from index.errors import QueryError
from index.exact import ExactRows, Int64, no_results, top_k
from index.filters import Eligible, Filter
from index.manifest import Effort

_SCORE_EXACTLY_SHARE = 0.02
"""Share of the labels below which the eligible ones are scored one by one: quicker than a search that skips
the other 98 in a hundred, and exact."""
_EXCLUDE_BY_OVERFETCH_UP_TO = 1_000
"""Excluded labels that are fetched and dropped; longer lists become a selection of their own."""
_EVERYTHING = frozenset(range(len(BUCKET_NAMES)))


class Searcher:
    """Top k labels for augmented queries [METHODS §6], whatever the index and the filter.

    Concurrent searches are safe. A batch of one runs on the calling thread; larger batches use OpenMP's.

    Args:
        bundle: the labels' rows, popularity and buckets.
        bands: every label row stands in exactly one.
        effort: how hard approximate bands are searched.
    """

    def __init__(self, bundle: Bundle, bands: Sequence[Band], effort: Effort) -> None:
        self.labels = len(bundle.embeddings)
        self.bands = list(bands)
        self.effort = effort
        self._exact = ExactRows(bundle)
        self._buckets_L = bundle.labels.buckets
        self._eligible: dict[frozenset[int], Eligible] = {}
        for band in self.bands:
            band.prepare(effort)

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
        """
        self._check(queries_BE, k, filters)
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        groups: dict[tuple[frozenset[int], int], list[int]] = defaultdict(list)
        for query, filter_ in enumerate(filters or [None] * len(queries_BE)):
            if filter_ is not None and (filter_.allow is not None or _size(filter_) > _EXCLUDE_BY_OVERFETCH_UP_TO):
                eligible = Eligible(self.bands, filter_.mask(self._buckets_L))
                found = self._search(queries_BE[query : query + 1], k, 0, eligible, [None])
                scores_BK[query], rows_BK[query] = found[0][0], found[1][0]
            else:
                buckets = _EVERYTHING if filter_ is None or filter_.buckets is None else filter_.buckets
                # Queries with like numbers of excluded labels share one FAISS call.
                groups[buckets, _next_power_of_two(_size(filter_))].append(query)
        for (buckets, excluded), queries in groups.items():
            excludes = [None if filters is None else _exclude(filters[query]) for query in queries]
            picked = queries_BE if len(queries) == len(queries_BE) else queries_BE[queries]
            scores_BK[queries], rows_BK[queries] = self._search(
                picked, k, excluded, self._bucket_labels(buckets), excludes
            )
        return scores_BK, rows_BK

    def _search(
        self, queries_bE: Float32, k: int, excluded: int, eligible: Eligible, excludes: Sequence[Int64 | None]
    ) -> tuple[Float32, Int64]:
        """Queries that share their eligible labels, but for up to `excluded` of each query's own."""
        if eligible.count <= self.labels * _SCORE_EXACTLY_SHARE:
            scores_bC, rows_bC = self._exact.top(queries_bE, eligible.rows(), min(k + excluded, eligible.count))
        else:
            scores_bC, rows_bC = self._candidates(queries_bE, k + excluded, eligible)
        for query, exclude in enumerate(excludes):
            if exclude is not None:
                scores_bC[query, np.isin(rows_bC[query], exclude)] = -np.inf
        scores_bK, rows_bK = top_k([scores_bC], [rows_bC], k)
        for query in _short(rows_bK, min(k, eligible.count)):
            mask_L = eligible.mask_L
            exclude = excludes[query]
            if exclude is not None:
                mask_L = mask_L.copy()
                mask_L[exclude] = False
            if np.count_nonzero(mask_L) > np.count_nonzero(rows_bK[query] >= 0):
                found = self._exact.top(queries_bE[query : query + 1], np.flatnonzero(mask_L), k)
                scores_bK[query], rows_bK[query] = found[0][0], found[1][0]
        return scores_bK, rows_bK

    def _candidates(self, queries_bE: Float32, k: int, eligible: Eligible) -> tuple[Float32, Int64]:
        """Every band's best k with exact scores, side by side: [b, C]."""
        scores, rows = [], []
        for band, selection in eligible.parts:
            scores_bC, rows_bC = band.search(queries_bE, k, self.effort, selection)
            scores.append(self._exact.rescore(queries_bE, rows_bC) if band.lossy else scores_bC)
            rows.append(rows_bC)
        return np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)

    def _bucket_labels(self, buckets: frozenset[int]) -> Eligible:
        """Labels of some buckets; kept, for there are eight such sets."""
        eligible = self._eligible.get(buckets)
        if eligible is None:
            eligible = Eligible(self.bands, Filter(buckets=buckets).mask(self._buckets_L))
            self._eligible[buckets] = eligible
        return eligible

    def _check(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None) -> None:
        if queries_BE.dtype != np.float32 or queries_BE.ndim != 2 or queries_BE.shape[1] != self._exact.dim:
            raise QueryError(
                f"queries: expected float32 [B, {self._exact.dim}] from Augmentation.queries, "
                f"received {queries_BE.dtype} {list(queries_BE.shape)}"
            )
        if k < 1:
            raise QueryError(f"k: expected at least 1, received {k}")
        finite_B = np.isfinite(queries_BE).all(axis=1)
        if not finite_B.all():
            raise QueryError(f"queries: expected finite values, received NaN or infinity in query {finite_B.argmin()}")
        if filters is None:
            return
        if len(filters) != len(queries_BE):
            raise QueryError(f"filters: expected one per query, {len(queries_BE)}, received {len(filters)}")
        for query, filter_ in enumerate(filters):
            if filter_ is not None:
                filter_.check(self.labels, query)


def _short(rows_bK: Int64, expected: int) -> list[int]:
    """Queries with fewer than `expected` results."""
    return np.flatnonzero(rows_bK[:, expected - 1] < 0).tolist() if expected else []


def _exclude(filter_: Filter | None) -> Int64 | None:
    return None if filter_ is None or filter_.exclude is None or filter_.exclude.size == 0 else filter_.exclude


def _size(filter_: Filter | None) -> int:
    return 0 if filter_ is None or filter_.exclude is None else len(filter_.exclude)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
