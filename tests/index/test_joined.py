"""The exact head as one more cell: what bands answer one by one, in one call, with any part of it scored."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index import Filter, IndexSpec, Searcher
from longtail.index.construct.bands import by_reach, make_bands
from longtail.index.construct.recall import Calibration
from longtail.index.construct.tuning import tune_index
from longtail.index.manifests import Effort
from longtail.index.search.band import Band
from longtail.index.search.joined import JoinedBands
from tests.bundles import make_bundle

LABELS, HEAD = 5_003, 500
"""The rest has 4,503 labels, which fill no last byte of a set of ids."""


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=LABELS, dim=16)


@pytest.fixture(scope="module")
def bands(bundle: Bundle) -> list[Band]:
    rows_LE = bundle.rows()
    order_L = by_reach(bundle, rows_LE, Calibration(bundle, rows_LE))
    return make_bands(IndexSpec("ivf_flat"), rows_LE, order_L, HEAD, "cpu")


@pytest.fixture(scope="module")
def queries(bundle: Bundle) -> Float32:
    picked = bundle.calibration_queries[:8]
    return np.concatenate([bundle.augmentation.queries(picked, value) for value in (-1.0, 0.0, 0.5, 1.0, 2.0)])


def expected(
    bundle: Bundle, bands: list[Band], queries: Float32, k: int, probes: int, head: int, hidden: Int64
) -> tuple[Float32, Int64]:
    """Every score, but of labels in no visited cell, of which the `head` most frequent have none."""
    _, tail = bands
    rows_LE = bundle.rows()
    scores_BL = queries @ rows_LE.T
    cells_L = tail.index.quantizer.search(np.ascontiguousarray(rows_LE), 1)[1][:, 0]
    by_popularity = np.argsort(-bundle.labels.log_pi, kind="stable")[:HEAD]
    assert set(by_popularity) == set(bands[0].rows_N)
    cells_L[by_popularity[:head]] = -2
    visited_BP = tail.index.quantizer.search(queries, probes)[1]
    for query, visited_P in enumerate(visited_BP):
        scores_BL[query, ~np.isin(cells_L, [-2, *visited_P])] = -np.inf
    scores_BL[:, hidden] = -np.inf
    rows_BK = np.argsort(-scores_BL, axis=1, kind="stable")[:, :k]
    scores_BK = np.take_along_axis(scores_BL, rows_BK, axis=1)
    rows_BK[scores_BK == -np.inf] = -1
    return scores_BK, rows_BK


@pytest.mark.parametrize("hidden", [np.empty(0, np.int64), np.arange(0, LABELS, 60)])
@pytest.mark.parametrize("head", [0, 30, 200, None])
@pytest.mark.parametrize("probes", [1, 4, 10_000])
def test_the_best_of_the_head_and_of_what_the_visited_cells_hold(
    bundle: Bundle, bands: list[Band], queries: Float32, probes: int, head: int | None, hidden: Int64
) -> None:
    searcher = Searcher(bundle, bands, Effort(), heads=[0, 30, 200]).at(Effort(probes=probes, head=head))
    visible = searcher.without(hidden)
    many = visible.found(queries, 50)
    cells = min(probes, bands[1].index.nlist)
    own = expected(bundle, bands, queries, 50, cells, HEAD if head is None else head, hidden)
    np.testing.assert_allclose(many[0], own[0], rtol=1e-5, atol=1e-6)
    assert (many[1] == own[1]).mean() > 0.999  # of equal scores either comes first
    for query in range(len(queries)):
        alone = visible.found(queries[query : query + 1], 50)
        np.testing.assert_array_equal(alone[0][0], many[0][query])
        np.testing.assert_array_equal(alone[1][0], many[1][query])


def test_a_size_that_is_not_held_is_rounded_up(bundle: Bundle, bands: list[Band], queries: Float32) -> None:
    searcher = Searcher(bundle, bands, Effort(), heads=[30, 200])
    for asked, held in ((0, 30), (31, 200), (201, None), (9_999, None)):
        found = [searcher.at(Effort(probes=2, head=head)).found(queries, 20) for head in (asked, held)]
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_bands_that_are_not_joined_answer_the_same(
    bundle: Bundle, bands: list[Band], queries: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = Searcher(bundle, bands, Effort(probes=5)).search(queries, 100)
    monkeypatch.setattr(JoinedBands, "fits", lambda _: False)
    apart = Searcher(bundle, bands, Effort(probes=5)).search(queries, 100)
    np.testing.assert_allclose(joined[0], apart[0], rtol=1e-5, atol=1e-6)
    assert (joined[1] == apart[1]).mean() > 0.999


def test_filters_ask_the_bands_themselves(bundle: Bundle, bands: list[Band], queries: Float32) -> None:
    searcher = Searcher(bundle, bands, Effort(probes=2, head=0), heads=[0])
    head_only = searcher.search(queries, 5, [Filter(buckets=frozenset({0}))] * len(queries))
    assert (bundle.labels.buckets[head_only[1]] == 0).all()


def test_only_a_head_and_rows_in_cells_on_a_cpu_are_joined(bands: list[Band]) -> None:
    assert JoinedBands.fits(bands)
    assert not JoinedBands.fits(bands[1:])
    assert not JoinedBands.fits([bands[0], replace(bands[1], kind="ivf_sq")])
    assert not JoinedBands.fits([bands[0], replace(bands[1], gpu=object())])  # type: ignore[arg-type]


def test_searches_of_several_threads_do_not_meet(bundle: Bundle, bands: list[Band], queries: Float32) -> None:
    searcher = Searcher(bundle, bands, Effort(), heads=[0, 200])
    efforts = [Effort(probes=probes, head=head) for probes, head in ((1, 0), (3, 200), (9, None), (2, 0))]
    alone = [searcher.at(effort).found(queries, 30)[1] for effort in efforts]
    differing: list[int] = []

    def search(place: int) -> None:
        own = searcher.at(efforts[place])
        differing.extend(place for _ in range(30) if not np.array_equal(own.found(queries, 30)[1], alone[place]))

    threads = [threading.Thread(target=search, args=[place]) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert differing == []


def test_what_is_saved_is_not_the_recall_of_the_head(bundle: Bundle) -> None:
    """Where an effort leaves some of the head to the cells, its labels are found as the others are."""
    built = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None)
    lesser = [at for at in built.efforts if at.effort.head is not None]
    assert lesser
    calibration = Calibration(bundle, bundle.rows())
    in_head_L = np.zeros(LABELS, np.bool_)
    in_head_L[built.bands[0].rows_N] = True
    searcher = built.searcher(bundle)
    for k in (10, 100):
        of_head = calibration.recall_of(in_head_L, searcher, k)
        assert min(of_head) >= 0.99
        assert [at.recall for at in calibration.measure(searcher, k)[0]] == [
            at.recall for at in built.efforts if at.k == k
        ]
