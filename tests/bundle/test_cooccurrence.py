from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

from longtail.bundle import Bundle, BundleInvariantError, Vocabulary
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.histories import LogPairs, remember
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences
from tests.bundles import make_bundle

# Query 0 chose a, b, c; query 1 a, b; query 2 b, c. Labels a, b, c are rows 0, 1, 2; d = 2, 3, 2.
PAIRS = LogPairs(np.array([0, 0, 0, 1, 1, 2, 2], np.int32), np.array([0, 1, 2, 0, 1, 1, 2], np.int32))


def settings(**changes: object) -> CooccurrenceSettings:
    arguments = {"default": 0.5, "maximum": 2, "kind": "walk", "last": 10, "decay": 1.0, "neighbours": 2}
    return CooccurrenceSettings.model_validate(arguments | changes)


def dense(built: Cooccurrence) -> list[list[float]]:
    return built.matrix().toarray().tolist()


def test_walk() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(power=1.0)])
    # a → b: over query 0 (a third) and query 1 (a half), by d_a = 2 and d_b = 3.
    expected = [[0, 5 / 36, 1 / 12], [5 / 36, 0, 5 / 36], [1 / 12, 5 / 36, 0]]
    np.testing.assert_allclose(dense(built), expected, rtol=1e-6)
    np.testing.assert_array_equal(built.degrees_L, [2, 3, 2])


def test_cosine() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(kind="cosine")])
    near, far = 2 / 6**0.5, 1 / 2
    np.testing.assert_allclose(dense(built), [[0, near, far], [near, 0, near], [far, near, 0]], rtol=1e-6)


def test_next() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(kind="next", steps=2, step_decay=0.25)])
    # b follows a twice at once, c follows a once after two steps; by d_a = 2 and d_b = 3.
    np.testing.assert_allclose(dense(built), [[0, 1, 1 / 8], [0, 0, 2 / 3], [0, 0, 0]], rtol=1e-6)


def test_mixed() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(kind="mixed", steps=2, step_decay=0.25)])
    # a → b: the walk's 5/6, and 2 steps of one, weighed by 1 / (1 + .25); by d_a = 2
    np.testing.assert_allclose(dense(built)[0], [0, (5 / 6 + 2 / 1.25) / 2, (1 / 3 + 0.25 / 1.25) / 2], rtol=1e-6)
    np.testing.assert_allclose(dense(built)[2], [1 / 6, (1 / 3 + 1 / 2) / 2, 0], rtol=1e-6)


def test_several_powers_share_one_pass() -> None:
    both = cooccurrences(PAIRS, 3, [settings(power=0.0), settings(power=1.0)])
    np.testing.assert_allclose(np.array(dense(both[0])) / [2, 3, 2], dense(both[1]), rtol=1e-6)


def test_query_counts_once_per_label_and_follower() -> None:
    often = LogPairs(np.array([0] * 500 + [1, 1]), np.array([0, 1] * 250 + [1, 0]))
    (built,) = cooccurrences(often, 2, [settings(kind="next", steps=3, step_decay=0.5)])
    # 250 times b after a and 249 times a after b are one each; query 1 has a after b. d = 2, 2.
    np.testing.assert_allclose(dense(built), [[0, 1 / 2], [1, 0]], rtol=1e-6)
    np.testing.assert_array_equal(built.degrees_L, [2, 2])


def test_repeats_count_once_in_walk_and_cosine() -> None:
    repeated = LogPairs(np.array([0, 0, 0]), np.array([0, 1, 1]))
    (built,) = cooccurrences(repeated, 2, [settings(kind="cosine")])
    np.testing.assert_allclose(dense(built), [[0, 1], [1, 0]], rtol=1e-6)  # one common query, of one pair each
    np.testing.assert_array_equal(built.degrees_L, [1, 1])


