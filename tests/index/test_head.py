"""The exact head: what it adds to an index, with any part of it scored, and how large a build makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Bools, Float32, Int64
from longtail.index import ExactRows, Filter, IndexSpec, Searcher
from longtail.index.construct.recall import Calibration
from longtail.index.construct.training import by_reach, head_of, make_index
from longtail.index.construct.tuning import choose_head, head_sizes, tune_index
from longtail.index.manifests import Effort
from longtail.index.search.faiss_index import FaissIndex
from tests.bundles import make_bundle

LABELS, HEAD = 5_003, 500
"""The last byte of a set of rows is not full."""


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=LABELS, dim=16, queries=20)


@pytest.fixture(scope="module")
def order(bundle: Bundle) -> Int64:
    return by_reach(bundle, bundle.rows(), Calibration(bundle, bundle.rows()))


@pytest.fixture(scope="module", params=["ivf_flat", "ivf_sq"])
def index(request: pytest.FixtureRequest, bundle: Bundle, order: Int64) -> FaissIndex:
    made = make_index(IndexSpec(request.param), bundle.rows(), "cpu", outside=np.sort(order[HEAD:]))
    return replace(made, head=head_of(bundle.rows(), order[:HEAD]))


@pytest.fixture(scope="module")
def queries(bundle: Bundle) -> Float32:
    picked = bundle.calibration_queries[:8]
    return np.concatenate([bundle.augmentation.queries(picked, value) for value in (-1.0, 0.0, 0.5, 1.0, 2.0)])


@pytest.mark.parametrize("hidden", [np.empty(0, np.int64), np.arange(0, LABELS, 60)])
@pytest.mark.parametrize("head", [0, 30, 200, None])
@pytest.mark.parametrize("probes", [1, 4, 10_000])
@pytest.mark.parametrize("index", ["ivf_flat"], indirect=True)
def test_the_best_of_the_head_and_of_what_the_visited_lists_hold(
    bundle: Bundle, order: Int64, index: FaissIndex, queries: Float32, probes: int, head: int | None, hidden: Int64
) -> None:
    """Against every score of the labels in visited lists and of the `head` most frequent."""
    searcher = Searcher(bundle, index, Effort()).at(Effort(probes=probes, head=head)).without(hidden)
    scores_BK, rows_BK = searcher.found(queries, 50)
    expected_BL = queries @ bundle.rows().T
    lists_L = index.index.quantizer.search(np.ascontiguousarray(bundle.rows()), 1)[1][:, 0]
    assert np.array_equal(lists_L, index.lists)
    lists_L[order[: HEAD if head is None else head]] = -2
    for query, visited in enumerate(index.index.quantizer.search(queries, min(probes, index.index.nlist))[1]):
        expected_BL[query, ~np.isin(lists_L, [-2, *visited])] = -np.inf
    expected_BL[:, hidden] = -np.inf
    expected_rows = np.argsort(-expected_BL, axis=1, kind="stable")[:, :50]
    expected_BK = np.take_along_axis(expected_BL, expected_rows, axis=1)
    expected_rows[expected_BK == -np.inf] = -1
    np.testing.assert_allclose(scores_BK, expected_BK, rtol=1e-5, atol=1e-6)
    assert (rows_BK == expected_rows).mean() > 0.999  # of equal scores either comes first
    for query in range(0, len(queries), 7):
        alone = searcher.found(queries[query : query + 1], 50)
        np.testing.assert_allclose(alone[0][0], scores_BK[query], rtol=1e-5, atol=1e-6)
        assert (alone[1][0] == rows_BK[query]).mean() > 0.95


@pytest.mark.parametrize("size", [0, 30, 500])
def test_no_label_is_found_twice_and_scores_are_the_rows(
    bundle: Bundle, index: FaissIndex, queries: Float32, size: int
) -> None:
    searcher = Searcher(bundle, index, Effort()).at(Effort(probes=9, head=size))
    for filter_ in (
        None,
        Filter(exclude=np.arange(20)),
        Filter(buckets=frozenset({0})),
        Filter(buckets=frozenset({2})),
    ):
        scores, rows = searcher.search(queries, 40, [filter_] * len(queries))
        assert all(len(set(rows_K.tolist())) == 40 for rows_K in rows)
        np.testing.assert_allclose(
            scores, np.take_along_axis(queries @ bundle.rows().T, rows, axis=1), rtol=1e-5, atol=1e-5
        )


def test_where_lists_hold_too_few_more_are_searched_and_not_every_label(
    bundle: Bundle, index: FaissIndex, queries: Float32, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher = Searcher(bundle, index, Effort(probes=1)).at(Effort(probes=1, head=0))
    short = (searcher.found(queries, 100)[1] < 0).any(axis=1)
    assert short.any()
    monkeypatch.setattr(ExactRows, "top", lambda *_: pytest.fail("scored every label"))
    scores, rows = searcher.search(queries, 100)
    harder = searcher.at(Effort(probes=8)).found(queries, 100)
    np.testing.assert_allclose(scores[short], harder[0][short], rtol=1e-5, atol=1e-6)
    assert (rows[short] == harder[1][short]).mean() > 0.99


def test_what_is_saved_is_not_the_recall_of_the_head(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an effort scores a part of the head, its other labels are found as all others are."""
    built = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None)
    lesser = [at for at in built.efforts if at.effort.head is not None]
    assert lesser
    calibration = Calibration(bundle, bundle.rows())
    in_head_L = np.zeros(LABELS, np.bool_)
    assert built.index is not None
    assert built.index.head is not None
    in_head_L[built.index.head.rows_H] = True
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
        return [0.5 if sought[-1] <= least else 1.0] * len(calibration.dial_points)

    monkeypatch.setattr(Calibration, "found", watched)
    monkeypatch.setattr(Calibration, "recall_of", poor_with_so_few)
    again = tune_index(bundle, IndexSpec("ivf_flat"), "cpu", lambda _: None).efforts
    assert all(at.effort.head is None or at.effort.head > least for at in again)


