"""Towers of one's own, in recipes, in training, in ONNX; docs/extending.md's are examples of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer import RecipeError, register
from longtail.trainer.config import Recipe
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.layers import TowerSetup
from longtail.trainer.model.embedding import Dropout, list_layers
from longtail.trainer.model.towers import build_towers, in_float32
from longtail.trainer.warm_start import dense_weights
from tests.trainer import tiny

pytestmark = pytest.mark.usefixtures("tables")


def attending(x: keras.KerasTensor, _: TowerSetup, *, heads: int = 2) -> keras.KerasTensor:
    """A layer of layers."""
    entries = keras.layers.Reshape((2, x.shape[-1] // 2))(x)
    return keras.layers.Flatten()(keras.layers.MultiHeadAttention(heads, 3)(entries, entries))


def query_tower(recipe: Recipe, **rows: int) -> keras.Model:
    return build_towers(recipe, {"item_id": 3, "user_id": 3} | rows, {}).query


@pytest.mark.usefixtures("page")
def test_the_page_s_tower_by_hand() -> None:
    """Σ_e g_e relu(W_e x + b_e), of 2 experts of width 3, then the projection to 2."""
    tower = query_tower(tiny.recipe(
        query={"tower": {"name": "gated", "experts": 2, "width": 3}}, model={"dim": 2, "similarity": "dot"},
    ))  # fmt: skip
    rng = np.random.default_rng(0)
    tower.set_weights([rng.normal(size=weight.shape) for weight in tower.get_weights()])
    (gates, gates_bias), (experts, experts_bias) = (
        tower.get_layer(f"query_tower_{name}").get_weights() for name in ("gates", "experts")
    )
    projection, bias = tower.layers[-2].get_weights()

    x = tower.get_layer("table_user_id").get_weights()[0][[1, 2]]
    scores = np.exp(x @ gates + gates_bias)
    hidden = np.maximum(x @ experts + experts_bias, 0)
    mixed = sum((scores / scores.sum(1, keepdims=True))[:, [e]] * hidden[:, 3 * e : 3 * e + 3] for e in range(2))
    output = tower({"user_id": np.int32([1, 2])})
    np.testing.assert_allclose(np.asarray(output), mixed @ projection + bias, rtol=1e-4)


def test_a_tower_trains_in_the_recipe_s_precision_and_serves_in_float32() -> None:
    register.tower("attending")(attending)

    def tower(precision: str) -> keras.Model:
        return query_tower(tiny.recipe(query={"tower": "attending"}, training={"precision": precision}))

    half, inputs = tower("mixed_bfloat16"), {"user_id": np.int32([1, 2])}
    assert keras.config.dtype_policy().name == "float32"
    exact = np.asarray(tower("float32")(inputs))
    assert np.abs(np.asarray(half(inputs)) - exact).max() > 1e-4
    with in_float32(half):
        np.testing.assert_allclose(np.asarray(half(inputs)), exact, rtol=1e-5)
    assert np.abs(np.asarray(half(inputs)) - exact).max() > 1e-4


def test_dropout_of_ours_drops_inside_a_tower() -> None:
    register.tower("dropping")(lambda x, setup: Dropout(0.5, x.shape[-1], name=f"{setup.name}_drop")(x))
    recipe = tiny.recipe(query={"tower": "dropping", "dropout": 0.25})
    try_own_layers(recipe)
    assert [layer.rate for layer in list_layers(query_tower(recipe)) if isinstance(layer, Dropout)] == [0.25, 0.5]


def test_dense_weights_of_nested_layers_have_distinct_names() -> None:
    register.tower("attending")(attending)
    data = tiny.dataset(tiny.pairs((0, 0), (1, 1), (2, 2)), queries=3, labels=3)
    model = tiny.model(tiny.recipe(query={"tower": "attending"}), data, batch_size=3)
    names = list(dense_weights(model))
    assert len(names) == len(model.towers.query.trainable_variables) == 8
    assert names[0] == "query/0.MultiHeadAttention.kernel"
    assert names[2] == "query/0.MultiHeadAttention.kernel.1"


def failing(*_: Any) -> Any:
    raise KeyError("no such width")


BUILT: dict[str, tuple[Callable[..., Any], str]] = {
    "not a tensor": (lambda *_: 3, r"query.tower 'mine': expected a Keras tensor.*received int"),
    "one number a row": (lambda x, _: ops.sum(x, axis=1), r"'mine': expected shape \[B, width\].*received \(None,\)"),
    "a row for the batch": (lambda x, _: ops.sum(x, axis=0, keepdims=True), r"\(None, width\).*received \(1, 4\)"),
    "whole numbers": (lambda x, _: ops.cast(x, "int32"), "'mine': expected floating-point numbers, received int32"),
    "an error of its own": (failing, "'mine': expected a function that builds.*received KeyError: 'no such width'"),
    "two layers of a name": (
        lambda x, _: keras.layers.Dense(2, name="same")(keras.layers.Dense(2, name="same")(x)),
        r"tower 'mine': expected layers that make a Keras model.*received ValueError: .*same",
    ),
    "moving averages": (
        lambda x, _: keras.layers.BatchNormalization()(x),
        "query tower, with tower 'mine': expected only trained weights.*received .*moving_mean, .*moving_variance",
    ),
    "draws": (lambda x, _: keras.layers.Dropout(0.5)(x), "expected layers that draw nothing in training.*seed"),
    "losses": (
        lambda x, _: keras.layers.Dense(2, kernel_regularizer="l2", name="penalised")(x),
        "expected layers without losses.*received penalised",
    ),
    "what ONNX lacks": (lambda x, _: ops.erfinv(ops.tanh(x)), "tower 'mine': expected layers.*export to ONNX.*Erfinv"),
    "rows of a batch together": (
        lambda x, _: x / ops.max(x, axis=0, keepdims=True), "tower 'mine': .* for any number of rows.*apart",
    ),
    "rows of one batch": (
        lambda x, _: x + ops.mean(ops.reshape(x, (3, 4)), axis=0), "tower 'mine': .* for any number of rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "message"), BUILT.values(), ids=BUILT)
def test_a_tower_that_could_not_be_trained_or_served_is_refused(function: Callable[..., Any], message: str) -> None:
    def mine(x, setup):
        return function(x, setup)

    register.tower("mine")(mine)
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        try_own_layers(tiny.recipe(query={"tower": "mine"}))
    assert keras.config.dtype_policy().name == "float32"