def test_weights_scale_sums_and_degrees() -> None:
    weighed = LogPairs(np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([4, 9, 7], np.float32))
    (built,) = cooccurrences(weighed, 2, [settings(kind="walk")])
    # a → b: √4·√9 over query 0's total of 13, by d_a = 4
    np.testing.assert_allclose(dense(built)[0], [0, 6 / 13 / 4], rtol=1e-6)


def test_only_the_last_pairs_of_a_query_count() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(kind="cosine")], most=2)
    # query 0 is b, c now: d = 1, 3, 2
    np.testing.assert_allclose(dense(built), [[0, 1 / 3**0.5, 0], [1 / 3**0.5, 0, 2 / 6**0.5], [0, 2 / 6**0.5, 0]])


def test_the_largest_neighbours_stay_and_equal_ones_by_row() -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(power=0.0, neighbours=1)])
    assert built.rows_LN.tolist() == [[1], [0], [1]]
    (empty,) = cooccurrences(LogPairs(*np.zeros((2, 0), np.int32)), 3, [settings()])
    assert empty.rows_LN.tolist() == [[-1, -1]] * 3
    assert not empty.weights_LN.any()


@pytest.mark.parametrize("mean", [False, True])
def test_term_of_a_history(mean: bool) -> None:
    (built,) = cooccurrences(PAIRS, 3, [settings(power=1.0, last=2, decay=0.5, mean=mean)])
    rows, values = built.term(np.array([1, 0, 2]))  # only a, then c, the newest
    total = 1.5 if mean else 1
    expected = [1 / 12, 5 / 36 + 0.5 * 5 / 36, 0.5 / 12]
    assert rows.tolist() == [0, 1, 2]
    np.testing.assert_allclose(values, np.array(expected) / total, rtol=1e-6)
    np.testing.assert_allclose(built.parts(np.array([1, 0, 2]), 1), np.array([2.5, 5]) / 36 / total, rtol=1e-6)


def test_term_without_history_and_of_a_lonely_label() -> None:
    (built,) = cooccurrences(LogPairs(np.array([0, 1]), np.array([0, 1])), 3, [settings()])
    for history in ([], [0], [2, 1]):
        rows, values = built.term(np.array(history, np.int64))
        assert (len(rows), len(values)) == (0, 0)


def test_block_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    pairs = LogPairs(np.sort(rng.integers(0, 40, 500)), rng.integers(0, 30, 500))
    (full,) = cooccurrences(pairs, 30, [settings(kind="mixed")])
    monkeypatch.setattr("longtail.bundle.neighbours._PRODUCTS", 20)
    monkeypatch.setattr("longtail.bundle.neighbours._KEYS", 20)
    (parts,) = cooccurrences(pairs, 30, [settings(kind="mixed")])
    np.testing.assert_array_equal(full.rows_LN, parts.rows_LN)
    np.testing.assert_allclose(full.weights_LN, parts.weights_LN, rtol=1e-6)


def test_followers_are_summed_without_quadratic_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    added = list[int]()

    def counted(single: csr_matrix, other: csr_matrix) -> csr_matrix:
        added.append(single.nnz + other.nnz)
        return add(single, other)

    add = csr_matrix.__add__
    monkeypatch.setattr(csr_matrix, "__add__", counted)
    monkeypatch.setattr("longtail.bundle.neighbours._KEYS", 16)
    # 512 queries chose 2 labels that no other query did: in 64 blocks of 8 queries, 512 entries.
    pairs = LogPairs(np.repeat(np.arange(512), 2), np.arange(1024))
    (built,) = cooccurrences(pairs, 1024, [settings(kind="next")])
    assert built.matrix().nnz == 512
    assert sum(added) <= 512 * (6 + 1)  # one copy for each doubling


