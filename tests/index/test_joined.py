"""The exact head as one more cell: what bands answer one by one, in one call, with any part of it scored."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import faiss
import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index import ExactRows, Filter, IndexSpec, Searcher
from longtail.index.construct.bands import KnownCells, by_reach, make_bands, train_index
from longtail.index.construct.recall import Calibration
from longtail.index.construct.tuning import tune_index
from longtail.index.manifests import Effort
from longtail.index.search.band import Band
from longtail.index.search.cells import Cells
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


def test_filters_ask_the_bands_themselves(
    bundle: Bundle, bands: list[Band], queries: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = Searcher(bundle, bands, Effort(probes=2), heads=[0]).at(Effort(probes=2, head=0))
    monkeypatch.setattr(JoinedBands, "search", lambda *_: pytest.fail("asked under a filter"))
    found = searcher.search(queries, 5, [Filter(buckets=frozenset({0}))] * len(queries))
    assert (bundle.labels.buckets[found[1]] == 0).all()
    for scores, rows, query in zip(*found, queries, strict=True):
        of_bucket = np.where(bundle.labels.buckets == 0, bundle.rows() @ query, -np.inf)
        np.testing.assert_allclose(scores, of_bucket[rows], rtol=1e-5, atol=1e-6)


def test_where_cells_hold_too_few_more_are_searched_and_not_every_label(
    bundle: Bundle, bands: list[Band], queries: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = Searcher(bundle, bands, Effort(probes=1), heads=[0]).at(Effort(probes=1, head=0))
    short = (searcher.found(queries, 100)[1] < 0).any(axis=1)
    assert short.any()
    monkeypatch.setattr(ExactRows, "top", lambda *_: pytest.fail("scored every label"))
    scores, rows = searcher.search(queries, 100)
    harder = searcher.at(Effort(probes=8)).found(queries, 100)
    np.testing.assert_array_equal(rows[short], harder[1][short])
    np.testing.assert_array_equal(scores[short], harder[0][short])


def test_what_has_no_nearest_cell_finds_no_label_twice() -> None:
    """A query of zeros, which codes of centroids find no cell for."""
    bundle = make_bundle(labels=42_000, dim=4)
    rows_LE = bundle.rows()
    order_L = np.argsort(-bundle.labels.log_pi, kind="stable")
    bands = make_bands(IndexSpec("ivf_flat"), rows_LE, order_L, 400, "cpu", coded_cells(rows_LE))
    assert isinstance(faiss.downcast_index(bands[1].index.quantizer), faiss.IndexRefine)
    queries = np.zeros((2, rows_LE.shape[1]), np.float32)
    queries[1, -1] = 1.0
    assert (bands[1].index.quantizer.search(queries, 4)[1][0] == -1).all()
    for head in (0, 100, None):
        searcher = Searcher(bundle, bands, Effort(), heads=[0, 100]).at(Effort(probes=4, head=head))
        for rows_K in searcher.search(queries, 50)[1]:
            assert len(set(rows_K.tolist())) == 50


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


def coded_cells(rows_LE: Float32) -> KnownCells:
    """A thousand cells, as many as have codes, around rows."""
    centroids_CE = rows_LE[np.random.default_rng(0).choice(len(rows_LE), 1_000, replace=False)]
    index = train_index("IVF1000(PQ5x4fs,RFlat),Flat", rows_LE.shape[1], rows_LE, "cpu", centroids_CE)
    return KnownCells(centroids_CE, Cells(index).of_ids)


def test_what_is_saved_is_not_the_recall_of_the_head(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an effort leaves some of the head to the cells, its labels are found as the others are."""
    built = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None)
    lesser = [at for at in built.efforts if at.effort.head is not None]
    assert lesser
    calibration = Calibration(bundle, bundle.rows())
    in_head_L = np.zeros(LABELS, np.bool_)
    in_head_L[built.bands[0].rows_N] = True
    searcher = built.searcher(bundle)
    for k in (10, 100):
        of_head = calibration.recall_of(in_head_L, *calibration.found(searcher, k))
        assert min(of_head) >= 0.99
        assert [at.recall for at in calibration.measure(searcher, k)[0]] == [
            at.recall for at in built.efforts if at.k == k
        ]

    least = min(at.effort.head for at in lesser if at.effort.head is not None)

    sought: list[int] = []
    found = Calibration.found

    def watched(self: Calibration, searcher: Searcher, k: int) -> tuple[Int64, Bools]:
        sought.append(searcher.efforts.of(self.queries_QE[0], k).head or 0)
        return found(self, searcher, k)

    def poor_with_so_few(_: Calibration, labels_L: Bools, *__: Any) -> list[float]:
        assert np.array_equal(labels_L, in_head_L)
        return [0.5 if sought[-1] <= least else 1.0] * len(calibration.places)

    monkeypatch.setattr(Calibration, "found", watched)
    monkeypatch.setattr(Calibration, "recall_of", poor_with_so_few)
    again = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None).efforts
    assert all(at.effort.head is None or at.effort.head > least for at in again)
