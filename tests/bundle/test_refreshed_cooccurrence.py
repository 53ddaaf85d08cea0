"""Later pairs are added to W by hand's sums, and where nothing was left out to what the whole log gives."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

from longtail.bundle import Vocabulary
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.histories import LogPairs, Remembered, remember
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences, keep_largest, refresh_term

A, B, C, D = range(4)
X, Y, Z = range(3)
NAMES = pa.array(["x", "y", "z"])


def settings(kind: str, **other: float) -> CooccurrenceSettings:
    arguments = {"default": 1, "maximum": 2, "kind": kind, "last": 10, "decay": 0.9, "neighbours": 3} | other
    return CooccurrenceSettings.model_validate(arguments)


def log(*pairs: tuple[int, int]) -> LogPairs:
    queries, labels = np.array(pairs, np.int64).reshape(-1, 2).T
    return LogPairs(queries, labels)


def built(pairs: LogPairs, of: CooccurrenceSettings, labels: int = 4) -> Cooccurrence:
    return cooccurrences(pairs, labels, [of])[0]


def base(pairs: LogPairs, names: pa.Array, entries: int = 3) -> Remembered:
    return remember(pairs, Vocabulary(names), np.arange(1, len(names) + 1, dtype=np.int32), entries)


def dense(of: Cooccurrence) -> np.ndarray:
    return np.asarray(of.matrix().todense())


def test_a_walk_is_joined_by_a_new_label_and_an_unnamed_query() -> None:
    first = log((X, A), (X, B), (Y, B), (Y, C))
    before, remembered = built(first, settings("walk")), base(first, NAMES[:2])
    # x goes on to d: n = 3. A query without a name chooses b and c, and b again: n = 2.
    later = log((0, D), (1, B), (1, C), (1, B))
    after, now = refresh_term(before, later, pa.array(["x", None]), remembered, 7.0)

    b_c = 1 / 2 + 1 / 2
    expected = [
        [0, 1 / 2, 0, 1 / 3],
        [1 / 2 / 3, 0, b_c / 3, 1 / 3 / 3],
        [0, b_c / 2, 0, 0],
        [1 / 3, 1 / 3, 0, 0],
    ]
    np.testing.assert_allclose(dense(after), expected, rtol=1e-6)
    assert after.degrees_L.tolist() == [1, 3, 2, 1]
    assert after.rows_LN[B].tolist() == [C, A, D]
    assert after.settings.until == 7.0
    after.check(4)
    assert now is not None
    assert [now.history(name).tolist() for name in ("x", "y", "z")] == [[A, B, D], [B, C], []]


def test_degrees_change_entries_without_new_pairs() -> None:
    first = log((X, A), (X, B), (Y, A), (Y, C))
    before = built(first, settings("walk", power=1.0))
    assert before.rows_LN[A].tolist() == [B, C, -1]
    np.testing.assert_allclose(before.weights_LN[A], [1 / 2 / 2, 1 / 2 / 2, 0])
    # Three queries choose b alone: no pair of labels, but d_b = 4.
    after, _ = refresh_term(before, log((0, B), (1, B), (2, B)), pa.array([None] * 3, pa.string()), None, None)

    assert after.rows_LN[A].tolist() == [C, B, -1]
    np.testing.assert_allclose(after.weights_LN[A], [1 / 2 / 2, 1 / 2 / 2 / 4, 0])
    np.testing.assert_allclose(after.weights_LN[B, 0], 1 / 2 / 2 / 4)


def test_followers_of_remembered_labels_count() -> None:
    of = settings("next", steps=2, step_decay=0.5)
    first = log((X, A), (X, B))
    after, now = refresh_term(built(first, of), log((0, C), (0, D)), pa.array(["x"]), base(first, NAMES[:1]), None)

    expected = np.zeros((4, 4))
    expected[A, [B, C]] = 1, 0.5
    expected[B, [C, D]] = 1, 0.5
    expected[C, D] = 1
    np.testing.assert_allclose(dense(after), expected)
    assert now is not None
    assert now.history("x").tolist() == [B, C, D]


def test_repeated_or_remembered_pair_counts_once() -> None:
    first = log((X, A), (X, B))
    before, remembered = built(first, settings("cosine")), base(first, NAMES[:1])
    after, _ = refresh_term(before, log((0, A), (0, B), (0, A)), pa.array(["x"]), remembered, None)
    assert after.degrees_L.tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(after.weights_LN, before.weights_LN)

    burst = log(*[(0, C), (0, D)] * 1000)
    single, _ = refresh_term(before, log((0, C), (0, D)), pa.array(["x"]), remembered, None)
    often, _ = refresh_term(before, burst, pa.array(["x"]), remembered, None)
    np.testing.assert_array_equal(often.weights_LN, single.weights_LN)


@pytest.mark.parametrize("kind", ["walk", "cosine", "next", "mixed"])
def test_query_without_remembered_labels_counts_once(kind: str) -> None:
    of, nameless = settings(kind, steps=2, step_decay=0.5), pa.nulls(1, pa.string())
    before = built(log((X, A), (X, B)), of)
    once, _ = refresh_term(before, log((0, C), (0, D), (0, C)), nameless, None, None)
    often = once
    for times in range(1, 200):
        earlier = log(*[(0, C), (0, D), (0, C)] * times)
        often, _ = refresh_term(often, log((0, C), (0, D), (0, C)), nameless, None, None, earlier=earlier)

    np.testing.assert_allclose(dense(often), dense(once), rtol=1e-6)
    assert often.degrees_L.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["walk", "cosine", "next", "mixed"])
def test_a_client_with_more_labels_than_are_remembered_counts_once_in_many_refreshes(kind: str) -> None:
    of, first = settings(kind, steps=2, step_decay=0.5), log((X, A), (X, B))
    cycle = [(0, A), (0, B), (0, C), (0, D)]
    once, remembered = refresh_term(
        built(first, of), log(*cycle, *cycle), pa.array(["y"]), base(first, NAMES[:1]), None
    )
    often = once
    for times in range(2, 6):
        often, remembered = refresh_term(
            often, log(*cycle), pa.array(["y"]), remembered, None, earlier=log(*cycle * times)
        )

    np.testing.assert_allclose(dense(often), dense(once), rtol=1e-6)
    assert often.degrees_L.tolist() == [2, 2, 1, 1]
    assert remembered is not None
    assert remembered.history("y").tolist() == [B, C, D]


def test_few_earlier_pairs_do_not_replace_remembered_labels() -> None:
    first = log((X, A), (X, B))
    before = built(first, settings("cosine"))
    after, now = refresh_term(before, log((0, C)), pa.array(["x"]), base(first, NAMES[:1]), None, earlier=log((0, B)))
    np.testing.assert_allclose(dense(after)[C], [1, 1, 0, 0])
    assert now is not None
    assert now.history("x").tolist() == [A, B, C]


@pytest.mark.parametrize("kind", ["walk", "cosine", "next", "mixed"])
def test_query_counts_once_with_event_weights(kind: str) -> None:
    of, first = settings(kind, steps=2, step_decay=0.5), log((X, A), (X, B))
    bought = LogPairs(np.zeros(3, int), np.array([C, D, C]), np.full(3, 9, np.float32))
    once, remembered = refresh_term(built(first, of), bought, pa.array(["y"]), base(first, NAMES[:1]), None)
    often = once
    for _ in range(5):
        often, remembered = refresh_term(often, bought, pa.array(["y"]), remembered, None)

    np.testing.assert_allclose(dense(often), dense(once), rtol=1e-6)
    assert often.degrees_L.tolist() == [1, 1, 9, 9]


def test_nearer_follower_adds_the_difference() -> None:
    first, of = log((X, A), (X, B)), settings("next", steps=2, step_decay=0.5)
    # d is the second after a, and bought directly after a: 1/2 + 9 · (1 − 1/2), with weights in a root.
    before, remembered = refresh_term(built(first, of), log((0, D)), pa.array(["x"]), base(first, NAMES[:1]), None)
    assert dense(before)[A, D] == 0.5
    bought = LogPairs(np.array([0, 0]), np.array([A, D]), np.array([9, 9], np.float32))
    after, _ = refresh_term(before, bought, pa.array(["x"]), remembered, None)
    assert dense(after)[A, D] == 0.5 + 9 * 0.5


def test_weights_and_the_scale_count() -> None:
    first = log((X, A), (X, B))
    before = built(first, settings("cosine")).scaled(8)
    later = LogPairs(np.array([0, 0]), np.array([C, D]), np.array([4, 1], np.float32))
    after, _ = refresh_term(before, later, pa.array([None], pa.string()), None, None)

    assert after.degrees_L.tolist() == [1, 1, 4, 1]
    np.testing.assert_allclose(dense(after)[[A, C, D], [B, D, C]], [8, 8 * 2 / 2, 8 * 2 / 2], rtol=1e-6)
    assert after.settings.scale == 8


@pytest.mark.parametrize(
    "of", [settings("cosine", neighbours=29), settings("next", neighbours=29, power=0.3, steps=3, step_decay=0.5)]
)
def test_refresh_is_exact_without_truncation(of: CooccurrenceSettings) -> None:
    rng = np.random.default_rng(1)
    queries, labels = rng.integers(0, 40, 600), rng.integers(0, 30, 600)
    names = pa.array([f"q{query}" for query in range(40)])

    def part(begin: int, end: int) -> LogPairs:
        order = np.argsort(queries[begin:end], kind="stable")
        return LogPairs(queries[begin:end][order], labels[begin:end][order])

    entire, first = part(0, 600), part(0, 400)
    remembered = base(LogPairs(first.queries, first.labels), names, 100)
    again, now = refresh_term(built(first, of, 30), part(400, 600), names, remembered, None)

    np.testing.assert_allclose(dense(again), dense(built(entire, of, 30)), rtol=1e-5)
    np.testing.assert_array_equal(again.degrees_L, built(entire, of, 30).degrees_L)
    assert now is not None
    np.testing.assert_array_equal(now.rows_QR, base(entire, names, 100).rows_QR)


def test_keep_largest_keeps_the_largest_weights() -> None:
    rng = np.random.default_rng(2)
    dense_LL = rng.integers(0, 5, (40, 40)) * (rng.random((40, 40)) < rng.random((40, 1)))
    sparse = csr_matrix(dense_LL.astype(np.float64))
    rows_LN, weights_LN = np.full((40, 7), -1, np.int32), np.zeros((40, 7), np.float32)
    keep_largest(sparse.indptr, sparse.indices, sparse.data, rows_LN, weights_LN)
    for result, weights, row_L in zip(rows_LN.tolist(), weights_LN.tolist(), dense_LL.tolist(), strict=True):
        best = sorted((-weight, label) for label, weight in enumerate(row_L) if weight)[:7]
        assert result == [label for _, label in best] + [-1] * (7 - len(best))
        assert weights == [-weight for weight, _ in best] + [0] * (7 - len(best))


def test_take_keeps_neighbours() -> None:
    first = log((X, A), (X, B), (X, C), (Y, C), (Y, D))
    before, remembered = built(first, settings("walk")), base(first, NAMES[:2])
    rows = np.array([D, C, A, -1])  # b is left out, and a label is new
    after, now = before.take(rows), remembered.take(rows)

    expected = np.zeros((4, 4))
    expected[0, 1] = 1 / 2
    expected[1, [0, 2]] = 1 / 2 / 2, 1 / 3 / 2
    expected[2, 1] = 1 / 3
    np.testing.assert_allclose(dense(after), expected, rtol=1e-6)
    assert after.degrees_L.tolist() == [1, 2, 1, 0]
    after.check(4)
    assert [now.history(name).tolist() for name in ("x", "y")] == [[2, 1], [1, 0]]
    now.check(4)


@pytest.mark.parametrize("kind", ["walk", "cosine", "next", "mixed"])
def test_pairs_of_new_queries_equal_the_full_log(kind: str) -> None:
    first, later = log((X, A), (X, B), (X, C)), log((0, B), (0, C), (0, D), (0, B))
    of = settings(kind, steps=2, step_decay=0.5)
    entire = LogPairs(np.concatenate([first.queries, later.queries + 9]), np.concatenate([first.labels, later.labels]))
    after, _ = refresh_term(built(first, of), later, pa.array(["y"]), None, None)

    np.testing.assert_allclose(dense(after), dense(built(entire, of)), rtol=1e-6)
    np.testing.assert_array_equal(after.degrees_L, built(entire, of).degrees_L)
