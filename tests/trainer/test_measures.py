"""Numbers, vectors and dates, from a column and from a request, by hand. Of queries u0 … u3, u0 and u1 train."""

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import FeatureReader
from longtail.trainer.data.encode import Encoding
from longtail.trainer.errors import DataError
from tests.trainer import tiny
from tests.trainer.test_features import describe_queries, encode, inputs

VECTOR = {"name": "image", "kind": "vector", "dims": 2}
DATE = {"name": "born", "kind": "date", "dim": 3}
AGE = {"name": "age", "kind": "number"}


def read(encoding: Encoding, *values: Any) -> dict[str, list[object]]:
    """Tower inputs of requests that give one feature."""
    (feature,) = encoding.query_features
    inputs = FeatureReader([feature], {}).read([{feature.name: value} for value in values])
    return {name: column.tolist() for name, column in inputs.items()}


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float16(), 2)])
def test_a_vector_is_a_list_of_numbers_and_a_missing_one_is_zeros_and_a_flag(kind: pa.DataType) -> None:
    values = [[1.5, -2.0], None, [0.0, 0.25], [4.0, 8.0]]
    dataset = describe_queries(image=pa.array(np.array(values, object) if kind == "float16" else values, kind))
    expected = {"image": [[1.5, -2], [0, 0], [0, 0.25], [4, 8]], "image__missing": [0, 1, 0, 0]}

    assert inputs(dataset, VECTOR) == expected
    assert read(encode(dataset, VECTOR), *values) == expected
    assert encode(dataset, VECTOR).query_features[0].expects == "a list of 2 finite numbers"


def test_missing_number_is_the_mean_of_logarithms() -> None:
    dataset = describe_queries(age=[np.expm1(1), np.expm1(3), None, -7.0])
    encoding = encode(dataset, AGE | {"transform": "log"})

    assert encoding.numbers == {"age": (pytest.approx(2), pytest.approx(1))}
    assert encoding.query_features[0].missing == pytest.approx(np.expm1(2))
    assert read(encoding, None, -7) == {"age": [pytest.approx(np.expm1(2)), -7]}


def test_ranges_hold_as_many_training_values_each() -> None:
    """Quartiles of 0 … 8 are 2, 4 and 6; a value on a boundary belongs to the range above; row 0 is missing."""
    train = tiny.pairs(*[(query, 0) for query in range(9)])
    table = pa.table({"age": [*range(9), None, -5, 100, 2, 3]})
    dataset = tiny.dataset(train, queries=14, labels=1, query_table=table)
    encoding = encode(dataset, AGE | {"transform": "quantile", "buckets": 4})

    assert encoding.query_features[0].boundaries == [2, 4, 6]
    expected = [1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 1, 4, 2, 2]
    assert encoding.query.query_inputs(np.arange(14, dtype=np.int32))["age"].tolist() == expected
    assert read(encoding, *table["age"].to_pylist()) == {"age": expected}


SUNDAY = dt.datetime(2026, 11, 22, 8, 30, tzinfo=dt.UTC)
SECONDS = [SUNDAY, SUNDAY - dt.timedelta(days=3, hours=9), None, SUNDAY + dt.timedelta(seconds=30)]
ROWS = [[9, 31, 42, 45], [24, 27, 42, 47], [0, 0, 0, 0], [9, 31, 42, 44]]
"""Hour 8 → 9, Sunday → 31, November → 42, no day before the latest → 45; 23 h on a Wednesday 3 days before → 45 + 2;
missing; and after the latest → 44."""


@pytest.mark.parametrize(
    "column",
    [
        pa.array(SECONDS, pa.timestamp("ns", "UTC")),
        pa.array(SECONDS, pa.timestamp("s", "Asia/Tokyo")),
        pa.array([at and at.replace(tzinfo=None) for at in SECONDS], pa.timestamp("us")),
        pa.array([at and at.isoformat() for at in SECONDS]),
        pa.array([at and at.astimezone(dt.timezone(dt.timedelta(hours=-5))).isoformat() for at in SECONDS]),
    ],
)
def test_a_date_is_its_hour_weekday_month_and_age(column: pa.Array) -> None:
    dataset = describe_queries(born=column)

    assert inputs(dataset, DATE) == {"born": ROWS}
    assert read(encode(dataset, DATE), *[at and at.isoformat() for at in SECONDS]) == {"born": ROWS}


def test_exported_means_ranges_and_dates_are_used_for_other_data() -> None:
    features = [AGE | {"transform": "quantile", "buckets": 2}, DATE, AGE | {"name": "height"}]
    first = encode(describe_queries(age=[1, 3, 0, 0], born=SECONDS, height=[2.0, 4.0, 0, 0]), *features)
    later = describe_queries(age=[10, 30, 0, 0], born=[dt.datetime(2030, 1, 1)] * 4, height=[8.0, None, 0, 0])

    job = tiny.recipe(query={"features": [feature | {"unknown_rate": 0} for feature in features]})
    encoding = Encoding.fit(job, later, first.vocabularies, first.query_features)

    assert [feature.model_dump() for feature in encoding.query_features] == [
        feature.model_dump() for feature in first.query_features
    ]
    inputs = encoding.query.query_inputs(np.int32([0, 1]))
    assert (inputs["age"].tolist(), inputs["height"].tolist()) == ([2, 2], [8, 3])
    assert inputs["born"][:, 3].tolist() == [44, 44]


