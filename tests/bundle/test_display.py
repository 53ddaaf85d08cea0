"""Values that display columns take from JSON: what filters take, too."""

from typing import Any

import pyarrow as pa
import pytest

from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import DisplayError

TABLE = pa.table(
    {
        "price": pa.array([None], pa.decimal128(10, 2)),
        "until": pa.array([None], pa.timestamp("us", "UTC")),
        "listed": pa.array([None], pa.timestamp("us")),
        "second": pa.array([None], pa.timestamp("s", "Europe/Berlin")),
        "day": pa.array([None], pa.date32()),
        "cost": pa.array([None], pa.int64()),
        "exact": pa.array([None], pa.timestamp("ns")),
    }
)


@pytest.mark.parametrize(
    ("name", "value", "displayed"),
    [
        ("price", 9.5, "9.50"),
        ("price", 10, "10.00"),
        ("price", "9.50", "9.50"),
        ("price", 0.1, "0.10"),
        ("until", "2026-01-31T10:00:00", "2026-01-31 10:00:00.000000Z"),
        ("until", "2026-01-31T12:00:00+02:00", "2026-01-31 10:00:00.000000Z"),
        ("until", "2026-01-31", "2026-01-31 00:00:00.000000Z"),
        ("listed", "2026-01-31T12:00:00.5+02:00", "2026-01-31 10:00:00.500000"),
        ("listed", "2026-01-31 10:00:00 UTC", "2026-01-31 10:00:00.000000"),
        ("listed", "2026-01-31T10:00:00Z", "2026-01-31 10:00:00.000000"),
        ("day", "2026-01-31", "2026-01-31"),
        ("cost", 9.0, 9),
        ("cost", 9, 9),
        ("exact", "2026-01-31 10:00:00.000000001", "2026-01-31 10:00:00.000000001"),
    ],
)
def test_columns_accept_values_of_filters(name: str, value: Any, displayed: Any) -> None:
    columns = DisplayColumns(TABLE)
    result = columns.complete({name: value}, {})[name]
    assert result == displayed
    assert columns.complete({name: result}, {})[name] == displayed
    assert len(columns.column(name, [result, None])) == 2


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("price", 9.555, r"a value that a column of decimal128\(10, 2\) can hold, a number within its digits"),
        ("price", True, "a number within its digits"),
        ("price", "cheap", "a number within its digits"),
        ("until", "soon", "a time in ISO 8601"),
        ("second", "2026-01-31T10:00:00.5Z", "a time in ISO 8601"),
        ("day", "31.01.2026", "a day such as 2026-01-31"),
        ("cost", 9.5, "a value that a column of int64 can hold, a whole number within its range"),
        ("cost", 2**63, "a whole number within its range"),
        ("cost", True, "a whole number within its range"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(DisplayError, match=expected):
        DisplayColumns(TABLE).complete({name: value}, {})
