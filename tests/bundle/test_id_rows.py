import tracemalloc
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from longtail.bundle.id_rows import IdRows

IDS = [f"item-{row * 7919}" for row in range(50_000)]
ROWS = IdRows(pa.array(IDS))


@pytest.mark.parametrize("count", [1, 40, 5000])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_rows_are_found_singly_and_in_batches(count: int, kind: pa.DataType) -> None:
    requested = IDS[-count:] + [f"other-{source}" for source in range(count)] + IDS[:count]
    expected = [*range(50_000 - count, 50_000), *[-1] * count, *range(count)]
    rows = IdRows(ROWS.ids.cast(kind))
    assert rows.find_all(requested) == expected
    assert rows.find_all(requested) == expected  # now from those that are kept
    assert [ROWS.get(id_, -1) for id_ in requested] == expected


@pytest.mark.parametrize("all_kept", [0, 4])
@pytest.mark.parametrize("count", [1, 300])
def test_odd_ids_are_absent(count: int, all_kept: int) -> None:
    with patch("longtail.bundle.id_rows._ALL_KEPT", all_kept):
        rows = IdRows(pa.array(["", "ä" * 300, "a\0b", "\U0001f600"]))
    odd = ["\ud800", "ä" * 299, "a", "x" * 1_000_000]
    assert rows.find_all([*odd, "", "ä" * 300, "a\0b", "\U0001f600"] * count) == [-1, -1, -1, -1, 0, 1, 2, 3] * count


@patch("longtail.bundle.id_rows._ALL_KEPT", 100)
@given(ids=st.lists(st.text(st.characters(codec="utf-8"), max_size=9), unique=True, max_size=200))
@settings(max_examples=40, deadline=None)
def test_all_ids_are_found_and_no_others(ids: list[str]) -> None:
    column = pa.array(ids, pa.string())
    built = IdRows(column)
    mapped = IdRows(column, built.order)
    mapped.check("a file")
    assert mapped.find_all([*ids, "no such id"] * 130) == [*range(len(ids)), -1] * 130
    assert [IdRows(column).get(id_) for id_ in ids] == [*range(len(ids))]
    assert [ids[row] for row in built.order] == sorted(ids)


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.bundle.id_rows._MAX_KEPT", 100)
    rows = IdRows(ROWS.ids)
    for start in range(0, 5000, 40):
        assert rows.find_all(IDS[start : start + 40]) == list(range(start, start + 40))
        assert len(rows._cache) <= 100
    assert rows.find_all(IDS[:500]) == list(range(500))
    assert len(rows._cache) <= 100


def test_a_row_takes_twenty_bytes_at_most() -> None:
    tracemalloc.start()
    rows = IdRows(ROWS.ids)
    locked = tracemalloc.get_traced_memory()[0] / len(rows)
    tracemalloc.stop()
    assert locked <= 20
