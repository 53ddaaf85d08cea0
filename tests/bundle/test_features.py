"""Feature values to tower inputs, by hand. Vocabulary rows: out-of-vocabulary 0, north 1, east 2."""

import zlib
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Feature, FeatureError, FeatureReader, Features, Vocabulary
from longtail.bundle.dates import parse_seconds
from longtail.bundle.features import says_nothing
from longtail.bundle.ids import split_ids, to_ids
from longtail.bundle.vocabulary import split_words

FEATURES = [
    Feature(name="user", kind="id", vocabulary="users"),
    Feature(name="seen", kind="history", vocabulary="users", max_length=2),
    Feature(name="tags", kind="bag", vocabulary="users", max_length=3),
    Feature(name="words", kind="text", hash_rows=11, max_length=3),
    Feature(name="age", kind="number", missing=7.5),
]
VOCABULARIES = {"users": Vocabulary(pa.array(["north", "east"]))}


def read(*features_B: Features, **pad_to: int) -> dict[str, list]:
    inputs = FeatureReader(FEATURES, VOCABULARIES, pad_to).read(features_B)
    assert {array.dtype for name, array in inputs.items() if name in ("user", "seen", "tags", "words")} == {
        np.dtype(np.int32)
    }
    assert {array.dtype for name, array in inputs.items() if "__weight" in name or name == "age"} == {
        np.dtype(np.float32)
    }
    return {name: array.tolist() for name, array in inputs.items()}


def row(token: str) -> int:
    return 1 + zlib.crc32(token.encode()) % 10


def test_missing_and_null_features_are_out_of_vocabulary_empty_or_the_training_mean() -> None:
    expected = {
        "user": [0, 0],
        "seen": [[0], [0]],
        "seen__weight": [[0], [0]],
        "tags": [[0], [0]],
        "tags__weight": [[0], [0]],
        "words": [[0], [0]],
        "words__weight": [[0], [0]],
        "age": [7.5, 7.5],
    }
    assert read({}, dict.fromkeys(["user", "seen", "tags", "words", "age"])) == expected


def test_rows_without_known_features_are_found() -> None:
    """Missing values, unknown ids, empty lists, and the training mean of a number."""
    features = [
        *FEATURES,
        Feature(name="since", kind="date", parts=["hour", "age"], reference=datetime(2026, 1, 1, tzinfo=UTC)),
        Feature(name="size", kind="number", missing=None),
        Feature(name="range", kind="number", boundaries=[0.0, 1.0]),
        Feature(name="face", kind="vector", dims=2, missing=None),
    ]
    nothing: list[Features] = [
        {}, {"user": "nobody", "seen": []}, {"seen": ["nobody"], "tags": {"north": 0}}, {"words": "", "age": 7.5},
    ]  # fmt: skip
    something: list[Features] = [
        {"user": "north"}, {"seen": ["nobody", "east"]}, {"tags": {"north": -1}}, {"words": "a"}, {"age": 0},
        {"since": "2025-01-01"}, {"size": 0}, {"range": -3}, {"face": [0, 0]},
    ]  # fmt: skip
    reader = FeatureReader(features, VOCABULARIES)
    assert says_nothing(features, reader.read([*nothing, *something])).tolist() == [True] * 4 + [False] * 9


def test_audience_keeps_all_entries() -> None:
    features = [Feature(name="by", kind="audience", vocabulary="users")]
    many = ["north", "east", *["nobody"] * 300]
    inputs = FeatureReader(features, VOCABULARIES).read([{"by": many}, {}, {"by": ["east", 7]}])
    assert inputs["by"].tolist() == [[1, 2, *[0] * 300], [0] * 302, [2, *[0] * 301]]
    assert inputs["by__weight"].sum(axis=1).tolist() == [302, 0, 2]
    with pytest.raises(FeatureError, match=r"expected a list of ids .* of queries that chose the label, received"):
        FeatureReader(features, VOCABULARIES).read([{"by": {"north": 2}}])
    with pytest.raises(ValueError, match="max_length belongs to history, bag and text"):
        Feature(name="by", kind="audience", vocabulary="users", max_length=3)
    with pytest.raises(ValueError, match="vocabulary belongs to id, history, audience, bag"):
        Feature(name="by", kind="audience")


def test_history_keeps_the_last_entries_and_pads_with_weight_0() -> None:
    inputs = read({"seen": ["north"]}, {"seen": ["north", "east", "east"]}, {"seen": ["east", "nowhere"]})
    assert inputs["seen"] == [[1, 0], [2, 2], [2, 0]]
    assert inputs["seen__weight"] == [[1, 0], [1, 1], [1, 1]]


def test_a_bag_is_a_list_or_weights_by_id() -> None:
    inputs = read({"tags": {"east": 0.5, "north": -2}}, {"tags": ["north"]}, {"tags": {}})
    assert inputs["tags"] == [[2, 1], [1, 0], [0, 0]]
    assert inputs["tags__weight"] == [[0.5, -2], [1, 0], [0, 0]]
    assert read({"tags": {"a": 1, "b": 2, "east": 3, "north": 4}})["tags__weight"] == [[2, 3, 4]]


