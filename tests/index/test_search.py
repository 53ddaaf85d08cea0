"""Search against brute force over the bundle's own columns, on every kind of index, for any λ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from longtail.bundle import Augmentation, Bundle
from longtail.index import Filter, QueryError, Release, Searcher
from longtail.index.building.training import train_index
from longtail.index.manifests import SearchParams
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle
from tests.index.conftest import KINDS, brute_force, masked


def flat_searcher(bundle: Bundle) -> Searcher:
    rows = bundle.rows()
    index = train_index("Flat", rows.shape[1], rows, "cpu")
    return Searcher(bundle, FaissIndex("flat", "Flat", index), SearchParams())


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cosine", [False, True])
def test_flat_equals_brute_force_for_any_bias_removal(bias: bool, cosine: bool) -> None:
    bundle = make_bundle(labels=200, bias=bias, cosine=cosine)
    searcher = flat_searcher(bundle)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(bias_removal=st.floats(-3, 3, width=32), k=st.integers(1, 250), query=st.integers(0, 19))
    def check(bias_removal: float, k: int, query: int) -> None:
        query_D = bundle.calibration_queries[query]
        expected = brute_force(bundle, query_D, bias_removal)
        scores, rows = searcher.search(bundle.augmentation.queries(query_D[None], bias_removal), k)
        assert np.allclose(scores[0], masked(expected, np.ones(200, bool), k), atol=1e-5)
        assert np.allclose(expected[rows[0][:200]], scores[0][:200], atol=1e-5)
        assert (rows[0][200:] == -1).all()

    check()


def test_kappa_changes_no_answer_of_a_flat_index() -> None:
    bundle = make_bundle(labels=300, bias=True)
    answers = []
    for kappa in (0.01, 1.0, 37.0):
        manifest = bundle.manifest.model_copy(update={"kappa": kappa, "kappa_bias": 2 * kappa})
        scaled = replace(bundle, manifest=manifest)
        queries = Augmentation(manifest.temperature, kappa, 2 * kappa).queries(bundle.calibration_queries, 0.7)
        answers.append(flat_searcher(scaled).search(queries, 20))
    for scores, rows in answers[1:]:
        assert np.allclose(scores, answers[0][0], atol=1e-5)
        assert (rows == answers[0][1]).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("spec", KINDS)
def test_every_kind_scores_exactly_and_recalls(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    bundle = release.bundle
    for bias_removal in (-1.0, 0.0, 0.5, 1.0, 2.0):
        queries = bundle.augmentation.queries(bundle.calibration_queries, bias_removal)
        scores, rows = release.searcher.search(queries, 50)
        assert scores.dtype == np.float32
        assert rows.dtype == np.int64
        assert (np.diff(scores, axis=1) <= 0).all()
        hits = 0
        for query, query_D in enumerate(bundle.calibration_queries):
            exact = brute_force(bundle, query_D, bias_removal)
            assert np.allclose(exact[rows[query]], scores[query], atol=1e-4)
            assert len(set(rows[query])) == 50
            hits += len(set(rows[query]) & set(np.argsort(-exact)[:50]))
        assert hits / (50 * len(queries)) > 0.94


@pytest.mark.parametrize("spec", KINDS)
def test_k_beyond_the_catalogue_returns_every_label_once(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    labels = release.searcher.labels
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries[:2], 0.5)
    scores, rows = release.searcher.search(queries, labels + 3)
    for query in range(2):
        assert sorted(rows[query][:labels]) == list(range(labels))
        assert rows[query][labels:].tolist() == [-1, -1, -1]
        assert scores[query][labels:].tolist() == [-np.inf] * 3


@pytest.mark.parametrize("spec", ["ivf_flat", "ivf_sq"])
def test_one_query_equals_its_row_in_a_batch(spec: str, opened: Callable[[str], Release]) -> None:
    release = opened(spec)
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries, 1.0)
    rng = np.random.default_rng(0)
    every: list[list[Filter | None]] = [
        [
            None,
            Filter(exclude=rng.choice(600, rng.integers(1, 40), replace=False)),
            Filter(exclude=rng.choice(600, 300, replace=False).astype(np.uint16), buckets=frozenset({1, 2})),
            Filter(buckets=frozenset({2}), exclude=rng.choice(600, 9)),
            Filter(allow=rng.choice(600, rng.integers(1, 600))),
        ]
        for _ in range(4)
    ]
    filters = [filter_ for group in every for filter_ in group]
    scores, rows = release.searcher.search(queries, 12, filters)
    for query in range(len(queries)):
        alone = release.searcher.search(queries[query : query + 1], 12, [filters[query]])
        assert np.allclose(alone[0][0], scores[query], atol=1e-5)
        assert alone[1][0].tolist() == rows[query].tolist()


@pytest.mark.parametrize(
    ("queries", "k", "filters", "message"),
    [
        (np.zeros((1, 9), np.float32), 5, None, r"expected float32 \[B, 13\] .* received float32 \[1, 9\]"),
        (np.zeros((1, 13)), 5, None, r"received float64 \[1, 13\]"),
        (np.zeros(13, np.float32), 5, None, r"received float32 \[13\]"),
        (np.zeros((1, 13), np.float32), 0, None, "k: expected at least 1, received 0"),
        (np.full((2, 13), np.nan, np.float32), 5, None, "NaN or infinity in query 0"),
        (np.zeros((1, 13), np.float32), 5, [], "one per query, 1, received 0"),
        (np.zeros((1, 13), np.float32), 5, [Filter(exclude=np.array([3, 600]))], "query 0, filter exclude: .* 600"),
        (np.zeros((1, 13), np.float32), 5, [Filter(allow=np.array([-1]))], r"filter allow: .* 0\.\.599, received -1"),
        (np.zeros((1, 13), np.float32), 5, [Filter(allow=np.array([0.5]))], "received float64"),
        (np.zeros((1, 13), np.float32), 5, [Filter(buckets=frozenset({4}))], r"filter buckets: .* received \[4\]"),
    ],
)
def test_invalid_searches_are_refused(
    queries: np.ndarray,
    k: int,
    filters: list[Filter | None] | None,
    message: str,
    opened: Callable[[str], Release],
) -> None:
    with pytest.raises(QueryError, match=message):
        opened("flat").searcher.search(queries, k, filters)
