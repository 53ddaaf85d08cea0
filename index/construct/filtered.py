"""Recall under filters, measured on selections of labels like those that filters make, and the effort that it takes.

Of every selectivity, a half to a thousandth of the labels, three selections are measured: random labels, as of a column
that has nothing to do with taste; the labels nearest to one query, as of a category, which that query has to itself and
the others are far from; and the least popular. Where recall, of all labels or of one bucket's, is below the floor and
half the way from there to 1, for other selections are not those measured, the search looks harder at this selectivity,
and scores every eligible label in the end.

Legend: `L` labels, `Q` queries, `R` selected labels, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import faiss
import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.construct.recall import TOLERANCE, Progress
from longtail.index.construct.spec import IndexSpec
from longtail.index.manifests import Effort, FilteredEffort, FilteredRecall, FilteredSearch
from longtail.index.search.exact import ExactRows
from longtail.index.search.faiss_index import MEASURED_DEPTH, FaissIndex
from longtail.index.search.filters import Filter, Selection
from longtail.index.search.searcher import Searcher

SELECTIVITIES = (0.5, 0.1, 0.01, 0.001)
"""Shares of the labels that recall is measured at."""
_DEPTHS = (10, MEASURED_DEPTH)
"""Results per query."""
_BOOSTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_QUERIES = 40
"""Calibration queries, each at up to three λ."""
_ENOUGH = 100
"""Labels of a bucket in the exact answers from which on its recall is told."""

_Name = Literal["random", "near", "rare"]


def tune_filtered(
    bundle: Bundle, rows_LE: Float32, index: FaissIndex, effort: Effort, spec: IndexSpec, progress: Progress
) -> FilteredSearch:
    """Measure recall under filters over augmented rows, float32 [L, E], and look harder where it is below the floor."""
    trial = FilteredTrial(bundle, rows_LE)
    efforts: list[FilteredEffort] = []
    recalls: list[FilteredRecall] = []
    for selectivity in SELECTIVITIES:
        selections = list(trial.selections(selectivity))
        for chosen in _efforts(selectivity):
            searcher = Searcher(bundle, index, effort, [chosen])
            measured = [at for selection in selections for at in trial.measure(searcher, selectivity, *selection)]
            lowest = min(recall.lowest for recall in measured)
            progress(f"{selectivity:.1%} of the labels, boost {chosen.boost:g}: lowest recall {lowest:.4f}")
            if lowest >= (1 + spec.recall_floor) / 2:
                break
        efforts.append(chosen)
        recalls += measured
    return FilteredSearch(queries=len(trial.queries_QE), efforts=efforts, recall=recalls)


class FilteredTrial:
    """Queries and selections of augmented rows, float32 [L, E], that every effort is measured with."""

    def __init__(self, bundle: Bundle, rows_LE: Float32) -> None:
        self.bundle = bundle
        self._rows_LE = rows_LE
        self._buckets_L = bundle.labels.buckets
        self._exact = ExactRows(bundle)
        self._by_popularity_L = np.argsort(bundle.labels.log_pi, kind="stable")
        available = bundle.calibration_queries
        picked = np.unique(np.linspace(0, len(available) - 1, min(_QUERIES, len(available))).astype(np.int64))
        queries_CD = np.asarray(available[picked])
        dial = bundle.manifest.bias_removal
        places = sorted({min(max(value, dial.minimum), dial.maximum) for value in (0.0, dial.default, 1.0)})
        if bundle.proposal is not None:
            places = [0.0]
        self.queries_QE = np.concatenate([bundle.augmentation.queries(queries_CD, place) for place in places])
        self._one_E = bundle.augmentation.queries(queries_CD[:1], places[0])[0]

    def selections(self, selectivity: float) -> Iterator[tuple[_Name, Int64]]:
        """Rows of the selections of so many labels, int64 [R], ascending."""
        labels = len(self._rows_LE)
        count = max(1, round(selectivity * labels))
        products_L = self._rows_LE @ self._one_E
        yield "random", np.sort(np.random.default_rng(count).choice(labels, count, replace=False))
        yield "near", np.sort(np.argpartition(-products_L, count - 1)[:count])
        yield "rare", np.sort(self._by_popularity_L[:count])

    def measure(self, searcher: Searcher, selectivity: float, name: _Name, rows_R: Int64) -> list[FilteredRecall]:
        """Recall of the few and of the many best of some rows, int64 [R], by the scores that they reach: ties count."""
        mask_L = np.zeros(len(self._rows_LE), np.bool_)
        mask_L[rows_R] = True
        filters = [Filter(selection=Selection(mask_L))] * len(self.queries_QE)
        selected_RE = np.ascontiguousarray(self._rows_LE[rows_R])
        best = faiss.knn(self.queries_QE, selected_RE, min(_DEPTHS[-1], len(rows_R)), metric=faiss.METRIC_INNER_PRODUCT)
        recalls = []
        for k in sorted({min(depth, len(rows_R)) for depth in _DEPTHS}):
            scores_QK, expected_QK = best[0][:, :k], self._buckets_L[rows_R[best[1][:, :k]]]
            least_Q = scores_QK[:, -1] - TOLERANCE * np.abs(scores_QK).max(axis=1)
            _, found_QK = searcher.search(self.queries_QE, k, filters)
            hits_QK = self._exact.rescore(self.queries_QE, found_QK) >= least_Q[:, None]
            given_QK = self._buckets_L[found_QK]
            buckets = {}
            for bucket, of_bucket in enumerate(BUCKET_NAMES):
                expected_Q = np.count_nonzero(expected_QK == bucket, axis=1)
                hits_Q = np.minimum(np.count_nonzero(hits_QK & (given_QK == bucket), axis=1), expected_Q)
                if expected_Q.sum() >= _ENOUGH:
                    buckets[of_bucket] = round(float(hits_Q.sum() / expected_Q.sum()), 6)
            recall = round(float(hits_QK.mean()), 6)
            recalls.append(FilteredRecall(selectivity=selectivity, selection=name, k=k, recall=recall, buckets=buckets))
        return recalls


def _efforts(selectivity: float) -> Iterator[FilteredEffort]:
    """Efforts to try, cheapest first; the last one finds everything."""
    for boost in _BOOSTS:
        yield FilteredEffort(selectivity=selectivity, boost=boost)
    yield FilteredEffort(selectivity=selectivity, boost=_BOOSTS[-1], exact=True)
