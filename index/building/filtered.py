"""Measure recall under filters on typical selections, and find the settings that filters need.

At every selectivity, from a half to a thousandth of the labels, three selections are measured: random labels, like a
column unrelated to taste; the labels nearest to one query, like a category that one query matches and the others are
far from; and the least popular labels. The goal is half way between the recall floor and 1, because filters in
production select other labels than the measured ones. Where recall of all labels, or of one bucket, misses the goal,
the search at this selectivity visits more lists, and finally scores every eligible label.

Legend: `L` labels, `Q` queries, `R` selected labels, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import faiss
import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.manifests import FilteredParams, FilteredRecall, FilteredSearch
from longtail.index.recall import TOLERANCE, Progress, spread_rows
from longtail.index.search.exact import ExactRows
from longtail.index.search.faiss_index import MEASURED_DEPTH
from longtail.index.search.filters import Filter, FilterMask
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec

SELECTIVITIES = (0.5, 0.1, 0.01, 0.001)
"""Shares of eligible labels at which recall is measured."""
_DEPTHS = (10, MEASURED_DEPTH)
"""Results per query at which recall is measured."""
_BOOSTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_QUERIES = 40
"""Calibration queries, each at up to three λ."""
_ENOUGH = 100
"""Fewest labels of a bucket among the exact answers for which the bucket's recall is reported."""

_Name = Literal["random", "near", "rare"]


def tune_filtered(
    bundle: Bundle, rows_LE: Float32, searcher: Searcher, spec: IndexSpec, progress: Progress
) -> FilteredSearch:
    """Measure recall of a searcher under filters, and choose the settings; rows are augmented, float32 [L, E]."""
    trial = FilteredTrial(bundle, rows_LE)
    chosen: list[FilteredParams] = []
    recall: list[FilteredRecall] = []
    for selectivity in SELECTIVITIES:
        selections = list(trial.selections(selectivity))
        for params in _list_params(selectivity):
            searcher.filtered = [params]
            measured = [point for rows in selections for point in trial.measure(searcher, selectivity, *rows)]
            lowest = min(point.lowest for point in measured)
            progress(f"{selectivity:.1%} of the labels, boost {params.boost:g}: lowest recall {lowest:.4f}")
            if lowest >= (1 + spec.recall_floor) / 2:
                break
        chosen.append(params)
        recall += measured
    return FilteredSearch(queries=len(trial.queries_QE), params=chosen, recall=recall)


class FilteredTrial:
    """Queries and selections of augmented rows, float32 [L, E], with which all settings are measured."""

    def __init__(self, bundle: Bundle, rows_LE: Float32) -> None:
        self.bundle = bundle
        self._rows_LE = rows_LE
        self._buckets_L = bundle.labels.buckets
        self._exact = ExactRows(bundle)
        self._by_popularity_L = np.argsort(bundle.labels.log_pi, kind="stable")
        available = bundle.calibration_queries
        queries_CD = np.asarray(available[spread_rows(len(available), _QUERIES)])
        dial = bundle.manifest.bias_removal
        lambdas = sorted({min(max(value, dial.minimum), dial.maximum) for value in (0.0, dial.default, 1.0)})
        if bundle.proposal is not None:  # with a tree p_n(y|x), λ is not a coordinate of the rows
            lambdas = [0.0]
        queries, defaults_P = bundle.augmentation.queries, bundle.priors.defaults
        self.queries_QE = np.concatenate([queries(queries_CD, value, 0.0, defaults_P) for value in lambdas])
        self._one_E = queries(queries_CD[:1], lambdas[0], 0.0, defaults_P)[0]

    def selections(self, selectivity: float) -> Iterator[tuple[_Name, Int64]]:
        """Yield the name and the rows, int64 [R], ascending, of each selection at a selectivity."""
        labels = len(self._rows_LE)
        count = max(1, round(selectivity * labels))
        products_L = self._rows_LE @ self._one_E
        # Seeded, so that two builds measure the same labels.
        yield "random", np.sort(np.random.default_rng(count).choice(labels, count, replace=False))
        yield "near", np.sort(np.argpartition(-products_L, count - 1)[:count])
        yield "rare", np.sort(self._by_popularity_L[:count])

    def measure(self, searcher: Searcher, selectivity: float, name: _Name, rows_R: Int64) -> list[FilteredRecall]:
        """Measure recall of the 10 and 100 best of some rows, int64 [R]; a label that ties counts."""
        mask_L = np.zeros(len(self._rows_LE), np.bool_)
        mask_L[rows_R] = True
        filters = [Filter(selection=FilterMask(mask_L))] * len(self.queries_QE)
        selected_RE = np.ascontiguousarray(self._rows_LE[rows_R])
        best = faiss.knn(self.queries_QE, selected_RE, min(_DEPTHS[-1], len(rows_R)), metric=faiss.METRIC_INNER_PRODUCT)
        recalls = []
        for k in sorted({min(depth, len(rows_R)) for depth in _DEPTHS}):
            scores_QK, expected_QK = best[0][:, :k], self._buckets_L[rows_R[best[1][:, :k]]]
            least_Q = scores_QK[:, -1] - TOLERANCE * np.abs(scores_QK).max(axis=1)
            _, rows_QK = searcher.search(self.queries_QE, k, filters)
            hits_QK = self._exact.rescore(self.queries_QE, rows_QK) >= least_Q[:, None]
            buckets_QK = self._buckets_L[rows_QK]
            buckets = {}
            for bucket, of_bucket in enumerate(BUCKET_NAMES):
                expected_Q = np.count_nonzero(expected_QK == bucket, axis=1)
                hits_Q = np.minimum(np.count_nonzero(hits_QK & (buckets_QK == bucket), axis=1), expected_Q)
                if expected_Q.sum() >= _ENOUGH:
                    buckets[of_bucket] = round(float(hits_Q.sum() / expected_Q.sum()), 6)
            recall = round(float(hits_QK.mean()), 6)
            recalls.append(FilteredRecall(selectivity=selectivity, selection=name, k=k, recall=recall, buckets=buckets))
        return recalls


def _list_params(selectivity: float) -> Iterator[FilteredParams]:
    """Yield the settings to try, cheapest first; the last settings score every eligible label."""
    for boost in _BOOSTS:
        yield FilteredParams(selectivity=selectivity, boost=boost)
    yield FilteredParams(selectivity=selectivity, boost=_BOOSTS[-1], exact=True)
