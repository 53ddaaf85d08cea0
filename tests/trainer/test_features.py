from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from longtail.bundle import FeatureReader
from longtail.bundle.vocabulary import hash_token
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.encode import Encoding
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.errors import DataError
from tests.trainer import tiny

HISTORY = {"name": "seen", "kind": "history", "table": "item_id", "dim": 4, "unknown_rate": 0}


def encode(dataset: Dataset, *query: dict[str, Any], label: list[dict[str, Any]] | None = None) -> Encoding:
    features = {"features": [{"unknown_rate": 0} | feature for feature in query]}
    return Encoding.fit(
        tiny.recipe(query=features, label={"features": [tiny.ITEM, *(label or [])]}), dataset
    )  # fmt: skip


def describe_queries(**columns: Any) -> Dataset:
    """Queries u0 … u3 with a feature table; u0 and u1 occur in training."""
    return tiny.dataset(tiny.pairs((0, 0), (0, 1), (1, 0)), queries=4, labels=3, query_table=pa.table(columns))


def inputs(dataset: Dataset, feature: dict[str, Any]) -> dict[str, list[object]]:
    """Tower inputs of all four queries."""
    encoded = encode(dataset, feature).query.query_inputs(np.arange(4, dtype=np.int32))
    return {name: column.tolist() for name, column in encoded.items()}


def test_own_id_is_in_the_vocabulary_if_it_occurs_in_training() -> None:
    encoding = encode(describe_queries(), tiny.USER)

    assert encoding.vocabularies["user_id"].ids.to_pylist() == ["u0", "u1"]
    assert encoding.query.query_inputs(np.int32([0, 1, 2, 3]))["user_id"].tolist() == [1, 2, 0, 0]
    assert encoding.vocabularies["item_id"].ids.to_pylist() == ["i0", "i1"]
    assert encoding.label_inputs["item_id"].tolist() == [1, 2, 0], "a label without pairs reads row 0"


def test_held_out_and_rare_categories_are_unknown() -> None:
    dataset = describe_queries(job=["x", "y", "z", "x"])

    assert inputs(dataset, {"name": "job", "kind": "id"}) == {"job": [1, 2, 0, 1]}
    assert inputs(dataset, {"name": "job", "kind": "id", "min_count": 2}) == {"job": [0, 0, 0, 0]}