def test_numbers_are_read_out_of_text_and_booleans() -> None:
    for column in (["1", " 0.0 ", "", None], [True, False, None, None], [Decimal("1.0"), Decimal(0), None, None]):
        assert inputs(describe_queries(age=column), AGE) == {"age": [1, 0, 0.5, 0.5]}


@pytest.mark.parametrize("value", [0.1, 3e38, 1e-40])
@pytest.mark.parametrize("transform", ["standard", "log"])
def test_a_column_of_one_number_has_no_deviation(value: float, transform: str) -> None:
    encoding = encode(describe_queries(age=[value] * 4), AGE | {"transform": transform})
    assert encoding.numbers["age"][1] == 1


@pytest.mark.parametrize("values", [[1e-37, 3e-37], [-8e37, 8e37], [1e30, 1e30, 1e38]])
def test_standardisable_numbers_are_accepted(values: list[float]) -> None:
    dataset = tiny.dataset(
        tiny.pairs(*[(query, 0) for query in range(len(values))]), queries=len(values), labels=1,
        query_table=pa.table({"age": values}),
    )  # fmt: skip
    mean, std = encode(dataset, AGE).numbers["age"]
    got = np.float32(values) * np.float32(1 / std) + np.float32(-mean / std)
    assert got.tolist() == pytest.approx(((np.array(values) - mean) / std).tolist(), abs=1e-5)


BAD = {
    "another length": ({"image": [[1.0, 2], [1.0], None, None]}, VECTOR, "lists of 2 numbers, found one of 1 of 'u1'"),
    "no vector": ({"image": [1.0] * 4}, VECTOR, "lists of 2 numbers, found double"),
    "words": ({"image": [["a", "b"]] * 4}, VECTOR, "lists of 2 numbers, found list<.*string>"),
    "NaN inside": ({"image": [None, None, [1, np.nan], None]}, VECTOR, "finite numbers up to .* found nan of 'u2'"),
    "null inside": ({"image": [None, [None, 1.0], None, None]}, VECTOR, "finite numbers up to .* found nan of 'u1'"),
    "beyond float32": ({"image": [[0, 1e39]] * 4}, VECTOR, "finite numbers up to .* found inf of 'u0'"),
    "a word among numbers": ({"age": ["1", "2", "n/a", None]}, AGE, "numbers, found string, such as 'n/a' of 'u2'"),
    "a number with underscores": ({"age": ["1_000", "2", "3", None]}, AGE, "numbers, found string, such as '1_000'"),
    "squares beyond float32": ({"image": [[0, 2e19]] * 4}, VECTOR, "finite numbers up to 1.8e.19, whose squares"),
    "a subnormal deviation": ({"age": [0, 1e-40, 0, 0]}, AGE, "numbers that float32 can standardise"),
    "a deviation near the end": ({"age": [-3e38, 3e38, 0, 0]}, AGE, "numbers that float32 can standardise"),
    "infinity": ({"age": [1.0, np.inf, 1, 1]}, AGE, "finite numbers or nulls, found inf of 'u1'"),
    "numbers as dates": ({"born": [1.0] * 4}, DATE, "timestamps, dates, or strings in ISO 8601, found double"),
    "no date": (
        {"born": ["2026-01-01", "soon", None, None]},
        DATE,
        ".*strings in ISO 8601, found string, such as 'soon' of 'u1'",
    ),
}


@pytest.mark.parametrize(("columns", "feature", "message"), BAD.values(), ids=BAD)
def test_column_of_another_kind_is_refused(columns: dict[str, Any], feature: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"feature '{feature['name']}' .*expected {message}"):
        encode(describe_queries(**columns), feature)


@pytest.mark.parametrize("feature", [VECTOR, AGE | {"missing": "flag"}, AGE | {"transform": "quantile"}, DATE])
def test_unknown_rate_makes_values_missing_in_training(feature: dict[str, Any]) -> None:
    rows = tiny.pairs(*[(query, 0) for query in range(2000)])
    columns = {"image": [[1.0, 2.0]] * 2000, "age": [1.0, 2.0] * 1000, "born": [SUNDAY] * 2000}
    dataset = tiny.dataset(rows, queries=2000, labels=1, query_table=pa.table(columns))
    query = encode(dataset, feature | {"unknown_rate": 0.25}).query

    name = feature["name"]
    training = query.pair_inputs(np.arange(2000), np.random.default_rng(0))
    missing = training[f"{name}__missing"] if f"{name}__missing" in training else training[name] == 0
    assert missing.mean() == pytest.approx(0.25, abs=0.04)
    served = query.query_inputs(np.arange(2000, dtype=np.int32))
    assert not served[f"{name}__missing"].any() if f"{name}__missing" in served else served[name].all()
