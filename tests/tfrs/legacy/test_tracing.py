"""Keras models of raw columns as towers: what is taken over says what Keras says, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from longtail.bundle import Tower
from longtail.trainer.errors import ExportError
from longtail.trainer.tfrs.columns import RawColumns
from longtail.trainer.tfrs.tower import export_tower

layers = tf.keras.layers
USERS = ["ann", "bob", "zoë"]
FILMS = np.array(["Toy Story (1995)", "Cube", "L'Été, toy", "Dune"])
DIM = 4


class Of(tf.keras.Model):
    """A model of a function of its layers and its inputs, with a dense layer on top."""

    def __init__(self, function: Callable[..., tf.Tensor], **parts: Any) -> None:
        super().__init__()
        self.parts, self.function, self.top = parts, function, layers.Dense(DIM)

    def call(self, inputs: Any) -> tf.Tensor:
        return self.top(tf.cast(self.function(self.parts, inputs), tf.float32))


def table(lookup: Any, **options: Any) -> tf.keras.Sequential:
    return tf.keras.Sequential([lookup, layers.Embedding(20, 3, **options)])


def words(**options: Any) -> Any:
    return layers.TextVectorization(vocabulary=["toy", "story", "lété", "lÉté"], **options)


def adapted(values: list[float]) -> Any:
    layer = layers.Normalization(axis=None)
    layer.adapt(np.array(values))
    return layer


@tf.function
def both(lookup: Any, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
    return (lookup(inputs["user"]) - lookup(inputs["friend"])) * inputs["age"][:, None]


# what, its layers, the model, columns, what requests give for the first row
TRACED_CASES: list[tuple[str, dict[str, Any], Any, dict[str, Any], dict[str, Any]]] = [
    (
        "look-up, number", {"user": table(layers.StringLookup(vocabulary=USERS)), "age": adapted([20.0, 40.0])},
        lambda at, x: tf.concat([at["user"](x["user"]), tf.reshape(at["age"](x["age"]), (-1, 1))], 1),
        {"user": ["bob", "?", "zoë"], "age": np.array([20, 30, 61])}, {"user": "bob", "age": 20.0},
    ),
    (
        "integers, one by one or as a column", {"a": table(layers.IntegerLookup(vocabulary=[7, 42])),
        "b": table(layers.StringLookup(vocabulary=["7", "9"]))},
        lambda at, x: tf.concat([at["a"](tf.squeeze(x["shop"], 1)), at["b"](tf.strings.as_string(x["shop"]))[:, 0]], 1),
        {"shop": np.array([[42], [7], [9]])}, {"shop": "42"},
    ),
    (
        "discretised", {"cut": table(layers.Discretization([10.0, 20.5]))}, lambda at, x: at["cut"](x["age"]),
        {"age": np.array([10.0, 9.5, 33.0])}, {"age": 10.0},
    ),
    (
        "text as a mean of words", {"text": tf.keras.Sequential([words(), layers.Embedding(20, 3, mask_zero=True),
        layers.GlobalAveragePooling1D()])},
        lambda at, x: at["text"](x["q"]),
        {"q": ["Toy-Story, (the)", "L'Été \u00a0toy", "\ttoy\nSTORY  story"]}, {"q": "Toy-Story, (the)"},
    ),
    (
        "text cut", {"cut": words(output_sequence_length=3, standardize="lower")},
        lambda at, x: at["cut"](x["q"]),
        {"q": ["a toy toy story b", "", "Toy"]}, {"q": "a toy toy story b"},
    ),
    (
        "id and words of one column", {"id": table(layers.StringLookup(vocabulary=FILMS)),
        "words": tf.keras.Sequential([words(output_sequence_length=2), layers.Embedding(20, 3), layers.Flatten()])},
        lambda at, x: tf.concat([at["id"](x["title"]), at["words"](x["title"])], 1),
        {"title": ["Cube", "a story"]}, {"title": "Cube", "title_words": "Cube"},
    ),
    (
        "history through a GRU", {"seen": tf.keras.Sequential([
            layers.StringLookup(vocabulary=FILMS, mask_token=""), layers.Embedding(20, 3, mask_zero=True),
            layers.GRU(3)])},
        lambda at, x: at["seen"](x["seen"]),
        {"seen": [["Dune", "Cube", "?"], ["Cube", "", ""], ["", "", ""]]}, {"seen": ["Dune", "Cube", "?"]},
    ),
    (
        "tags, vector, flag", {"tags": table(layers.StringLookup(vocabulary=["a", "b"], mask_token=""))},
        lambda at, x: tf.concat([tf.reduce_sum(at["tags"](x["tags"]), 1), x["image"],
                                 tf.cast(x["new"], tf.float32)[:, None], tf.ones([tf.shape(x["tags"])[0], 1])], 1),
        {"tags": [["a", "b"], ["?", ""]], "image": np.eye(2, 3, dtype=np.float32), "new": [True, False]},
        {"tags": ["a", "b"], "image": [1.0, 0.0, 0.0], "new": 1.0},
    ),
    (
        "a shared look-up, within a tf.function", {"user": table(layers.StringLookup(vocabulary=USERS))},
        lambda at, x: both(at["user"], x), {"user": ["bob", "?"], "friend": ["zoë", "ann"], "age": [3.0, 4.0]},
        {"user": "bob", "friend": "zoë", "age": 3.0},
    ),
    (
        "only what reaches the output", {"user": table(layers.StringLookup(vocabulary=USERS))},
        lambda at, x: at["user"](x["user"]) + 0 * tf.cast(tf.shape(x["user"])[0], tf.float32),
        {"user": ["bob", "?"], "when": ["now", "then"]}, {"user": "bob"},
    ),
]  # fmt: skip


LIKE_ANOTHER = (
    "look-up, number", "text cut", "history through a GRU", "a shared look-up, within a tf.function",
    "only what reaches the output",
)  # fmt: skip
"""Models whose look-ups other tests of CI trace as well, or whose layers take seconds."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case[0], marks=pytest.mark.nightly if case[0] in LIKE_ANOTHER else ())
        for case in TRACED_CASES
    ],
)
def test_onnx_equals_keras(case: Any) -> None:
    _, parts, function, columns, first = case
    model = Of(function, **parts)
    tower = export_tower(model, RawColumns.read(columns, "", "queries"), "query tower")

    served = Tower(tower.onnx, tower.tower.features, tower.tower.vocabularies, DIM, file="query_tower.onnx")
    (result,) = served.embed(served.read([first]))
    expected = model({name: tf.convert_to_tensor(column) for name, column in columns.items()})
    np.testing.assert_allclose(result, expected[0], atol=1e-5)
    np.testing.assert_allclose(tower.embeddings, expected, atol=1e-6)
    assert [feature.name for feature in tower.tower.features] == list(first)
    served.embed(served.read([{} if first.keys() != {"q"} else first, first]))