def test_bags_are_lists_maps_or_separated_strings() -> None:
    lists = describe_queries(tags=[["a", "b"], ["c"], [], None])
    strings = describe_queries(tags=["a|b", "c", "", None])
    maps = describe_queries(
        tags=pa.array([[("a", 0.5), ("b", -2)], [("c", 3)], [], None], pa.map_(pa.string(), pa.float64()))
    )
    large = describe_queries(tags=pa.array([["a", "b"], ["c"], [], None], pa.large_list(pa.large_string())))
    feature = {"name": "tags", "kind": "bag"}
    ids = [[1, 2], [3, 0], [0, 0], [0, 0]]

    assert inputs(lists, feature) == {"tags": ids, "tags__weight": [[1, 1], [1, 0], [0, 0], [0, 0]]}
    assert inputs(large, feature) == inputs(lists, feature)
    assert inputs(maps, feature) == {"tags": ids, "tags__weight": [[0.5, -2], [3, 0], [0, 0], [0, 0]]}
    encoded = inputs(strings, feature | {"separator": "|"})
    assert encoded["tags"][:2] == ids[:2]
    assert encoded["tags__weight"][:2] == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("tags", "separator"),
    [
        (["a, b", "c,", " ", None], ","),
        (["a b", "c", "", None], " "),
        (["['a', 'b']", "['c']", "[]", None], None),
        (["['a' 'b']", "['c']", "[]", None], ","),
        (['["a", "b"]', '["c"]', "", None], None),
    ],
)
def test_joined_values_are_trimmed_and_lists_as_text_are_lists(tags: list[str | None], separator: str | None) -> None:
    feature = {"name": "tags", "kind": "bag", "separator": separator}
    encoding = encode(describe_queries(tags=tags), feature)

    assert encoding.vocabularies["tags"].ids.to_pylist() == ["a", "b", "c"]
    assert encoding.query_features[0].separator == separator
    assert inputs(describe_queries(tags=tags), feature)["tags"] == [[1, 2], [3, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("job", "ids"),
    [
        ([39.0, 0.5, None, 1.0], ["39", "0.5"]),
        (np.float32([0.1, 39, np.nan, 1]), ["0.1", "39"]),
        ([Decimal("1.50"), Decimal("2.00"), None, Decimal(1)], ["1.5", "2"]),
        ([7, 8, None, 7], ["7", "8"]),
        (["x", "y", None, "x"], ["x", "y"]),
        ([True, False, None, True], ["true", "false"]),
        (["True", "False", None, "True"], ["true", "false"]),
        (["39.0", "7.0", None, "1"], ["39", "7"]),
    ],
)
def test_ids_of_any_type_are_text(job: Any, ids: list[str]) -> None:
    encoding = encode(describe_queries(job=job), {"name": "job", "kind": "id"})
    encoded = encoding.query.query_inputs(np.arange(4, dtype=np.int32))
    reader = FeatureReader(encoding.query_features, encoding.vocabularies)
    requests = [value if isinstance(value, str | bool) else float(str(value)) for value in job[:2]]

    assert encoding.vocabularies["job"].ids.to_pylist() == ids
    assert encoded["job"].tolist() == [1, 2, 0, int(job[3] == job[0])]
    assert reader.read([{"job": value} for value in requests])["job"].tolist() == [1, 2]


def test_list_entries_are_ids() -> None:
    encoding = encode(describe_queries(tags=[[39.0, 0.5], [], None, []]), {"name": "tags", "kind": "bag"})

    assert encoding.vocabularies["tags"].ids.to_pylist() == ["39", "0.5"]


def test_text_is_hashed_as_the_service_hashes_it() -> None:
    dataset = describe_queries(title=["Toy STORY", "toy", "", None])
    encoded = inputs(dataset, {"name": "title", "kind": "text", "hash_rows": 50})

    toy, story = hash_token("toy", 50), hash_token("story", 50)
    assert encoded == {
        "title": [[toy, story], [toy, 0], [0, 0], [0, 0]],
        "title__weight": [[1, 1], [1, 0], [0, 0], [0, 0]],
    }


@pytest.mark.parametrize("values", [[2.0, 6.0, None, 100.0], [2, 6, None, 100], [2.0, 6.0, float("nan"), 100.0]])
def test_numbers_are_raw_with_the_training_mean_where_missing(values: list[float | None]) -> None:
    encoding = encode(describe_queries(age=values), {"name": "age", "kind": "number"})

    assert encoding.query.query_inputs(np.int32([0, 1, 2, 3]))["age"].tolist() == [2, 6, 4, 100]
    assert encoding.numbers == {"age": (4.0, 2.0)}, "mean and deviation of queries that occur in training"
    assert encoding.query_features[0].missing == 4.0


def test_numbers_are_standardised_in_the_tower() -> None:
    job = tiny.recipe(
        query={"features": [{"name": "age", "kind": "number"}]}, model={"dim": 1, "similarity": "dot"}
    )  # fmt: skip
    model = tiny.model(job, describe_queries(age=[2.0, 6.0, None, 100.0]), batch_size=2)

    assert model.embed_queries({"age": np.float32([2, 4, 6, 100])}).ravel().tolist() == [-1, 0, 1, 48]


def test_features_of_one_table_share_its_vocabulary() -> None:
    dataset = describe_queries(first=["x", "y", "x", "x"], second=["z", "x", "q", "x"])
    features = [{"name": name, "kind": "id", "table": "words"} for name in ("first", "second")]
    encoding = encode(dataset, *features)

    assert encoding.vocabularies["words"].ids.to_pylist() == ["x", "y", "z"]
    assert encoding.query.query_inputs(np.int32([0, 1]))["second"].tolist() == [3, 1]


BAD_COLUMNS = {
    "no table": ({}, {"name": "job", "kind": "id"}, "expected a column 'job', found none"),
    "no column": ({"age": [1, 2, 3, 4]}, {"name": "job", "kind": "id"}, "expected a column 'job', found age"),
    "date category": (
        {"job": pa.array([1] * 4, pa.date32())}, {"name": "job", "kind": "id"}, "expected strings, numbers or booleans"
    ),
    "string as bag": ({"tags": ["a|b"] * 4}, {"name": "tags", "kind": "bag"}, "strings with a separator, found string"),
    "not only lists as text": (
        {"tags": ["['a']", None, "b", ""]}, {"name": "tags", "kind": "bag"}, "found string, such as 'b' of 'u2'"
    ),
    "bag of bytes": ({"tags": [[b"x"]] * 4}, {"name": "tags", "kind": "bag"}, "numbers or booleans, found binary"),
    "NaN in a bag": (
        {"tags": pa.array([[("a", float("nan"))]] * 4, pa.map_(pa.string(), pa.float32()))},
        {"name": "tags", "kind": "bag"}, "expected finite weights, found nan",
    ),
    "a date that no calendar has": (
        {"since": pa.array([-(10**11)] * 4, pa.timestamp("s"))}, {"name": "since", "kind": "date"},
        "expected times of the years 1 to 9999, found -100000000000 seconds since 1970",
    ),
    "weights that are no numbers": (
        {"tags": pa.array([[("a", "x")]] * 4, pa.map_(pa.string(), pa.string()))},
        {"name": "tags", "kind": "bag"}, "expected weights as numbers, found string",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "feature", "message"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_column_of_a_wrong_type_is_refused(columns: dict[str, Any], feature: dict[str, Any], message: str) -> None:
    dataset = describe_queries(**columns) if columns else tiny.dataset(tiny.pairs((0, 0)), queries=1, labels=1)

    with pytest.raises(DataError, match=f"feature '{feature['name']}'.*{message}"):
        encode(dataset, feature)


def histories(dataset: Dataset, rows: np.ndarray, *, max_length: int = 50, seed: int = 0) -> list[list[int]]:
    """The labels in the histories of training pairs."""
    label_of_row = [-1, *np.unique(dataset.train.labels).tolist()]
    query = encode(dataset, HISTORY | {"max_length": max_length}).query
    encoded = query.pair_inputs(rows, np.random.default_rng(seed))
    return [
        [label_of_row[id_] for id_, weight in zip(ids, weights, strict=True) if weight]
        for ids, weights in zip(encoded["seen"].tolist(), encoded["seen__weight"].tolist(), strict=True)
    ]


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=30),
    ordered=st.booleans(),
    max_length=st.integers(1, 9),
)
def test_no_history_contains_its_positive(rows: list[tuple[int, int]], ordered: bool, max_length: int) -> None:
    dataset = tiny.dataset(tiny.pairs(*rows), queries=4, labels=6, ordered=ordered)
    train = dataset.train

    histories_read = histories(dataset, np.arange(len(train)), max_length=max_length)

    for at, history in enumerate(histories_read):
        query, positive = train.queries[at], train.labels[at]
        visible_labels = train.labels[:at] if ordered else train.labels
        others = visible_labels[(train.queries[: len(visible_labels)] == query) & (visible_labels != positive)].tolist()
        assert positive not in history
        assert len(history) <= max_length
        assert set(history) <= set(others)
        if len(train.labels[train.queries == query]) <= max_length:
            assert sorted(history) == sorted(others), "nothing else is left out"


def test_ordered_history_is_the_latest_earlier_pairs() -> None:
    dataset = tiny.dataset(tiny.pairs(*[(0, label) for label in (3, 1, 4, 0, 2)]), queries=1, labels=5, ordered=True)

    assert histories(dataset, np.arange(5), max_length=2) == [[], [3], [3, 1], [1, 4], [4, 0]]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_history_may_be_of_some_event_types(ordered: bool) -> None:
    """Views and purchases: the history is of purchases, and of purchases alone, before every pair or beside it."""
    rows = [(0, 4, 0), (0, 1, 1), (0, 2, 0), (0, 3, 1), (1, 0, 0), (1, 3, 1), (1, 2, 0)]
    queries, labels, events = np.array(rows, np.int32).T
    train = Pairs(queries, labels, times=np.arange(7.0), events=events)
    dataset = tiny.dataset(train, queries=3, labels=5, ordered=ordered)
    job = tiny.recipe(
        data={"events": {"column": "event", "weights": {"view": 1, "purchase": 5}}},
        query={"features": [HISTORY | {"events": ["purchase"]}]},
    )
    query = Encoding.fit(job, dataset).query

    encoded = query.pair_inputs(np.arange(7), np.random.default_rng(0))
    entries = [
        [id_ - 1 for id_, weight in zip(ids, weights, strict=True) if weight]
        for ids, weights in zip(encoded["seen"].tolist(), encoded["seen__weight"].tolist(), strict=True)
    ]
    before, around = [[], [], [1], [1], [], [], [3]], [[1, 3], [3], [1, 3], [1], [3], [], [3]]
    assert entries == (before if ordered else around)
    later = Pairs(np.int32([1, 2]), np.int32([4, 0]), times=np.float64([8, 9]), events=np.int32([1, 0]))
    served = query.with_history(Past.fixed(train.merge_later(later), queries=3)).query_inputs(np.int32([0, 1, 2]))
    assert served["seen"].tolist() == [[2, 4], [4, 5], [0, 0]]


def test_event_types_come_from_their_column_and_those_of_weight_0_are_left_out(tmp_path: Path) -> None:
    rows = {"user_id": ["a", "a", "b", "b"], "item_id": [1, 2, 3, 1], "event": ["buy", "view", "skip", "buy"]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    weights = {"view": 1, "skip": 0, "buy": 5}
    job = tiny.recipe(data={"train": tmp_path / "log.parquet", "events": {"column": "event", "weights": weights}})

    train = load_dataset(job.data, seed=0).train

    assert train.events is not None
    assert train.events.tolist() == [2, 0, 2]
    assert train.weights is not None
    assert train.weights.tolist() == [5, 1, 5]


def test_long_unordered_history_is_a_random_window() -> None:
    dataset = tiny.dataset(tiny.pairs(*[(0, label) for label in range(40)]), queries=1, labels=40)
    rows = np.arange(40)
    windows, again, other = (histories(dataset, rows, max_length=8, seed=seed) for seed in (1, 1, 2))

    assert windows == again
    assert windows != other
    assert {len(history) for history in windows} <= {7, 8}
    assert set().union(*windows) > set(range(20))


def test_served_history_is_all_known_pairs_latest_last() -> None:
    dataset = tiny.dataset(tiny.pairs((0, 1), (0, 2), (0, 0), (1, 2)), queries=3, labels=4, ordered=True)
    query = encode(dataset, HISTORY | {"max_length": 2}).query
    encoded = query.query_inputs(np.int32([0, 1, 2]))

    assert encoded["seen"].tolist() == [[3, 1], [3, 0], [0, 0]]
    assert encoded["seen__weight"].tolist() == [[1, 1], [1, 0], [0, 0]]

    later = query.with_history(Past.fixed(dataset.train.merge_later(tiny.pairs((0, 3), (2, 1))), queries=3))
    assert later.query_inputs(np.int32([0, 1, 2]))["seen"].tolist() == [[1, 0], [3, 0], [2, 0]]
    assert later.query_inputs(np.int32([0, 1, 2]))["seen__weight"].tolist() == [[1, 1], [1, 0], [1, 0]]


@pytest.mark.parametrize("kind", ["id", "history"])
def test_unknown_rate_applies_in_training_only(kind: str) -> None:
    rows = [(query, label) for query in range(100) for label in range(20)]
    dataset = tiny.dataset(tiny.pairs(*rows), queries=100, labels=20)
    feature = (tiny.USER if kind == "id" else HISTORY) | {"unknown_rate": 0.25}
    query = encode(dataset, feature).query

    encoded = query.pair_inputs(np.arange(2000), np.random.default_rng(0))
    ids = encoded[feature["name"]]
    real = encoded["seen__weight"] > 0 if kind == "history" else np.ones(2000, bool)
    assert (ids[real] == 0).mean() == pytest.approx(0.25, abs=0.04)
    served = query.query_inputs(np.arange(100, dtype=np.int32))
    assert (served[feature["name"]][:, :20] if kind == "history" else served["user_id"]).all()


@pytest.mark.parametrize(
    ("lengths", "limit", "width"),
    [([0], 50, 1), ([1], 50, 1), ([2, 3], 50, 4), ([5], 50, 8), ([40], 50, 50), ([9], 3, 3)],
)
def test_padding_is_to_a_power_of_two_at_most_the_limit(lengths: list[int], limit: int, width: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bags = Bags(offsets, np.arange(1, offsets[-1] + 1, dtype=np.int32), np.ones(offsets[-1], np.float32))

    ids, weights = bags.pad(offsets[:-1], offsets[1:], limit)

    assert ids.shape == weights.shape == (len(lengths), width)
    for row, length in enumerate(lengths):
        entries = min(length, limit)
        assert ids[row].tolist() == [offsets[row] + i + 1 for i in range(entries)] + [0] * (width - entries)
        assert weights[row].tolist() == [1] * entries + [0] * (width - entries)


def test_integers_of_a_bag_are_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps keyed by numbers, encoded three ids at a time, make the vocabulary and the rows of maps keyed by text."""
    monkeypatch.setattr("longtail.trainer.data.columns._IDS_AT_ONCE", 3)
    bags = [{7: 0.5, 3: 1.0}, {}, {12: 2.0, 7: 1.0, 5: 3.0}, {99: 1.0}]
    numbers = pa.array([list(bag.items()) for bag in bags], pa.map_(pa.int32(), pa.float32()))
    texts = pa.array(
        [[(str(id_), weight) for id_, weight in bag.items()] for bag in bags], pa.map_(pa.string(), pa.float32())
    )
    outcomes = []
    for column in (numbers, texts):
        dataset = describe_queries(tags=column)
        encoding = encode(dataset, {"name": "tags", "kind": "bag", "unknown_rate": 0})
        encoded = encoding.query.query_inputs(np.arange(4, dtype=np.int32))
        outcomes.append(
            (encoding.vocabularies["tags"].ids.to_pylist(), encoded["tags"].tolist(), encoded["tags__weight"].tolist())
        )

    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0][0]) <= {"7", "3", "12", "5", "99"}


def test_features_follow_the_vocabularies_of_an_exported_model() -> None:
    dataset = tiny.dataset(tiny.pairs((0, 0), (1, 1)), queries=2, labels=2)
    recipe = tiny.recipe(query={"features": [tiny.USER, HISTORY]})
    exported = Encoding.fit(recipe, dataset).vocabularies
    later = tiny.dataset(Pairs(np.int32([1, 2]), np.int32([2, 0])), queries=3, labels=3)

    encoding = Encoding.fit(recipe, later, exported)

    encoded = encoding.query.query_inputs(np.int32([0, 1, 2]))
    assert encoded["user_id"].tolist() == [1, 2, 0]
    assert encoded["seen"].tolist() == [[0], [0], [1]]
