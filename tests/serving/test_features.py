"""Feature values to tower inputs, by hand. Vocabulary rows: out-of-vocabulary 0, north 1, east 2."""

import zlib

import numpy as np
import pytest

from serving.features import FeatureReader, Features
from tests.serving.plane import FEATURES, VOCABULARIES


def read(*features_B: Features, **pad_to: int) -> dict[str, list]:
    inputs = FeatureReader(FEATURES, VOCABULARIES).read(features_B, pad_to)
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


def test_ids() -> None:
    assert read({"user": "east"}, {"user": "north"}, {"user": "west"}, {"user": 3})["user"] == [2, 1, 0, 0]


def test_a_history_keeps_its_last_entries_and_pads_with_weight_0() -> None:
    inputs = read({"seen": ["north"]}, {"seen": ["north", "east", "east"]}, {"seen": ["east", "nowhere"]})
    assert inputs["seen"] == [[1, 0], [2, 2], [2, 0]]
    assert inputs["seen__weight"] == [[1, 0], [1, 1], [1, 1]]


def test_a_bag_is_a_list_or_weights_by_id() -> None:
    inputs = read({"tags": {"east": 0.5, "north": -2}}, {"tags": ["north"]}, {"tags": {}})
    assert inputs["tags"] == [[2, 1], [1, 0], [0, 0]]
    assert inputs["tags__weight"] == [[0.5, -2], [1, 0], [0, 0]]
    assert read({"tags": {"a": 1, "b": 2, "east": 3, "north": 4}})["tags__weight"] == [[2, 3, 4]]


def test_text_is_hashed_as_in_training() -> None:
    inputs = read({"words": "The North, the EAST"}, {"words": "…"})
    assert inputs["words"] == [[row("north"), row("the"), row("east")], [0, 0, 0]]
    assert inputs["words__weight"] == [[1, 1, 1], [0, 0, 0]]


def test_numbers_may_be_integers() -> None:
    assert read({"age": 42}, {"age": -0.5})["age"] == [42, -0.5]


def test_a_tower_of_fixed_width_is_padded_to_it() -> None:
    inputs = read({"seen": ["north"]}, seen=2)
    assert (inputs["seen"], inputs["seen__weight"]) == ([[1, 0]], [[1, 0]])


def test_the_example_is_a_valid_query() -> None:
    example = FeatureReader(FEATURES, VOCABULARIES).example()
    assert example == {"user": "north", "seen": ["north"], "tags": ["north"], "words": "some words", "age": 7.5}
    assert read(example)["user"] == [1]


@pytest.mark.parametrize("history", [["north"] * 5000, []])
def test_lists_of_any_length(history: list[str]) -> None:
    assert np.shape(read({"seen": history})["seen"])[1] == min(2, max(1, len(history)))
