"""Top-k merging and exact scoring, worked by hand."""

from __future__ import annotations

import numpy as np

from longtail.index import ExactRows
from longtail.index.search.candidates import top_k
from tests.bundles import make_bundle

INF = np.inf


def test_top_k_merges_two_bands_by_score() -> None:
    head_scores, head_rows = np.array([[3.0, 1.0]], np.float32), np.array([[7, 8]])
    tail_scores, tail_rows = np.array([[2.0, 0.5]], np.float32), np.array([[1, 2]])
    scores, rows = top_k([head_scores, tail_scores], [head_rows, tail_rows], 3)
    assert scores.tolist() == [[3.0, 2.0, 1.0]]
    assert rows.tolist() == [[7, 1, 8]]


def test_top_k_of_many_candidates_equals_a_sort() -> None:
    scores = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    best_scores, rows = top_k([scores], [np.broadcast_to(np.arange(1000), scores.shape)], 10)
    assert np.array_equal(best_scores, -np.sort(-scores, axis=1)[:, :10])
    assert np.array_equal(np.take_along_axis(scores, rows, 1), best_scores)


def test_rows_and_scores_come_from_the_bundle() -> None:
    bundle = make_bundle(labels=30, bias=True)
    exact = ExactRows(bundle)
    queries = bundle.augmentation.queries(bundle.calibration_queries[:2], 0.5)
    scores = exact.rescore(queries, np.array([[4, -1], [29, 0]]))
    expected = queries @ bundle.rows().T
    assert scores[0, 1] == -INF
    assert np.allclose(scores[[0, 1, 1], [0, 0, 1]], [expected[0, 4], expected[1, 29], expected[1, 0]], atol=1e-6)
