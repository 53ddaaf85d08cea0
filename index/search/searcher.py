"""Answer queries from the bands of an index: search them in one call or one by one, merge by score, filter, fill up.

Legend: `L` labels, `B` queries, `b` and `g` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates
of an augmented row.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.manifests import Effort, EffortAt, FilteredEffort
from longtail.index.search.band import NEARLY_WHOLE, Band, probes_for
from longtail.index.search.candidates import kth_best, no_results, top_k
from longtail.index.search.efforts import DialEfforts
from longtail.index.search.eligible import EligibleLabels
from longtail.index.search.filtering import EVERYTHING, SCORE_EXACTLY_SHARE, FilteringSearcher
from longtail.index.search.filters import Filter, Selection
from longtail.index.search.joined import JoinedBands

_HARDER = 8
"""Times as many cells, where those of a query hold too few labels."""


class Searcher(FilteringSearcher[EligibleLabels]):
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
        super().__init__(bundle)
        self.bands = list(bands)
        self.effort = effort
        self.efforts = DialEfforts(bundle, effort, efforts)
        self.filtered = sorted(filtered, key=lambda effort: effort.selectivity)
        self._every = EligibleLabels.every([band.rows_N for band in self.bands], positions_L)
        self._of_buckets: dict[frozenset[int], EligibleLabels] = {}
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

    def found(self, queries_BE: Float32, k: int) -> tuple[Float32, Int64]:
        """As `FilteringSearcher.found`."""
        return self._by_effort(queries_BE, k, self._bucket_labels(EVERYTHING), 1.0)

    def _every_of(self, buckets: frozenset[int]) -> EligibleLabels:
        every = self._of_buckets.get(buckets)
        if every is None:
            every = self._of_buckets[buckets] = self._every.where(Filter(buckets=buckets).mask(self._buckets_L))
        return every

    def _selected(self, eligible: EligibleLabels, selection: Selection) -> EligibleLabels:
        return eligible.where(selection.mask)

    def _allowed(self, eligible: EligibleLabels, filter_: Filter) -> EligibleLabels:
        return eligible.where(filter_.mask(self._buckets_L))

    def _best(self, queries_bE: Float32, k: int, eligible: EligibleLabels) -> tuple[Float32, Int64]:
        if not eligible.count:
            return no_results(len(queries_bE), k)
        share = eligible.count / self.labels
        measured = self._measured_about(share)
        exactly = share <= SCORE_EXACTLY_SHARE or any(effort.exact for effort in measured)
        if exactly and not self._is_exact(eligible):
            return self._exact.top(queries_bE, eligible.rows, k)
        return self._by_effort(queries_bE, k, eligible, max((effort.boost for effort in measured), default=1.0))

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
