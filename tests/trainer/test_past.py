"""Histories of evaluated requests, fixed and growing, worked by hand."""

from __future__ import annotations

import numpy as np

from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from tests.trainer import tiny

# Query 0 has labels 4 and 1 before test, query 1 none, query 2 label 0; query 3 is in training alone.
KNOWN_PAIRS = Pairs(np.int32([0, 0, 2, 3]), np.int32([4, 1, 0, 2]), times=np.float64([1, 3, 2, 4]))
# In test, query 0 chooses 2 and 1, query 1 chooses 3, 3 and 0, query 2 chooses 5; two of query 1 at the same time.
HELD_OUT = Pairs(np.int32([0, 0, 1, 1, 1, 2]), np.int32([2, 1, 3, 3, 0, 5]), times=np.float64([5, 6, 7, 7, 8, 9]))
ROWS = np.arange(6, dtype=np.int32)


def histories(past: Past, rows: np.ndarray) -> list[list[int]]:
    starts, ends = past.slices(rows)
    return [past.pairs.labels[start:end].tolist() for start, end in zip(starts, ends, strict=True)]


def test_history_of_a_request_is_all_known_pairs_of_its_query() -> None:
    past = Past.fixed(KNOWN_PAIRS, queries=4)
    assert histories(past, np.int32([0, 1, 2])) == [[4, 1], [], [0]]
    assert past.lengths(np.int32([0, 1, 2])).tolist() == [2, 0, 1]
    assert past.queries(np.int32([2, 0])).tolist() == past.requests(np.int32([2, 0])).tolist() == [2, 0]


def test_requests_of_a_query_have_the_same_history() -> None:
    past = Past.fixed(KNOWN_PAIRS, queries=4, requests=np.int32([0, 0, 1, 2]))
    assert histories(past, np.int32([0, 1, 2, 3])) == [[4, 1], [4, 1], [], [0]]
    assert past.queries(np.int32([1, 3])).tolist() == [0, 2]
    assert past.requests(np.int32([1, 3])).tolist() == [1, 3]


def test_history_of_a_held_out_pair_grows_with_the_pairs_before_it() -> None:
    past = Past.growing(KNOWN_PAIRS, HELD_OUT, queries=4)
    assert histories(past, ROWS) == [[4, 1], [4, 1, 2], [], [3], [3, 3], [0]]
    assert past.lengths(ROWS).tolist() == [2, 3, 0, 1, 2, 1]
    assert past.queries(ROWS).tolist() == [0, 0, 1, 1, 1, 2]
    assert len(past.pairs) == 9  # query 3 is not evaluated


def test_held_out_pairs_keep_their_requests() -> None:
    contexts = Pairs(HELD_OUT.queries, HELD_OUT.labels, times=HELD_OUT.times, requests=np.int32([7, 6, 5, 5, 4, 3]))
    assert Past.growing(KNOWN_PAIRS, contexts, queries=4).requests(np.int32([1, 3, 5])).tolist() == [6, 5, 3]


def test_later_known_pair_is_not_in_the_history() -> None:
    later = Pairs(np.int32([0, 0]), np.int32([4, 1]), times=np.float64([1, 8]))
    past = Past.growing(later, HELD_OUT.take(slice(2)), queries=1)
    assert histories(past, np.int32([0, 1])) == [[4], [4, 2]]


def test_pairs_without_times_are_in_the_order_of_the_files() -> None:
    past = Past.growing(tiny.pairs((0, 4), (1, 0)), tiny.pairs((0, 2), (0, 1), (1, 3)), queries=2)
    assert histories(past, np.int32([0, 1, 2])) == [[4], [4, 2], [0]]


def test_seen_labels_are_those_of_the_history() -> None:
    past = Past.growing(KNOWN_PAIRS, HELD_OUT, queries=4)
    # places of the block, then labels: the block's first row is event 4, whose history is 3, 3
    assert past.seen_labels(np.int32([4, 1, 2])).tolist() == [[0, 3], [0, 3], [1, 4], [1, 1], [1, 2]]
    assert past.holds(ROWS, HELD_OUT.labels).tolist() == [False, True, False, True, False, False]
    fixed = Past.fixed(KNOWN_PAIRS, queries=4)
    assert fixed.seen_labels(np.int32([1, 0])).tolist() == [[1, 4], [1, 1]]
    assert fixed.holds(HELD_OUT.queries, HELD_OUT.labels).tolist() == [False, True, False, False, False, False]


def test_entries_are_in_the_order_of_each_history() -> None:
    row, entry = (past := Past.growing(KNOWN_PAIRS, HELD_OUT, queries=4)).entries(np.int32([1, 2, 5]))
    assert row.tolist() == [0, 0, 0, 2]
    assert past.pairs.labels[entry].tolist() == [4, 1, 2, 0]


def test_other_label_rows_leave_out_labels_of_no_catalogue() -> None:
    # labels 4, 2, 1, 0 are rows 0, 1, 2, 3 of another catalogue, which lacks 3 and 5
    past = Past.growing(KNOWN_PAIRS, HELD_OUT, queries=4).with_labels(np.int32([3, 2, 1, -1, 0, -1]))
    assert past.lengths(ROWS).tolist() == [2, 3, 0, 1, 2, 1]
    assert past.seen_labels(np.int32([1, 4, 5])).tolist() == [[0, 0], [0, 2], [0, 1], [2, 3]]
    assert past.holds(np.int32([1, 1, 4]), np.int32([1, 3, 0])).tolist() == [True, False, False]


def test_empty_held_out_set_has_no_rows() -> None:
    past = Past.growing(KNOWN_PAIRS, HELD_OUT.take(slice(0)), queries=4)
    assert len(past.pairs) == 0
    assert past.seen_labels(np.int32([])).tolist() == []
    assert past.holds(np.int32([]), np.int32([])).tolist() == []
