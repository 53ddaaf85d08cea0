"""Selections and places against sets, worked by hand and at random."""

from __future__ import annotations

import faiss
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longtail.index.search.band import Band
from longtail.index.search.eligible import Eligible, Places
from longtail.index.search.filters import without_rows
from longtail.index.search.selection import Selection


def test_ten_ids_by_hand() -> None:
    some = Selection.of(np.array([True, False] * 5))
    assert (some.count, some.share, some.whole) == (5, 0.5, False)
    assert some.contains(np.array([[0, 1, 8], [9, -1, 2]])).tolist() == [[True, False, True], [False, False, True]]
    fewer = some.without(np.array([8, 8, 1, 0]))
    assert fewer.contains(np.arange(10)).nonzero()[0].tolist() == [2, 4, 6]
    assert (fewer.count, some.count) == (3, 5)
    assert some.without(np.empty(0, np.int64)) is some
    assert Selection.of(np.ones(10, bool)).whole


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.data())
def test_any_selection_equals_a_set(mask: list[bool], data: st.DataObject) -> None:
    removed = data.draw(st.lists(st.integers(0, len(mask) - 1)))
    expected = {place for place, held in enumerate(mask) if held} - set(removed)
    selection = Selection.of(np.array(mask)).without(np.array(removed, np.int64))
    assert selection.count == len(expected)
    assert set(np.flatnonzero(selection.contains(np.arange(len(mask))))) == expected


def test_parameters_rule_out_the_others_and_are_kept() -> None:
    index = faiss.IndexFlatIP(1)
    index.add(np.arange(10, dtype=np.float32)[:, None])
    odd = Selection.of(np.array([False, True] * 5))
    one = np.ones((1, 1), np.float32)
    assert index.search(one, 3, params=odd.parameters(faiss.SearchParameters))[1].tolist() == [[9, 7, 5]]
    first = odd.parameters(faiss.SearchParametersIVF, nprobe=3)
    assert first.nprobe == 3
    assert odd.parameters(faiss.SearchParametersIVF, nprobe=3) is first
    assert odd.parameters(faiss.SearchParametersIVF, nprobe=4).nprobe == 4


def test_places_and_eligible_labels_of_two_bands() -> None:
    bands = [Band(name, "flat", "Flat", None, np.array(rows)) for name, rows in (("head", [1, 4]), ("tail", [0, 2, 3]))]
    places = Places(bands, 5)
    assert [ids.tolist() for ids in places.ids(np.array([3, 4, 0, 3]))] == [[1], [2, 0, 2]]
    eligible = Eligible.of(places, np.array([True, True, False, True, False]))
    assert eligible.count == 3
    assert [(band.name, selection.count) for band, selection in eligible.parts] == [("head", 1), ("tail", 2)]
    rest = eligible.without(np.array([1, 2]))
    assert rest.count == 2
    assert [band.name for band, _ in rest.parts] == ["tail"]
    assert rest.rows.tolist() == [0, 3]
    assert eligible.rows.tolist() == [0, 1, 3]


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_rows_without_others_are_sorted_and_stand_once(rows: list[int], excluded: list[int]) -> None:
    found = without_rows(np.array(rows, np.int64), np.array(excluded, np.int64))
    assert found.tolist() == sorted(set(rows) - set(excluded))