def build_bundle() -> Bundle:
    bundle = make_bundle(labels=30, users=3)
    rng = np.random.default_rng(5)
    pairs = LogPairs(np.sort(rng.integers(0, 3, 60)), rng.integers(0, 30, 60))
    (built,) = cooccurrences(pairs, 30, [settings(neighbours=4)])
    queries = Vocabulary(pa.array(["u0", "u1", "u2"]))
    manifest = bundle.manifest.model_copy(update={"cooccurrence": built.settings})
    return replace(
        bundle, manifest=manifest, cooccurrence=built, remembered=remember(pairs, queries, np.array([1, 2, 3]), 5)
    )


def test_round_trip(tmp_path: Path) -> None:
    written = build_bundle().write(tmp_path / "model")
    read = Bundle.load(tmp_path / "model")
    assert read.cooccurrence is not None
    assert read.remembered is not None
    assert written.cooccurrence is not None
    assert read.manifest.cooccurrence == written.cooccurrence.settings == read.cooccurrence.settings
    np.testing.assert_array_equal(read.cooccurrence.rows_LN, written.cooccurrence.rows_LN)
    np.testing.assert_array_equal(read.cooccurrence.weights_LN, written.cooccurrence.weights_LN)
    assert len(read.remembered.history("u1")) == 5
    assert len(read.remembered.history("nobody")) == 0


def test_remembered_are_the_last_of_each_query() -> None:
    built = remember(PAIRS, Vocabulary(pa.array(["x", "y", "z"])), np.array([1, 2, 3], np.int32), 2)
    assert [built.history(query).tolist() for query in ("x", "y", "z", "w")] == [[1, 2], [0, 1], [1, 2], []]
    longer = remember(PAIRS, Vocabulary(pa.array(["x", "y", "z"])), np.array([1, 2, 3], np.int32), 4)
    assert longer.rows_QR.tolist() == [[-1] * 4, [-1, 0, 1, 2], [-1, -1, 0, 1], [-1, -1, 1, 2]]


def replace_entry(bundle: Bundle, name: str, row: int, column: int, value: float) -> Bundle:
    term = bundle.cooccurrence
    assert term is not None
    array = getattr(term, name).copy()
    array[row, column] = value
    return replace(bundle, cooccurrence=replace(term, **{name: array}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda b: replace_entry(b, "rows_LN", 3, 0, 30), r"holds label rows, or -1: expected -1..29, found -1..30"),
        (lambda b: replace_entry(b, "rows_LN", 3, 0, 3), "has no label as its own neighbour"),
        (
            lambda b: replace_entry(b, "rows_LN", 3, 0, b.cooccurrence.rows_LN[3, 1]),
            "has every neighbour of a label once",
        ),
        (lambda b: replace_entry(b, "weights_LN", 3, 0, np.nan), "cooccurrence.weights.npy is finite and >= 0"),
        (lambda b: replace_entry(b, "weights_LN", 3, 0, -1), "cooccurrence.weights.npy is finite and >= 0"),
        (lambda b: replace_entry(b, "rows_LN", 3, 0, -1), "cooccurrence.weights.npy is 0 without a neighbour"),
        (
            lambda b: replace(b, cooccurrence=replace(b.cooccurrence, rows_LN=b.cooccurrence.rows_LN[:-1])),
            r"cooccurrence.rows.npy is int32 \[labels, neighbours\]: expected int32 \(30, 4\)",
        ),
        (lambda b: replace(b, cooccurrence=None), "the manifest describes the term of co-occurrence, if there is one"),
        (
            lambda b: replace(b, remembered=replace(b.remembered, rows_QR=b.remembered.rows_QR[1:])),
            r"remembered.npy is int32 \[queries, R\]",
        ),
        (
            lambda b: replace(b, remembered=replace(b.remembered, rows_QR=b.remembered.rows_QR + 30)),
            "remembered.npy holds label rows, or -1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_broken_terms_are_refused(changed: object, message: str) -> None:
    with pytest.raises(BundleInvariantError, match=message):
        changed(build_bundle()).validate()  # type: ignore[operator]