def test_text_with_a_vocabulary_is_split_at_spaces() -> None:
    # Of ASCII alone: É keeps its case, ’ and the no-break space stay in their words.
    kinds = {
        "none": ["North,", "east", "EAST\u00a0É’", "north"],
        "lower": ["north,", "east", "east\u00a0É’", "north"],
        "strip_punctuation": ["North", "east", "EAST\u00a0É’", "north"],
        "lower_and_strip_punctuation": ["north", "east", "east\u00a0É’", "north"],
    }
    text = " North,\teast\n\x0bEAST\u00a0É’  north "
    for standardize, words in kinds.items():
        assert split_words(text, standardize) == words
    assert split_words("a - b", "strip_punctuation") == ["a", "b"]
    feature = Feature(name="q", kind="text", vocabulary="users", standardize="lower", max_length=3)
    inputs = FeatureReader([feature], VOCABULARIES).read([{"q": "East is NORTH east"}, {"q": ""}, {}])
    assert inputs["q"].tolist() == [[2, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert inputs["q__weight"].tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert feature.inputs.keys() == {"q", "q__weight"}
    with pytest.raises(FeatureError, match="expected a string, received"):
        FeatureReader([feature], VOCABULARIES).read([{"q": ["East"]}])


def test_text_is_hashed_like_in_training() -> None:
    inputs = read({"words": "The North, the EAST"}, {"words": "…"})
    assert inputs["words"] == [[row("north"), row("the"), row("east")], [0, 0, 0]]
    assert inputs["words__weight"] == [[1, 1, 1], [0, 0, 0]]


def test_ids_are_strings_or_integers_side_by_side() -> None:
    numbers = {"n": Vocabulary(pa.array(["7", "8"]))}
    features = [
        Feature(name="id", kind="id", vocabulary="n"),
        Feature(name="ids", kind="bag", vocabulary="n", max_length=9),
    ]
    batch = [{"id": 8, "ids": ["7", 8, 9]}, {"id": "7", "ids": {"8": 0.5}}, {"ids": [7]}]
    inputs = FeatureReader(features, numbers).read(batch)
    assert inputs["id"].tolist() == [2, 1, 0]
    assert inputs["ids"].tolist() == [[1, 2, 0], [2, 0, 0], [1, 0, 0]]
    assert inputs["ids__weight"].tolist() == [[1, 1, 1], [0.5, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("features", "field", "message"),
    [
        ({"usr": 1}, "features.usr", "expected one of the features ['user', 'seen', 'tags', 'words', 'age'], received"),
        ({"u" * 200: 1}, f"features.{'u' * 100}", "expected one of the features"),
        ({"user": ["north"]}, "features.user", "expected an id (a string, number or boolean), received a list of 1"),
        ({"user": float("inf")}, "features.user", "expected an id (a string, number or boolean), received Infinity"),
        ({"seen": "north"}, "features.seen", "expected a list of ids (strings, numbers or booleans), oldest first, re"),
        ({"seen": "['north']"}, "features.seen", "expected a list of ids (strings, numbers or booleans), oldest first"),
        ({"tags": "north"}, "features.tags", "expected a list of ids (strings, numbers or booleans), or an object"),
        ({"seen": ["a", None, "b", "c"]}, "features.seen.1", "expected an id (a string, number or boolean), received"),
        ({"tags": {"a": "1"}}, "features.tags.a", 'expected a finite number, received "1"'),
        ({"tags": {"a": 1, "b" * 200: 1e39}}, f"features.tags.{'b' * 100}", "expected a finite number that float32"),
        ({"words": ["north"]}, "features.words", "expected a string, received a list of 1"),
        ({"age": float("nan")}, "features.age", "expected a finite number that float32 can hold, received NaN"),
        ({"age": "1e39"}, "features.age", "expected a finite number that float32 can hold, received 1e+39"),
        ({"age": "nan"}, "features.age", 'expected a finite number, received "nan"'),
        ({"age": "1_000"}, "features.age", 'expected a finite number, received "1_000"'),
        ({"age": [1]}, "features.age", "expected a finite number, received a list of 1"),
    ],
)  # fmt: skip
def test_other_values_are_refused_by_row_and_feature(features: Features, field: str, message: str) -> None:
    with pytest.raises(FeatureError) as caught:
        read({}, {"user": None}, features)
    assert (caught.value.row, caught.value.field) == (2, field)
    assert caught.value.message.startswith(message)
    assert isinstance(caught.value, ValueError)


def test_ids_of_requests_equal_ids_of_columns() -> None:
    """In columns and requests 39.0 is 39, true is `true`, and a number is its shortest decimal text."""
    columns = [
        pa.array([39.0, 0.1, 1e22, 1e-7, -0.0]),
        pa.array([39.0, 0.1], pa.float32()),
        pa.array([Decimal("39.00"), Decimal("0.10")]),
        pa.array([True, False]),
        pa.array([39, -7]),
    ]
    ids = pa.concat_arrays([to_ids(column) for column in columns]).to_pylist()
    assert ids == ["39", "0.1", "1" + 22 * "0", "0.0000001", "0", "39", "0.1", "39", "0.1", "true", "false", "39", "-7"]
    assert to_ids(pa.array([1.0, None, float("nan")])).to_pylist() == ["1", None, None]
    with pytest.raises(TypeError, match="finite"):
        to_ids(pa.array([1.0, float("inf")]))
    vocabulary = Vocabulary(pa.array(["39", "0.1", "true", "café"]))
    reader = FeatureReader([Feature(name="id", kind="id", vocabulary="v")], {"v": vocabulary})
    values = [39.0, 39, "39", "39.0", 0.1, "0.1", True, "true", "True", "café", "cafe\u0301", False]
    assert reader.read([{"id": value} for value in values])["id"].tolist() == [1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 0, 0]


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        (["True", None, "False"], ["true", None, "false"]),
        (["TRUE", "true"], ["true", "true"]),
        (["True", "maybe"], ["True", "maybe"]),
        (["39.0", "7", None], ["39", "7", None]),
        (["39.0", "7.5"], ["39.0", "7.5"]),
        (["007.0", "39.0"], ["007.0", "39.0"]),
        (["", "39.0"], ["", "39.0"]),
        ([None, None], [None, None]),
    ],
)  # fmt: skip
def test_text_column_of_booleans_or_integers_has_canonical_ids(column: list[str | None], ids: list[str | None]) -> None:
    assert to_ids(pa.array(column, pa.string())).to_pylist() == ids


@pytest.mark.parametrize(
    ("text", "separator", "parts"),
    [
        ("red, blue", ",", ["red", "blue"]),
        (" red |  | light blue|", "|", ["red", "light blue"]),
        ("", ",", []),
        ("['red', 'blue']", None, ["red", "blue"]),
        ('["red", "it\'s"]', ",", ["red", "it's"]),
        ("['a, b' 'c']", ",", ["a, b", "c"]),
        (r'["\u00e9", "a\/b"]', None, ["é", "a/b"]),
        ("[1, 2.0, True, nan, None]", None, ["1", "2", "true"]),
        ("[1 2\n 3]", None, ["1", "2", "3"]),
        ("[]", None, []),
        ("[REC]", None, None),
        ("[REC], red", ",", ["[REC]", "red"]),
        ("[007]", None, None),
        (r"['\x']", None, None),
        ("red, blue", None, None),
    ],
)  # fmt: skip
def test_joined_and_printed_lists_are_split(text: str, separator: str | None, parts: list[str] | None) -> None:
    assert split_ids(text, separator) == parts


def test_a_bag_with_a_separator_takes_text() -> None:
    tags = Feature(name="tags", kind="bag", vocabulary="users", separator="|", max_length=3)
    reader = FeatureReader([tags], VOCABULARIES)
    inputs = reader.read([{"tags": value} for value in ("north | east|", "['east']", "", ["east"], {"north": 2})])
    assert inputs["tags"].tolist() == [[1, 2], [2, 0], [0, 0], [2, 0], [1, 0]]
    assert inputs["tags__weight"].tolist() == [[1, 1], [1, 0], [0, 0], [1, 0], [2, 0]]
    assert tags.expects.endswith("or a string of ids with '|' between them")
    alone = Feature(name="tags", kind="bag", vocabulary="users", separator=",", max_length=3)
    numbers = FeatureReader([alone], {"users": Vocabulary(pa.array(["3", "true"]))})
    assert numbers.read([{"tags": value} for value in (3, 3.0, True, "3, true")])["tags"].tolist() == [
        [1, 0], [1, 0], [2, 0], [1, 2],
    ]  # fmt: skip
    assert read({"tags": "['north' 'east']"})["tags"] == [[1, 2]]
    with pytest.raises(ValueError, match="separator belongs to bag"):
        Feature(name="age", kind="number", separator="|")


def test_a_number_may_be_a_boolean_or_text() -> None:
    values = [True, False, "9.5", " -1e2 ", "", None, 3]
    assert read(*({"age": value} for value in values))["age"] == [1, 0, 9.5, -100, 7.5, 7.5, 3]


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01T01:03:49Z", "2026-01-01 01:03:49", "2026-01-01 01:03:49.000000+00", "2026-01-01 01:03:49+0000",
        "2026-01-01 01:03:49.123 +0000", "2026-01-01 01:03:49 UTC", "2026-01-01 01:03:49.999999999 UTC",
        "2026-01-01T01:03:49.1234567Z", "2026-01-01T01:03:49.123456789", "2026-01-01 02:33:49.1234567 +01:30",
        "2025-12-31 22:03:49-03", " 2026-01-01 01:03:49 ",
    ],
)  # fmt: skip
def test_dates_of_databases_are_parsed(text: str) -> None:
    assert parse_seconds(text) == datetime(2026, 1, 1, 1, 3, 49, tzinfo=UTC).timestamp()
    assert parse_seconds("2026-01-01") == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
