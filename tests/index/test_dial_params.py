"""Search parameters of a query are the maximum of the measured points around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import Filter, IndexSpec, Release, Searcher, build, open_releases
from longtail.index.manifests import SearchParams, SearchParamsAt
from longtail.index.recall import Calibration
from longtail.index.search.dial_params import DialParams
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle

MOST = SearchParams(nprobe=500, k_factor=9)


def at(bias_removal: float, popularity: float, nprobe: int, *, k: int = 100, k_factor: int = 1) -> SearchParamsAt:
    params = SearchParams(nprobe=nprobe, k_factor=k_factor)
    return SearchParamsAt(bias_removal=bias_removal, popularity=popularity, recall=1.0, k=k, params=params)


def get_params(
    bundle: Bundle, measured: list[SearchParamsAt], bias_removal: float, popularity: float, k: int = 100
) -> SearchParams:
    query_1E = bundle.augmentation.queries(bundle.calibration_queries[:1], bias_removal, popularity)
    return DialParams(bundle, MOST, measured).get(query_1E[0], k)


@pytest.mark.parametrize(
    ("bias_removal", "popularity", "expected"),
    [(0, 0, 1), (0.5, 0, 2), (0.2, 0, 2), (0.5001, 0, 7), (0.3, 0.2, 2), (0.9, -0.9, 1), (0, 1, 7)],
)
def test_the_sum_decides_where_one_coordinate_holds_both_dials(
    bias_removal: float, popularity: float, expected: int
) -> None:
    measured = [at(0, 0, 1), at(0.5, 0, 2), at(1, 0, 7), at(0, 1, 5)]
    assert get_params(make_bundle(), measured, bias_removal, popularity) == SearchParams(nprobe=expected)


@pytest.mark.parametrize(
    ("bias_removal", "popularity", "expected"),
    [
        (0, 0, SearchParams(nprobe=1)),
        (0.5, 0, SearchParams(nprobe=2)),
        (0.5, 1, SearchParams(nprobe=8, k_factor=4)),
        (0.7, 0, SearchParams(nprobe=3, k_factor=2)),
        (0.2, 0.1, SearchParams(nprobe=16, k_factor=4)),  # all four corners of the box
        (0.7, 0.1, MOST),  # λ = 1, μ = 1 was not measured
        (-0.1, 0, MOST),  # beyond what was measured
        (1.1, 0, MOST),
        (0, 1.1, MOST),
    ],
)
def test_a_query_takes_the_maximum_of_the_corners_around_it(
    bias_removal: float, popularity: float, expected: SearchParams
) -> None:
    measured = [
        at(0, 0, 1), at(0.5, 0, 2), at(1, 0, 3, k_factor=2), at(0, 1, 16), at(0.5, 1, 8, k_factor=4),
    ]  # fmt: skip
    assert get_params(make_bundle(popularity=True), measured, bias_removal, popularity) == expected


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=6000, dim=16)


@pytest.fixture(scope="module")
def release(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Release:
    root: Path = tmp_path_factory.mktemp("params_at")
    bundle.write(root / "bundle")
    build(root / "bundle", root / "releases", name="one", spec=IndexSpec("ivf_flat"))
    return open_releases(root / "releases").open("one")


def test_search_params_reach_the_promised_recall_with_least_effort(
    release: Release,
) -> None:
    calibration = Calibration(release.bundle, release.bundle.rows())
    params_at, recall = (
        [at for at in figures if not any(at.priors.values())]
        for figures in (release.manifest.params_at, release.manifest.recall)
    )
    assert [(at.k, at.bias_removal) for at in params_at] == [
        (k, bias_removal) for k in (10, 100) for bias_removal in (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
    ]
    for k in (10, 100):
        measured, _ = calibration.measure(release.searcher, k)
        assert [at.recall for at in measured] == [at.recall for at in params_at if at.k == k]
    assert [at.recall for at in recall] == [at.recall for at in params_at if at.k == 100]
    assert min(at.recall for at in params_at) >= 0.99
    assert max(at.params.nprobe for at in params_at) == release.manifest.params.nprobe
    assert min(at.params.nprobe for at in params_at) < release.manifest.params.nprobe
    index = release.searcher.index
    for nprobe in {at.params.nprobe for at in params_at} - {2}:
        less = {
            k: calibration.measure(Searcher(release.bundle, index, SearchParams(nprobe=nprobe // 2)), k)[0]
            for k in (10, 100)
        }
        for position, point in enumerate(params_at):
            if point.params.nprobe == nprobe:
                assert less[point.k][position % 9].recall < 0.99


def test_a_batch_is_answered_like_single_queries(release: Release) -> None:
    bundle = release.bundle
    queries = np.concatenate([bundle.augmentation.queries(bundle.calibration_queries[:7], at) for at in (-1, 0.2, 2)])
    order = np.random.default_rng(0).permutation(len(queries))
    scores, rows = release.searcher.search(queries[order], 10)
    assert len(release.searcher.dial_params.group(queries, 10)) > 1
    for position, query in enumerate(order):
        alone = release.searcher.search(queries[query : query + 1], 10)
        np.testing.assert_array_equal(rows[position], alone[1][0])
        np.testing.assert_allclose(scores[position], alone[0][0], rtol=1e-5)


def test_filters_use_the_search_params_of_depth_100(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[SearchParams] = []
    search = FaissIndex.search

    def recorded(
        index: FaissIndex, queries: Float32, k: int, params: SearchParams, *rest: Any
    ) -> tuple[Float32, Int64]:
        used.append(params)
        return search(index, queries, k, params, *rest)

    monkeypatch.setattr(FaissIndex, "search", recorded)
    query = release.bundle.augmentation.queries(release.bundle.calibration_queries[:1], 2.0)
    release.searcher.search(query, 10)
    query_params = release.searcher.dial_params.get(query[0], 10)
    assert query_params.nprobe < release.manifest.params.nprobe
    release.searcher.search(query, 10, [Filter(buckets=frozenset({2}))])
    assert used == [query_params, release.searcher.dial_params.get(query[0], 100)]
    assert used[1].nprobe > query_params.nprobe
