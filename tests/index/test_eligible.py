"""Sets of label rows against Python's, worked by hand and at random."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longtail.index.search.eligible import Eligible


def test_ten_rows_by_hand() -> None:
    some = Eligible.from_mask(np.array([True, False] * 5))
    assert (some.count, some.share, some.whole) == (5, 0.5, False)
    assert some.contains(np.array([[0, 1, 8], [9, -1, 2]])).tolist() == [[True, False, True], [False, False, True]]
    fewer = some.without(np.array([8, 8, 1, 0]))
    assert fewer.contains(np.arange(10)).nonzero()[0].tolist() == [2, 4, 6]
    assert (fewer.count, some.count) == (3, 5)
    assert some.without(np.empty(0, np.int64)) is some
    assert Eligible.from_mask(np.ones(10, bool)).whole


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.data())
def test_any_set_of_rows_equals_a_set(mask: list[bool], data: st.DataObject) -> None:
    removed = data.draw(st.lists(st.integers(0, len(mask) - 1)))
    expected = {place for place, held in enumerate(mask) if held} - set(removed)
    ids = Eligible.from_mask(np.array(mask)).without(np.array(removed, np.int64))
    assert ids.count == len(expected)
    assert set(np.flatnonzero(ids.contains(np.arange(len(mask))))) == expected
    assert ids.rows.tolist() == sorted(expected)


def test_parts_and_what_was_taken_out_by_hand() -> None:
    every = Eligible.from_mask(np.ones(5, bool))
    some = every.where(np.array([True, True, False, True, False]), "row < 4")
    rest = some.without(np.array([1, 2]))
    assert (rest.rows.tolist(), rest.count, rest.expression, rest.but_R.tolist()) == ([0, 3], 2, "row < 4", [1, 2])
    assert rest.where(np.array([False, True, True, True, True])).rows.tolist() == [3]
    assert every.without(np.arange(5)).rows.tolist() == []
    assert some.per_list(np.int32([0, 2, 2, 0, 1]), 4).tolist() == [2, 0, 1, 0]
