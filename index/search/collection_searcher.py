"""Answer queries from a collection of a Milvus server, under any filter: what it knows of labels it filters by itself.

Legend: `L` labels, `B` queries, `b` some of them, `C` candidates, `K` results, `R` label rows, `E` coordinates of an
augmented row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Self

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index.manifests import Effort
from longtail.index.search.candidates import NO_ROW, no_results, top_k
from longtail.index.search.collection import AT_ONCE, MOST_RESULTS, WHOLE, Collection
from longtail.index.search.eligible import Eligible
from longtail.index.search.expressions import among, both, but, in_buckets, meeting
from longtail.index.search.faiss_index import probes_for
from longtail.index.search.filters import Filter, Selection
from longtail.index.search.searcher import Found, Searcher

_MARGIN = 100
"""Results fetched beyond those asked for, where hidden labels are dropped."""
_LEAST_VISIBLE, _MORE = 0.1, 4
"""Share of the labels that are not hidden, at the least, that is made up for at once; then times as many results."""
_PATIENT_SECONDS = 60.0
"""Of what a service measures before it answers by a release."""
_MOST_IN_EXPRESSION = 10_000
"""Label rows that an expression rules out one by one: some five microseconds each."""


class CollectionSearcher(Searcher):
    """Top k labels for augmented queries [METHODS §6], found by a Milvus server.

    Lists of labels are scored here, exactly, from the bundle's own rows, and so is what is asked for beyond Milvus's
    16,384 results. Everything else the server finds, by its index and by expressions over its fields.

    Args:
        bundle: the labels' rows, popularity and buckets.
        collection: has the same rows.
        effort: how many cells of the tail a search visits, wherever the dials stand.

    Attributes:
        labels: L.
        collection, effort: as given.
    """

    def __init__(self, bundle: Bundle, collection: Collection, effort: Effort) -> None:
        self._prepare(bundle)
        self.collection = collection
        self.effort = effort

    @property
    def problem(self) -> str | None:
        """Why the server does not answer now, as it said last; None: it does."""
        return self.collection.problem

    def probe(self) -> None:
        """As `Collection.probe`."""
        self.collection.probe()

    def patience(self) -> AbstractContextManager[None]:
        """While this lasts, no client waits for what is searched."""
        return self.collection.server.within(_PATIENT_SECONDS)

    def search(self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None) -> Found:
        """Find as `Searcher.search`, all of it within the server's seconds for every 256 queries."""
        seconds = self.collection.server.seconds * max(1, math.ceil(len(queries_BE) / AT_ONCE))
        with self.collection.server.within(seconds):
            return super().search(queries_BE, k, filters)

    def at(self, effort: Effort) -> Self:
        """Create a searcher over the same collection that searches as hard."""
        searcher = copy.copy(self)
        searcher.effort = effort
        return searcher

    def _run(self, searches: Sequence[Callable[[], Found]]) -> Iterable[Found]:
        if len(searches) == 1:
            return [searches[0]()]
        begun = [self.collection.pool.submit(copy_context().run, search) for search in searches]
        return [search.result() for search in begun]

    def _narrowed(self, eligible: Eligible, filter_: Filter) -> Eligible:
        """Get the labels of a set that pass a filter, and Milvus's expression for them."""
        parts = [eligible.expression]
        if filter_.allow is not None:
            parts.append(among(filter_.allowed(self._buckets_L)))
        else:
            if filter_.buckets is not None:
                parts.append(in_buckets(filter_.buckets))
            if filter_.selection is not None:
                parts.append(self._expression_of(filter_.selection))
        return eligible.where(filter_.mask(self._buckets_L), both(*parts))

    def _best(self, queries_bE: Float32, k: int, eligible: Eligible) -> Found:
        if not eligible.count:
            return no_results(len(queries_bE), k)
        share = eligible.share if self.collection.record.cells else 1.0
        visible = max(1 - len(eligible.but_R) / self.labels, _LEAST_VISIBLE)
        fetch = math.ceil(k / visible) + min(len(eligible.but_R), _MARGIN)
        if fetch > MOST_RESULTS:
            return self._exact.top(queries_bE, eligible.rows, k)
        return self._but(queries_bE, k, fetch, probes_for(self.effort, k, share), eligible)

    def _fill(self, query_1E: Float32, k: int, eligible: Eligible) -> Found:
        enough, fetch = min(k, eligible.count), k
        if len(eligible.but_R) <= _MOST_IN_EXPRESSION:
            expression = both(eligible.expression, but(eligible.but_R))
            found = self.collection.search(query_1E, min(k, MOST_RESULTS), WHOLE, expression)
            if np.count_nonzero(found[1] >= 0) == enough:
                return top_k([found[0]], [found[1]], k)
        else:
            while (fetch := _MORE * fetch) <= MOST_RESULTS:
                found = self._but(query_1E, k, fetch, WHOLE, eligible)
                if np.count_nonzero(found[1] >= 0) == enough:
                    return found
        return self._exact.top(query_1E, eligible.rows, k)

    def _but(self, queries_bE: Float32, k: int, fetch: int, probes: int, eligible: Eligible) -> Found:
        """The best k among so many of those that meet the expression."""
        scores_bC, rows_bC = self.collection.search(queries_bE, fetch, probes, eligible.expression)
        if not eligible.but_R.size:
            return scores_bC, rows_bC
        scores_bC[_is_among(rows_bC, eligible.but_R)] = -np.inf
        return top_k([scores_bC], [rows_bC], k)

    def _expression_of(self, selection: Selection) -> str:
        """By its conditions; of a mask alone, or of columns that the collection has not, by the fewer rows."""
        if selection.conditions is not None:
            expression = meeting(selection.conditions, self.collection.columns)
            if expression is not None:
                return expression
        mask_L = selection.mask
        if np.count_nonzero(mask_L) <= len(mask_L) // 2:
            return among(np.flatnonzero(mask_L))
        return but(np.flatnonzero(~mask_L))


def _is_among(rows_bC: Int64, rows_R: Int64) -> Bools:
    """Which rows stand among others, int64, ascending, at least one; −1 does not."""
    found_bC = np.minimum(np.searchsorted(rows_R, rows_bC), len(rows_R) - 1)
    among_bC: Bools = (rows_R[found_bC] == rows_bC) & (rows_bC != NO_ROW)
    return among_bC
