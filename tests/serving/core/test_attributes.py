"""Filters by attribute against the same filter told label by label, on columns and through search."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle.conditions import NumberColumn
from longtail.bundle.display import DisplayColumns
from longtail.serving.core.attributes import LabelAttributes
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.errors import InvalidRequestError
from tests.bundles import make_bundle
from tests.serving.core.shop import KINDS, LABELS, draw_filter, meets, shop_bundle, shop_columns
from tests.serving.core.test_cooccurrence import changes
from tests.serving.plane import make_retriever, read_results

AT = datetime(2026, 5, 1, tzinfo=UTC)


def test_masks_equal_conditions_checked_label_by_label() -> None:
    columns = shop_columns()
    displayed = [DisplayColumns(columns).to_json(row) for row in range(LABELS)]
    attributes = LabelAttributes(columns)
    assert attributes.kinds == KINDS
    rng = np.random.default_rng(1)
    passed = []
    for _ in range(200):
        filter_ = draw_filter(rng)
        selection, beyond = attributes.select(filter_, "filter")
        assert selection.mask.tolist() == [meets(label, filter_) for label in displayed], filter_
        assert beyond is None
        passed.append(int(selection.mask.sum()))
    assert {0, LABELS} < set(passed)
    assert sum(0 < count < LABELS for count in passed) > 60


LARGE = 2**60


@pytest.mark.parametrize(
    "column",
    [
        pa.chunked_array([[7, None, LARGE + 1, LARGE, -3]]),
        pa.chunked_array([[7, None], [LARGE + 1, LARGE, -3]]),
        pa.chunked_array([pa.array([0, 7, None, LARGE + 1, LARGE, -3, 0]).slice(1, 5)]),
    ],
    ids=["whole", "in pieces", "sliced"],
)
def test_numbers_are_compared_as_they_lie_in_the_table(column: pa.ChunkedArray) -> None:
    numbers = NumberColumn(column)
    assert numbers.present.tolist() == [True, False, True, True, True]
    assert np.flatnonzero(numbers.having([LARGE, 7, 0])).tolist() == [0, 3]
    for sign, value, rows in (
        ("gt", LARGE, [2]), ("ge", LARGE, [2, 3]), ("lt", LARGE + 1, [0, 3, 4]), ("le", 6.5, [4]), ("lt", 6.5, [4]),
        ("gt", 6.5, [0, 2, 3]), ("ge", 7.0, [0, 2, 3]), ("lt", 7.0, [4]), ("ge", 2**70, []),
        ("gt", -1e30, [0, 2, 3, 4]), ("lt", 2**70, [0, 2, 3, 4]), ("le", -(2**70), []), ("lt", 10**400, [0, 2, 3, 4]),
    ):  # fmt: skip
        assert np.flatnonzero(numbers.compare(sign, value)).tolist() == rows, (sign, value)


@pytest.mark.parametrize("type_", [pa.int32(), pa.float64(), pa.date32(), pa.decimal128(5, 2)], ids=str)
@pytest.mark.parametrize("labels", [0, 3])
def test_a_column_without_any_value(type_: pa.DataType, labels: int) -> None:
    numbers = NumberColumn(pa.chunked_array([pa.nulls(labels, type_)], type_))
    for mask in (numbers.present, numbers.having([0]), numbers.compare("le", 1)):
        assert mask.tolist() == [False] * labels


def test_priors_of_a_table_stay_mapped() -> None:
    column = pa.chunked_array([np.arange(100_000.0)])
    numbers = NumberColumn(column)
    assert np.shares_memory(numbers._values_L, column.chunk(0).to_numpy())


def test_the_same_filter_is_the_same_selection_however_it_is_written() -> None:
    attributes = LabelAttributes(shop_columns())
    first, _ = attributes.select({"price": {"lt": 2, "ge": 1}, "brand": {"in": ["a", "brand-1"]}}, "filter")
    other, _ = attributes.select({"brand": {"in": ["brand-1", "a", "a"]}, "price": {"ge": 1, "lt": 2}}, "filter")
    assert first is other
    assert attributes.select({"price": {"lt": 2}}, "filter")[0] is not first


def test_labels_without_rows_or_values() -> None:
    empty = pa.table({"brand": pa.array([None, None], pa.string()), "n": pa.array([float("nan"), None])})
    attributes = LabelAttributes(empty)
    for filter_, passed in (
        ({"brand": "x"}, [False, False]),
        ({"brand": {"ne": "x"}}, [True, True]),
        ({"n": {"exists": True}}, [False, False]),
        ({"n": {"lt": 1}}, [False, False]),
    ):
        assert attributes.select(filter_, "filter")[0].mask.tolist() == passed


BAD: list[tuple[Any, str, str]] = [
    ({"nothing": 1}, "nothing", r"expected columns that this release can be filtered by, \['title', .* \"nothing\""),
    ({"box": {"exists": True}}, "box", "expected columns"),
    ({"title": 3}, "title", "expected a string, as the column is of kind string, received 3"),
    ({"price": "3"}, "price", 'expected a finite number, .* received "3"'),
    ({"price": True}, "price", "expected a finite number, .* received true"),
    ({"price": None}, "price", "expected a finite number, .* received null"),
    ({"price": {"lt": float("nan")}}, "price.lt", "expected a finite number, .* received NaN"),
    ({"price": {"in": [1, float("inf")]}}, "price.in.1", "expected a finite number, .* received Infinity"),
    ({"price": [1, 2]}, "price", "expected a finite number, .* received a list of 2"),
    ({"open": 1}, "open", "expected true or false, .* received 1"),
    ({"open": {"lt": True}}, "open.lt", r"one of the operators \['eq', 'ne', 'in', 'not_in', 'exists'\] .* \"lt\""),
    ({"brand": {"in": []}}, "brand.in", "expected a list of at least one value, received a list of 0"),
    ({"brand": {"in": "acme"}}, "brand.in", 'expected a list of at least one value, received "acme"'),
    ({"price": {"lte": 1}}, "price.lte", "received \"lte\": did you mean 'le'"),
    ({"price": {"<": 1}}, "price.<", "received \"<\": did you mean 'lt'"),
    ({"brand": {"!=": "x"}}, "brand.!=", "received \"!=\": did you mean 'ne'"),
    ({"brand": {"<": "x"}}, "brand.<", 'received "<"$'),
    ({"brand": {}}, "brand", "expected a value or one of the operators .* received none"),
    ({"brand": {"exists": 1}}, "brand.exists", "expected true or false, received 1"),
    ({"brand": {"eq": {"eq": "x"}}}, "brand.eq", "expected a string, .* received an object"),
    ({"since": "yesterday"}, "since", 'expected a date or time in ISO 8601, .* "yesterday"'),
    ({"since": {"ge": "2026-13-01"}}, "since.ge", "expected a date or time"),
    ({"tags": {"in": [["t1"]]}}, "tags.in.0", "expected a string, .* received a list of 1"),
    ({"x" * 9_999: 1}, "x" * 100, "expected columns .*9999 characters"),
    ({"price": {"y" * 9_999: 1}}, f"price.{'y' * 100}", "expected one of the operators .*9999 characters"),
]


@pytest.mark.parametrize(("filter_", "field", "message"), BAD, ids=[field[:20] for _, field, _ in BAD])
def test_mismatched_conditions_are_named(filter_: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        LabelAttributes(shop_columns()).select(filter_, "queries.0.filter")
    assert caught.value.field == f"queries.0.filter.{field}"


def test_similar_labels_and_drawn_ones_pass_too() -> None:
    retriever = make_retriever(shop_bundle(), "flat", *changes())
    request = {"filter": {"price": {"lt": 2.0}, "brand": {"exists": True}}, "k": 9}
    answers = [
        *read_results(retriever.similar([SimilarQuery.model_validate({"id": "item-3", **request})])),
        *read_results(
            retriever.retrieve(
                [RetrieveQuery.model_validate({"features": {}, **request, "explore": {"tail": 2, "new": 1}})]
            )
        ),
    ]
    for answer in answers:
        assert len(answer["labels"]) == 9
        for label in answer["labels"]:
            assert meets(label["display"], request["filter"])
    assert answers[1]["exploration"]["slots"] == {"tail": 2, "new": 1}


def test_with_a_tree() -> None:
    bundle = make_bundle(labels=90, proposal=True)
    retriever = make_retriever(bundle)
    expected = [f"Title {row}" for row in range(0, 90, 4)]

    def ids(**options: Any) -> list[str]:
        query = RetrieveQuery.model_validate({"features": {"user_id": "u3"}, "k": 12, "bias_removal": 1.0, **options})
        return [label["id"] for label in read_results(retriever.retrieve([query, query]))[1]["labels"]]

    by_filter = ids(filter={"title": {"in": expected}}, exclude=["item-8"])
    assert by_filter == ids(allow=[f"item-{row}" for row in range(0, 90, 4)], exclude=["item-8"])
    assert len(by_filter) == 12