def test_functional_models_and_one_tensor() -> None:
    inputs = {"user": tf.keras.Input((1,), dtype=tf.string), "age": tf.keras.Input((1,))}
    user = layers.Flatten()(layers.Embedding(5, 3)(layers.StringLookup(vocabulary=USERS)(inputs["user"])))
    both = layers.Concatenate()([user, layers.Normalization(mean=40.0, variance=9.0)(inputs["age"])])
    model = tf.keras.Model(inputs, layers.Dense(DIM)(both))
    columns = {"user": [["bob"], ["?"]], "age": np.array([[20.0], [50.0]], np.float32)}
    tower = export_tower(model, RawColumns.read(columns, "", "queries"), "query tower")
    assert [(f.name, f.kind, f.missing) for f in tower.tower.features] == [("user", "id", 0.0), ("age", "number", 35.0)]

    single = export_tower(Of(lambda _, age: age[:, None]), RawColumns.read([1.0, 3.0], "age", "queries"), "query tower")
    assert [(f.name, f.kind, f.missing) for f in single.tower.features] == [("age", "number", 2.0)]


REFUSED: list[tuple[dict[str, Any], Any, dict[str, Any], str]] = [
    (
        {"user": table(layers.StringLookup(vocabulary=USERS))}, lambda at, x: at["user"](tf.strings.lower(x["user"])),
        {"user": ["Bob"]}, r"StringLookup 'string_lookup\S*' .* found StringLower between feature 'user' and it",
    ),
    (
        {}, lambda _, x: tf.cast(tf.strings.length(x["user"]), tf.float32)[:, None], {"user": ["Bob"]},
        "feature 'user': expected it to be read by a StringLookup .* found StringLength",
    ),
    (
        {"user": table(layers.StringLookup(vocabulary=USERS))},
        lambda at, x: at["user"](x["user"]) + tf.cast(tf.strings.length(x["user"]), tf.float32)[:, None],
        {"user": ["Bob"]}, "feature 'user' to be read by .* found StringLength as well",
    ),
    (
        {"year": table(layers.IntegerLookup(vocabulary=[1999]))},
        lambda at, x: at["year"](x["year"]) + tf.cast(x["year"], tf.float32)[:, None], {"year": [1999]},
        "feature 'year' to be read by .* found Cast as well",
    ),
    (
        {"tags": layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")}, lambda at, x: at["tags"](x["t"]),
        {"t": [["a", "b"]]}, r"expected output_mode of 'int', found 'multi_hot': embed the indices",
    ),
    (
        {"q": words(ngrams=2)}, lambda at, x: at["q"](x["q"]), {"q": ["a toy"]}, r"expected ngrams of None, found 2",
    ),
    (
        {"q": words(standardize=tf.strings.upper)}, lambda at, x: at["q"](x["q"]), {"q": ["a toy"]},
        "expected standardize of None, 'lower'",
    ),
    (
        {"user": table(layers.StringLookup(vocabulary=USERS, num_oov_indices=3))}, lambda at, x: at["user"](x["user"]),
        {"user": ["Bob"]}, "expected num_oov_indices of 1, found 3",
    ),
    (
        {"seen": table(layers.StringLookup(vocabulary=USERS))}, lambda at, x: tf.reduce_mean(at["seen"](x["seen"]), 1),
        {"seen": [["ann", "bob"]]}, "expected lookups of lists to have one mask_token",
    ),
    (
        {}, lambda _, x: x["my age"][:, None], {"my age": [1.0]}, "expected a name of letters, digits and _",
    ),
    (
        {}, lambda _, x: x["age"][:, None], {"age": [1.0, float("nan")]},
        "expected finite embeddings, found others for {'age': nan}",
    ),
    (
        {}, lambda _, x: x["a"][:, None], {"a": [1.0], "b": [1.0, 2.0]}, r"columns of one length >= 1, received",
    ),
    (
        {"q": table(words())}, lambda at, x: tf.reduce_mean(at["q"](x["q"]), axis=1), {"q": ["toy", "a toy story"]},
        "query tower: expected a model whose output for a row does not depend on the others of its batch",
    ),
    (
        {}, lambda _, x: x["b"][:, None], {"a": [1.0]}, "a model that takes tensors by name: a; found",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[case[-1] for case in REFUSED])
def test_refusal_names_feature_and_layer(case: Any) -> None:
    parts, function, columns, message = case
    with pytest.raises(ExportError, match=message):
        export_tower(Of(function, **parts), RawColumns.read(columns, "", "queries"), "query tower")
