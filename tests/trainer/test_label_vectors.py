"""Vectors of queries by the id of a label, from a column, by hand. Labels i0 … i2; i1 has no picture."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail.trainer.data.encode import Encoding
from longtail.trainer.errors import DataError
from tests.trainer import tiny

PICTURE = {"name": "picture", "kind": "vector", "dims": 2}
SEEN = {"name": "seen", "kind": "vector", "dims": 2, "of_label": "picture", "unknown_rate": 0}
PICTURES = [[1.5, -2.0], None, [0.1, 8.0]]


def recipe(seen: dict[str, Any] = SEEN, picture: dict[str, Any] = PICTURE) -> Any:
    return tiny.recipe(query={"features": [tiny.USER, seen]}, label={"features": [tiny.ITEM, picture]})


def encode(column: Any, seen: dict[str, Any] = SEEN) -> Encoding:
    data = tiny.dataset(
        tiny.pairs((0, 0), (0, 1), (1, 2)), queries=4, labels=3, query_table=pa.table({"seen": column}),
        label_table=pa.table({"picture": pa.array(PICTURES, pa.list_(pa.float32()))}),
    )  # fmt: skip
    return Encoding.fit(recipe(seen), data)


def inputs(column: Any) -> dict[str, Any]:
    found = encode(column).query.of_queries(np.arange(4, dtype=np.int32))
    return {name: values for name, values in found.items() if name.startswith("seen")}


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_an_id_is_its_label_s_vector_to_the_last_bit(kind: pa.DataType) -> None:
    """i1 has none, nobody is called `gone`, and a null is a null."""
    by_id = inputs(pa.array(["i2", "i1", "gone", None], kind))
    by_value = inputs(pa.array([PICTURES[2], None, None, None], pa.list_(pa.float32())))

    for name, values in by_value.items():
        np.testing.assert_array_equal(by_id[name], values)
        assert by_id[name].dtype == np.float32
    assert by_id["seen"][0].tolist() == [np.float32(0.1), 8.0]
    assert by_id["seen__missing"].tolist() == [0, 1, 1, 1]


def test_training_batches_take_them_too() -> None:
    query = encode(pa.array(["i2", "i0", None, None])).query

    found = query.of_pairs(np.arange(3), np.random.default_rng(0))

    assert found["seen"].tolist() == [[np.float32(0.1), 8], [np.float32(0.1), 8], [1.5, -2]]
    assert found["seen__missing"].tolist() == [0, 0, 0]


WRONG_COLUMNS = {
    "no id of a label": (["x", None, "y", "z"], "feature 'seen' .vector.: expected ids of labels, found 'x' and no id"),
    "numbers": ([1.5] * 4, "expected ids of labels, found '1.5' and no id that is one"),
    "another length": ([[1.0]] * 4, "expected lists of 2 numbers, found one of 1 of 'u0'"),
    "lists of ids": ([["i0", "i1"]] * 4, "expected lists of 2 numbers, or ids of labels, found list"),
}


@pytest.mark.parametrize(("column", "message"), WRONG_COLUMNS.values(), ids=WRONG_COLUMNS)
def test_a_column_of_something_else_is_refused(column: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(column)


WRONG_RECIPES = {
    "no such label feature": ({"of_label": "photo"}, "query feature 'seen': .* picture, received 'photo'"),
    "a label feature that is no vector": ({"of_label": "item_id"}, "to name a vector .* picture, received 'item_id'"),
    "other dims": (
        {"dims": 3},
        "query feature 'seen': expected dims and normalise of label feature",
    ),
    "normalised alone": ({"normalise": True}, "query feature 'seen': expected dims and normalise of label feature"),
    "no vector": ({"kind": "id", "dims": None}, "feature 'seen' of kind 'id': expected no of_label: only for vector"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_RECIPES.values(), ids=WRONG_RECIPES)
def test_a_recipe_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(SEEN | change)
