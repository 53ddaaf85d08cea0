"""Values of other libraries in requests."""

import json
from datetime import UTC, date, datetime
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from longtail.client.calls import similar
from longtail.plain import encoded


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (np.int64(33), 33),
        (np.uint64(2**63), 2**63),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([1.5, 2.5], np.float32), [1.5, 2.5]),
        (np.array([[1], [2]]), [[1], [2]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.datetime64("2026-01-31T10:00:00.000000001", "ns"), "2026-01-31T10:00:00"),
        (np.array(["2026-01-31", "NaT"], "datetime64[ns]"), ["2026-01-31T00:00:00", None]),
        (float("nan"), None),
        (np.float32("nan"), None),
        ([1.0, float("nan")], [1.0, None]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (pd.NA, None),
        (pd.NaT, None),
        (pd.Series([1, 2]), [1, 2]),
        (pd.Series(["a", None], dtype="string"), ["a", None]),
        (pd.Timestamp("2026-01-31", tz="UTC"), "2026-01-31T00:00:00+00:00"),
        (pd.Series(pd.to_datetime(["2026-01-31"])), ["2026-01-31T00:00:00"]),
        (pd.Categorical(["a", "b"]), ["a", "b"]),
        (pa.array([1, None]), [1, None]),
        (pa.scalar("a"), "a"),
        (date(2026, 1, 31), "2026-01-31"),
        (datetime(2026, 1, 31, tzinfo=UTC), "2026-01-31T00:00:00+00:00"),
        (MappingProxyType({"a": np.int8(1)}), {"a": 1}),
        ({np.int64(7): 0.5, "nan": float("nan")}, {"7": 0.5, "nan": None}),
        ((1, "a"), [1, "a"]),
    ],
)
def test_values_of_other_libraries_are_sent_as_json(value: Any, sent: Any) -> None:
    assert json.loads(encoded({"queries": [{"features": {"age": value}}]}))["queries"][0]["features"]["age"] == sent


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("inf"), "queries.0.features.age: expected a finite number, received inf"),
        ([0.0, np.float32("-inf")], "queries.0.features.age.1: expected a finite number, received -inf"),
        ({1}, "queries.0.features.age: expected a value that JSON can represent, received set"),
        ({"a": object()}, "queries.0.features.age.a: expected a value that JSON can represent, received object"),
        (np.array([1j]), "queries.0.features.age.0: expected a value that JSON can represent, received complex"),
    ],
)
def test_unsupported_values_are_refused_by_field(value: Any, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{expected}$"):
        encoded({"queries": [{"features": {"age": value}}]})


def test_numpy_ids_are_ids() -> None:
    assert encoded(similar(np.int64(3)).body) == b'{"id":3}'  # type: ignore[arg-type]
    assert encoded(similar(np.array([3, 4])).body) == b'{"ids":[3,4]}'
    assert encoded(similar("34").body) == b'{"id":"34"}'
