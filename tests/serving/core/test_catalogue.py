import datetime
import decimal

import numpy as np
import orjson
import pyarrow as pa
import pytest

from longtail.bundle import BundleInvariantError, Labels
from longtail.serving.core.catalogue import Catalogue


def make_catalogue(labels: Labels) -> Catalogue:
    return Catalogue(labels, np.zeros((len(labels.ids), 1), np.float32))


def labels(count: int = 2, **display: pa.Array) -> Labels:
    return Labels(
        ids=pa.array([f"id-{row}" for row in range(count)]),
        counts=np.ones(count, np.int64),
        log_pn=np.full(count, -np.log(count), np.float32),
        buckets=np.zeros(count, np.int8),
        bias=None,
        display=pa.table(display),
    )


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["x", None]), ["x", None]),
        (pa.array(["x", "y"]).dictionary_encode(), ["x", "y"]),
        (pa.array([1.5, float("nan")]), [1.5, None]),
        (pa.array([2**63 + 1, 0], pa.uint64()), [2**63 + 1, 0]),
        (pa.array([True, None]), [True, None]),
        (pa.array([["a", "b"], []]), [["a", "b"], []]),
        (pa.array([{"a": 1}, None]), [{"a": 1}, None]),
        (pa.array([None, None]), [None, None]),
        (pa.array([datetime.date(2026, 3, 1), None]), ["2026-03-01", None]),
        (pa.array([1, 2], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000001", "1970-01-01 00:00:00.000000002"]),
        (pa.array([decimal.Decimal("1.50"), None]), ["1.50", None]),
    ],
    ids=str,
)
def test_display_columns_become_json(column: pa.Array, expected: list) -> None:
    catalogue = make_catalogue(labels(shown=column))
    answer = orjson.loads(orjson.dumps(catalogue.answered(np.array([0, 1, 0])).json_N))
    assert [label["display"]["shown"] for label in answer] == [*expected, expected[0]]


def test_a_column_that_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(BundleInvariantError, match=r"column 'odd' .*list<item: duration\[s\]>"):
        make_catalogue(labels(odd=pa.array([[1], [2]], pa.list_(pa.duration("s")))))


def test_ids_to_rows_and_how_many_are_unknown() -> None:
    catalogue = make_catalogue(labels(200_000))
    rows, unknown = catalogue.rows(["id-199999", "id-3", "id-70000", "id-3", "other", 17])
    assert (rows.tolist(), unknown) == ([3, 70_000, 199_999], 2)
    assert catalogue.rows([])[0].dtype == np.int64