@pytest.mark.parametrize(
    ("labels", "rest", "expected"),
    [
        (200, 1, [20, 32]),
        (6_000, 1, [600, 960]),
        (60_000, 1, [1_000, 3_162, 9_600]),
        (100_000, 1, [1_000, 3_162, 10_000, 16_000]),
        (700, 624, [70, 76]),
        (650, 624, [65]),
    ],
)
def test_sizes_grow_by_half_a_power_of_ten_to_a_sixth_of_the_labels(
    labels: int, rest: int, expected: list[int]
) -> None:
    """All but the first leave enough labels to train codes with."""
    assert head_sizes(labels, rest) == expected


@pytest.mark.parametrize("target", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("index", ["ivf_flat"], indirect=True)
def test_the_size_is_taken_whose_queries_score_the_fewest_rows(
    bundle: Bundle, order: Int64, index: FaissIndex, target: float
) -> None:
    """As if every size had been measured with an index of its own."""
    sizes, calibration = [60, 200, 600, 800, 1_700], Calibration(bundle, bundle.rows())
    cost = np.full((len(sizes), len(calibration.dial_points)), np.inf)
    for place, size in enumerate(sizes):
        headed = replace(index, head=head_of(bundle.rows(), order[:size]))
        for probes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128):
            recall, _ = calibration.measure(Searcher(bundle, headed, Effort(probes=probes)))
            for at, measured in enumerate(recall):
                if measured.recall >= target and np.isinf(cost[place, at]):
                    cost[place, at] = size + 3 * probes * LABELS / index.index.nlist
    # Each place may score less than the whole head, so the head is what the neediest place needs.
    chosen = choose_head(bundle, replace(index, head=None), sizes, order, calibration, target)
    assert chosen == sizes[int(max(cost.argmin(axis=0)))]
    assert choose_head(bundle, index, sizes, order, calibration, 1.1) == 60  # none suffices
