"""How hard a query is searched for: what the places around its own take, and no less than they need."""

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

HARDEST = SearchParams(nprobe=500, k_factor=9)


def at(bias_removal: float, popularity: float, nprobe: int, *, k: int = 100, k_factor: int = 1) -> SearchParamsAt:
    params = SearchParams(nprobe=nprobe, k_factor=k_factor)
    return SearchParamsAt(bias_removal=bias_removal, popularity=popularity, recall=1.0, k=k, params=params)


def effort_of(
    bundle: Bundle, measured: list[SearchParamsAt], bias_removal: float, popularity: float, k: int = 100
) -> SearchParams:
    query_1E = bundle.augmentation.queries(bundle.calibration_queries[:1], bias_removal, popularity)
    return DialParams(bundle, HARDEST, measured).get(query_1E[0], k)


@pytest.mark.parametrize(
    ("bias_removal", "popularity", "expected"),
    [(0, 0, 1), (0.5, 0, 2), (0.2, 0, 2), (0.5001, 0, 7), (0.3, 0.2, 2), (0.9, -0.9, 1), (0, 1, 7)],
)
def test_where_one_coordinate_holds_both_dials_their_sum_decides(
    bias_removal: float, popularity: float, expected: int
) -> None:
    measured = [at(0, 0, 1), at(0.5, 0, 2), at(1, 0, 7), at(0, 1, 5)]
    assert effort_of(make_bundle(), measured, bias_removal, popularity) == SearchParams(nprobe=expected)


@pytest.mark.parametrize(
    ("bias_removal", "popularity", "expected"),
    [
        (0, 0, SearchParams(nprobe=1)),
        (0.5, 0, SearchParams(nprobe=2)),
        (0.5, 1, SearchParams(nprobe=8, k_factor=4)),
        (0.7, 0, SearchParams(nprobe=3, k_factor=2)),
        (0.2, 0.1, SearchParams(nprobe=16, k_factor=4)),  # all four corners of the box
        (0.7, 0.1, HARDEST),  # λ = 1, μ = 1 was not measured
        (-0.1, 0, HARDEST),  # beyond what was measured
        (1.1, 0, HARDEST),
        (0, 1.1, HARDEST),
    ],
)
def test_a_query_takes_the_hardest_of_the_corners_around_it(
    bias_removal: float, popularity: float, expected: SearchParams
) -> None:
    measured = [
        at(0, 0, 1), at(0.5, 0, 2), at(1, 0, 3, k_factor=2), at(0, 1, 16), at(0.5, 1, 8, k_factor=4),
    ]  # fmt: skip
    assert effort_of(make_bundle(popularity=True), measured, bias_removal, popularity) == expected


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
        found, _ = calibration.measure(release.searcher, k)
        assert [at.recall for at in found] == [at.recall for at in params_at if at.k == k]
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
        for place, at_place in enumerate(params_at):
            if at_place.params.nprobe == nprobe:
                assert less[at_place.k][place % 9].recall < 0.99


def test_queries_of_one_batch_are_answered_as_each_alone(release: Release) -> None:
    bundle = release.bundle
    queries = np.concatenate([bundle.augmentation.queries(bundle.calibration_queries[:7], at) for at in (-1, 0.2, 2)])
    order = np.random.default_rng(0).permutation(len(queries))
    scores, rows = release.searcher.search(queries[order], 10)
    assert len(release.searcher.dial_params.group(queries, 10)) > 1
    for place, query in enumerate(order):
        alone = release.searcher.search(queries[query : query + 1], 10)
        np.testing.assert_array_equal(rows[place], alone[1][0])
        np.testing.assert_allclose(scores[place], alone[0][0], rtol=1e-5)


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
    own = release.searcher.dial_params.get(query[0], 10)
    assert own.nprobe < release.manifest.params.nprobe
    release.searcher.search(query, 10, [Filter(buckets=frozenset({2}))])
    assert used == [own, release.searcher.dial_params.get(query[0], 100)]
    assert used[1].nprobe > own.nprobe
