"""Answer queries from the bands of an index: search them in one call or one by one, merge by score, filter, fill up.

Legend: `L` labels, `B` queries, `b` and `g` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates
of an augmented row.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Bools, Float32, Int32, Int64
from longtail.index.errors import QueryError
from longtail.index.manifests import Effort, EffortAt, FilteredEffort
from longtail.index.search.band import NEARLY_WHOLE, Band, probes_for
from longtail.index.search.candidates import kth_best, no_results, top_k
from longtail.index.search.efforts import DialEfforts
from longtail.index.search.eligible import EligibleLabels
from longtail.index.search.exact import ExactRows
from longtail.index.search.filters import Filter, Selection, check_rows, without_rows
from longtail.index.search.joined import JoinedBands

_SCORE_EXACTLY_SHARE = 0.02
"""Share of the labels below which the eligible ones are scored one by one: quicker than a search that skips
the other 98 in a hundred, and exact."""
_EXCLUDE_BY_OVERFETCH_UP_TO = 256
"""Excluded labels that are fetched and dropped, in one FAISS call for many queries; longer lists become a set
of eligible labels of their own, which costs less than to fetch so many."""
_HARDER = 8
"""Times as many cells, where those of a query hold too few labels."""
_EVERYTHING = frozenset(range(len(BUCKET_NAMES)))
_OfSelection = WeakKeyDictionary[Selection, dict[frozenset[int], EligibleLabels]]


class Searcher:
    """Top k labels for augmented queries [METHODS §6], whatever the index and the filter.

    Concurrent searches are safe. A batch of one runs on the calling thread, as far as NumPy's BLAS does; larger
    batches use OpenMP's.

    Args:
        bundle: the labels' rows, popularity and buckets.
        bands: every label row stands in exactly one.
        effort: how hard approximate bands are searched, wherever the dials stand.
        filtered: how much harder, where only a share of the labels may be answered.
        efforts: the less that suffices at each place on the dials, where nearly all labels may be answered.
        positions_L: of `eligible.positions_of` the bands' rows; None: made when they are first asked for.
        heads: how much of an exact head searches `at` an effort may have scored, besides those of `efforts`.

    Attributes:
        labels: L.
        efforts: how hard a query is searched for.

    Example:
        An opened release has one; every query may have a λ and a filter of its own.

        >>> from longtail.index import Filter, Releases, build
        >>> manifest = build("runs/model", "releases", name="first")
        >>> release = Releases("releases").open("first")
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
        bands: Sequence[Band],
        effort: Effort,
        filtered: Sequence[FilteredEffort] = (),
        efforts: Sequence[EffortAt] = (),
        positions_L: Int32 | None = None,
        heads: Sequence[int] = (),
    ) -> None:
        self.labels = len(bundle.embeddings)
        self.bands = list(bands)
        self.effort = effort
        self.efforts = DialEfforts(bundle, effort, efforts)
        self.filtered = sorted(filtered, key=lambda effort: effort.selectivity)
        self._exact = ExactRows(bundle)
        self._buckets_L = bundle.labels.buckets
        self._every = EligibleLabels.every([band.rows_N for band in self.bands], positions_L)
        self._hidden_R: Int64 = np.empty(0, np.int64)
        self._of_buckets: dict[frozenset[int], EligibleLabels] = {}
        self._visible_of_buckets: dict[frozenset[int], EligibleLabels] = {}
        self._visible_of_selection: _OfSelection = WeakKeyDictionary()
        self._joined: JoinedBands | None = None
        if JoinedBands.fits(self.bands):
            by_popularity_N = np.argsort(-bundle.labels.log_pi[self.bands[0].rows_N], kind="stable")
            known = [at.effort.head for at in efforts if at.effort.head is not None]
            self._joined = JoinedBands(self.bands, by_popularity_N, [*heads, *known])
        for band in self.bands:
            band.prepare(effort)

    def at(self, effort: Effort) -> Searcher:
        """A searcher over the same bands that searches for every query as hard, where nearly all may be answered.

        A factory string's index takes no effort per search: it stays as it is.
        """
        searcher = copy.copy(self)
        searcher.efforts = self.efforts.all_at(effort)
        return searcher

    def without(self, rows_R: Int64) -> Searcher:
        """A searcher over the same bands that never answers some label rows, nor those that this one hides.

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
        """
        self._check(queries_BE, k, filters)
        if filters is None and len(queries_BE):
            return self._search(queries_BE, k, self._bucket_labels(_EVERYTHING))
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        groups: dict[tuple[frozenset[int], Selection | None, int], list[int]] = defaultdict(list)
        for query, filter_ in enumerate(filters or ()):
            if filter_ is not None and (filter_.allow is not None or _size(filter_) > _EXCLUDE_BY_OVERFETCH_UP_TO):
                found = self._search_alone(queries_BE[query : query + 1], k, filter_)
                scores_BK[query], rows_BK[query] = found[0][0], found[1][0]
            else:
                # Queries with like numbers of excluded labels share one FAISS call.
                selection = None if filter_ is None else filter_.selection
                groups[_buckets(filter_), selection, _next_power_of_two(_size(filter_))].append(query)
        for (buckets, selection, excluded), queries in groups.items():
            excludes = [_exclude(filters[query]) for query in queries] if excluded and filters else None
            picked = queries_BE if len(queries) == len(queries_BE) else queries_BE[queries]
            scores_BK[queries], rows_BK[queries] = self._search(
                picked, k, self._visible(buckets, selection), excluded, excludes
            )
        return scores_BK, rows_BK

    def found(self, queries_BE: Float32, k: int) -> tuple[Float32, Int64]:
        """What the index finds by itself: as `search`, but a query that ends up short is not answered again exactly.

        Args:
            queries_BE: float32 [B, E], B >= 1.
            k: results per query, >= 1.
        """
        return self._by_effort(queries_BE, k, self._bucket_labels(_EVERYTHING), 1.0)

    def _search_alone(self, query_1E: Float32, k: int, filter_: Filter) -> tuple[Float32, Int64]:
        """One query whose eligible labels are its own."""
        if filter_.allow is None:
            visible = self._visible(_buckets(filter_), filter_.selection)
            return self._search(query_1E, k, visible.without(_exclude(filter_)))
        if len(filter_.allow) <= self.labels * _SCORE_EXACTLY_SHARE:
            rows_R = without_rows(filter_.allowed(self._buckets_L), self._hidden_R)
            return self._exact.top(query_1E, rows_R, k)
        visible = self._bucket_labels(_EVERYTHING)
        return self._search(query_1E, k, visible.where(filter_.mask(self._buckets_L)))

    def _search(
        self,
        queries_bE: Float32,
        k: int,
        eligible: EligibleLabels,
        excluded: int = 0,
        excludes: Sequence[Int64] | None = None,
    ) -> tuple[Float32, Int64]:
        """Queries that share their eligible labels, but for up to `excluded` of each query's own."""
        if not eligible.count:
            return no_results(len(queries_bE), k)
        share = eligible.count / self.labels
        measured = self._measured_about(share)
        exactly = share <= _SCORE_EXACTLY_SHARE or any(effort.exact for effort in measured)
        if exactly and not self._is_exact(eligible):
            scores_bK, rows_bK = self._exact.top(queries_bE, eligible.rows, k + excluded)
        else:
            boost = max((effort.boost for effort in measured), default=1.0)
            scores_bK, rows_bK = self._by_effort(queries_bE, k + excluded, eligible, boost)
        if excludes is not None:
            scores_bK[self._is_excluded(rows_bK, excludes)] = -np.inf
            scores_bK, rows_bK = top_k([scores_bK], [rows_bK], k)
        short_b = rows_bK[:, min(k, eligible.count) - 1] < 0
        if short_b.any():
            for query in np.flatnonzero(short_b).tolist():
                own = eligible if excludes is None else eligible.without(excludes[query])
                if own.count > np.count_nonzero(rows_bK[query] >= 0):
                    found = self._filled(queries_bE[query : query + 1], k, own)
                    scores_bK[query], rows_bK[query] = found[0][0], found[1][0]
        return scores_bK, rows_bK

    def _filled(self, query_1E: Float32, k: int, eligible: EligibleLabels) -> tuple[Float32, Int64]:
        """A query whose cells hold fewer than k: by ever more cells and the whole head, by every label if need be."""
        band = self.bands[-1]
        if band.has_cells and eligible.count >= NEARLY_WHOLE * self.labels:
            effort = self.effort
            while effort.probes < band.index.nlist:
                effort = Effort(probes=_HARDER * effort.probes, refine=effort.refine)
                scores_1K, rows_1K = self._candidates(query_1E, k, effort, eligible, 1.0)
                if rows_1K[0, min(k, eligible.count) - 1] >= 0:
                    return scores_1K, rows_1K
        return self._exact.top(query_1E, eligible.rows, k)

    def _measured_about(self, share: float) -> list[FilteredEffort]:
        """The efforts of the shares next to this one, above and below; none where nearly all labels are eligible."""
        if share >= NEARLY_WHOLE:
            return []
        place = bisect_left(self.filtered, share, key=lambda effort: effort.selectivity)
        return self.filtered[max(0, place - 1) : place + 1]

    def _by_effort(self, queries_bE: Float32, k: int, eligible: EligibleLabels, boost: float) -> tuple[Float32, Int64]:
        """The best k of every query with exact scores, each searched for as hard as its place takes."""
        if eligible.count < NEARLY_WHOLE * self.labels:
            return self._candidates(queries_bE, k, self.effort, eligible, boost)
        groups = self.efforts.groups(queries_bE, k)
        if len(groups) == 1:
            return self._candidates(queries_bE, k, groups[0][0], eligible, boost)
        scores_bK, rows_bK = no_results(len(queries_bE), k)
        for effort, queries in groups:
            scores_bK[queries], rows_bK[queries] = self._candidates(queries_bE[queries], k, effort, eligible, boost)
        return scores_bK, rows_bK

    def _candidates(
        self, queries_bE: Float32, k: int, effort: Effort, eligible: EligibleLabels, boost: float
    ) -> tuple[Float32, Int64]:
        """The best k of all bands with exact scores; −inf and −1 beyond what they find."""
        if self._joined is not None and eligible.count >= NEARLY_WHOLE * self.labels:
            probes = probes_for(effort, k, eligible.count / self.labels)
            return self._joined.search(queries_bE, k, probes, eligible.joined, effort.head)
        whole = [part for part in eligible.parts if self.bands[part[0]].few(len(queries_bE), part[1])]
        others = [part for part in eligible.parts if part not in whole]
        if not others:
            whole, others = [], whole
        scores, rows = [], []
        for place, ids in others:
            band = self.bands[place]
            scores_bC, rows_bC = band.search(queries_bE, k, effort, ids, boost)
            scores.append(self._exact.rescore(queries_bE, rows_bC) if band.lossy else scores_bC)
            rows.append(rows_bC)
        ordered = len(others) == 1 and self.bands[others[0][0]].ordered
        for place, ids in whole:
            # Of equal scores the head's come first, as its band does.
            scores_bC, rows_bC = self.bands[place].above(queries_bE, kth_best(scores[-1], k), ids)
            if rows_bC.size:
                scores.insert(0, scores_bC)
                rows.insert(0, rows_bC)
        if ordered and len(rows) == 1 and rows[0].shape[1] == k:
            return scores[0], rows[0]
        return top_k(scores, rows, k)

    def _is_exact(self, eligible: EligibleLabels) -> bool:
        """Whether every band that holds some of the labels is searched exactly."""
        return all(self.bands[place].kind == "flat" for place, _ in eligible.parts)

    def _is_excluded(self, rows_bC: Int64, excludes: Sequence[Int64]) -> Bools:
        """Which candidates stand in their query's own list, bool [b, C]."""
        places = [np.full(len(rows), query * self.labels) for query, rows in enumerate(excludes)]
        keys = np.sort(np.concatenate(places) + np.concatenate(excludes, dtype=np.int64, casting="same_kind"))
        keys_bC = rows_bC + np.arange(len(rows_bC))[:, None] * self.labels
        found_bC = np.minimum(np.searchsorted(keys, keys_bC), len(keys) - 1)
        excluded_bC: Bools = (keys[found_bC] == keys_bC) & (rows_bC >= 0)
        return excluded_bC

    def _visible(self, buckets: frozenset[int], selection: Selection | None) -> EligibleLabels:
        """Labels of some buckets and a selection that are not hidden; kept as long as the selection lives."""
        if selection is None:
            return self._bucket_labels(buckets)
        of_buckets = self._visible_of_selection.setdefault(selection, {})
        eligible = of_buckets.get(buckets)
        if eligible is None:
            eligible = of_buckets[buckets] = self._bucket_labels(buckets).where(selection.mask)
        return eligible

    def _bucket_labels(self, buckets: frozenset[int]) -> EligibleLabels:
        """Labels of some buckets that are not hidden; kept, for there are sixteen such sets."""
        eligible = self._visible_of_buckets.get(buckets)
        if eligible is None:
            every = self._of_buckets.get(buckets)
            if every is None:
                every = self._of_buckets[buckets] = self._every.where(Filter(buckets=buckets).mask(self._buckets_L))
            eligible = self._visible_of_buckets[buckets] = every.without(self._hidden_R)
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
    return _EVERYTHING if filter_ is None or filter_.buckets is None else filter_.buckets


def _exclude(filter_: Filter | None) -> Int64:
    return np.empty(0, np.int64) if filter_ is None or filter_.exclude is None else filter_.exclude


def _size(filter_: Filter | None) -> int:
    return 0 if filter_ is None or filter_.exclude is None else len(filter_.exclude)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
