"""Inverted lists: which labels a list holds, what a query finds in the lists it visits, and where they are too few."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import ExactRows, IndexSpec, Searcher
from longtail.index.building.training import make_index, order_by_max_score
from longtail.index.manifests import SearchParams
from longtail.index.recall import Calibration
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle

LABELS, HEAD = 5_003, 500
"""The last byte of a set of rows is not full."""


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=LABELS, dim=16, queries=20)


@pytest.fixture(scope="module")
def order(bundle: Bundle) -> Int64:
    return order_by_max_score(bundle, bundle.rows(), Calibration(bundle, bundle.rows()))


@pytest.fixture(scope="module")
def index(bundle: Bundle) -> FaissIndex:
    return make_index(IndexSpec("ivf_flat"), bundle, bundle.rows(), Calibration(bundle, bundle.rows()))


@pytest.fixture(scope="module")
def queries(bundle: Bundle) -> Float32:
    picked = bundle.calibration_queries[:8]
    return np.concatenate([bundle.augmentation.queries(picked, value) for value in (-1.0, 0.0, 0.5, 1.0, 2.0)])


@pytest.mark.parametrize("hidden", [np.empty(0, np.int64), np.arange(0, LABELS, 60)])
@pytest.mark.parametrize(
    ("nprobe", "head"), [(1, False), (4, False), (1, True), (4, True), (200, True), (10_000, True)]
)
def test_the_best_labels_of_visited_lists_are_found(
    bundle: Bundle, index: FaissIndex, queries: Float32, nprobe: int, head: bool, hidden: Int64
) -> None:
    """A list holds the rows that are nearest to its centroid; a query visits those of the largest product."""
    searcher = (
        Searcher(bundle, index, SearchParams()).with_params(SearchParams(nprobe=nprobe, head=head)).without(hidden)
    )
    scores_BK, rows_BK = searcher.search_index(queries, 50)
    rows_LE, centroids_CE = bundle.rows(), index.centroids
    expected_BL = queries @ rows_LE.T
    lists_L = ((rows_LE[:, None] - centroids_CE) ** 2).sum(axis=2).argmin(axis=1)
    assert np.array_equal(lists_L, index.lists)
    visited_BP = np.argsort(-(queries @ centroids_CE.T), axis=1)[:, :nprobe]
    of_head = np.arange(len(centroids_CE) - index.head_lists, len(centroids_CE)) if head else []
    for query, visited in enumerate(visited_BP):
        expected_BL[query, ~np.isin(lists_L, [*visited, *of_head])] = -np.inf
    expected_BL[:, hidden] = -np.inf
    expected_rows = np.argsort(-expected_BL, axis=1, kind="stable")[:, :50]
    expected_BK = np.take_along_axis(expected_BL, expected_rows, axis=1)
    expected_rows[expected_BK == -np.inf] = -1
    np.testing.assert_allclose(scores_BK, expected_BK, rtol=1e-5, atol=1e-6)
    assert (rows_BK == expected_rows).mean() > 0.999  # of equal scores either comes first
    for query in range(0, len(queries), 7):
        alone = searcher.search_index(queries[query : query + 1], 50)
        np.testing.assert_allclose(alone[0][0], scores_BK[query], rtol=1e-5, atol=1e-6)


def test_labels_of_largest_max_score_have_separate_lists(index: FaissIndex, order: Int64) -> None:
    """A list of the head has about a hundred labels of the head and few others, which are nearest to it."""
    lists = len(index.centroids)
    in_head_L = np.zeros(LABELS, np.bool_)
    in_head_L[order[:HEAD]] = True
    head_C = np.bincount(index.lists[in_head_L], minlength=lists)
    share_C = head_C / np.maximum(np.bincount(index.lists, minlength=lists), 1)
    assert index.head_lists == HEAD // 100
    head_shares = share_C[lists - HEAD // 100 :]
    assert head_shares.mean() > 0.8
    assert share_C[: lists - HEAD // 100].mean() < 0.05


def test_short_answers_visit_more_lists_before_every_label(
    bundle: Bundle, index: FaissIndex, queries: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = Searcher(bundle, index, SearchParams(nprobe=1))
    short = (searcher.search_index(queries, 100)[1] < 0).any(axis=1)
    assert short.any()
    monkeypatch.setattr(ExactRows, "top", lambda *_: pytest.fail("scored every label"))
    scores, rows = searcher.search(queries, 100)
    assert (rows >= 0).all()
    maximum = searcher.with_params(SearchParams(nprobe=8)).search_index(queries, 100)
    enough = short & (maximum[1] >= 0).all(axis=1)
    np.testing.assert_allclose(scores[enough], maximum[0][enough], rtol=1e-5, atol=1e-6)
    assert (rows[enough] == maximum[1][enough]).mean() > 0.99
