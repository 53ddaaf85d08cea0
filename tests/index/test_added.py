"""An index in memory of labels that no release has: it recalls what a build's would, and holds rows as they are."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.index_recall import synthetic_bundle
from longtail.index import Filter, Searcher, index_in_memory

LABELS = 4_000
BUNDLE = synthetic_bundle(LABELS, dim=16)


@pytest.fixture(scope="module")
def searcher() -> Searcher:
    return index_in_memory(BUNDLE)


@pytest.mark.parametrize("k", [10, 100])
@pytest.mark.parametrize("bias_removal", [0.0, 0.5, 1.0])
def test_it_recalls_what_a_build_looks_for(searcher: Searcher, bias_removal: float, k: int) -> None:
    """Of the queries that it was measured with, a quarter of the bundle's, and of the others."""
    queries = BUNDLE.augmentation.queries(BUNDLE.calibration_queries, bias_removal)
    scores, rows = searcher.search(queries, k)
    exact = queries @ BUNDLE.rows().T

    np.testing.assert_allclose(scores, np.take_along_axis(exact, rows, 1), rtol=1e-4, atol=1e-6)
    assert (scores >= np.sort(exact, axis=1)[:, [-k]] - 1e-5).mean() >= 0.98
    assert searcher.bands[0].index.nlist == 2 * 63


def test_short_lists_look_into_fewer_cells(searcher: Searcher) -> None:
    query = BUNDLE.augmentation.queries(BUNDLE.calibration_queries[:1], 0.5)[0]

    assert searcher.efforts.of(query, 10).probes <= searcher.efforts.of(query, 100).probes <= searcher.effort.probes
    assert searcher.efforts.of(query, 10).probes < 126


def test_it_hides_and_filters(searcher: Searcher) -> None:
    queries = BUNDLE.augmentation.queries(BUNDLE.calibration_queries[:5], 0.5)
    best = searcher.search(queries, 3)[1]
    found = searcher.without(best.ravel()).search(queries, 3, [Filter(buckets=frozenset({2}))] * 5)[1]

    assert not set(found.ravel()) & set(best.ravel())
    assert (BUNDLE.labels.buckets[found] == 2).all()
