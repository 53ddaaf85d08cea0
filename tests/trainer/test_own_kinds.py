"""Check custom feature kinds: their tensors, their parts, and refusals; docs/extending.md has two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from longtail.trainer import RecipeError, load_recipe, register
from longtail.trainer.config import Recipe
from longtail.trainer.export.trial import try_own_layers
from longtail.trainer.layers import FeatureSetup
from longtail.trainer.model.towers import Towers, build_towers
from tests.trainer import tiny

pytestmark = pytest.mark.usefixtures("tables")


def reading(*features: dict[str, Any], dim: int = 4, **query: Any) -> Recipe:
    return tiny.recipe(
        query={"features": list(features), **query}, model={"dim": dim, "similarity": "dot"}, data={"timestamp": "at"}
    )


def built(recipe: Recipe, **numbers: tuple[float, float]) -> Towers:
    return build_towers(recipe, {"item_id": 5, "tags": 5, "user_id": 5}, numbers)


HISTORY = {"name": "seen", "kind": "self_attention", "table": "item_id", "dim": 4, "max_length": 6}


@pytest.mark.usefixtures("page")
def test_a_custom_kind_gets_the_unscaled_number() -> None:
    """Hours 6 and 18 of 24: a quarter and three quarters of a turn. Of a missing one, a learned vector and the flag."""
    tower = built(reading({"name": "hour", "kind": "cyclic", "period": 24}, dim=2), hour=(11.0, 3.0)).query
    np.testing.assert_allclose(np.asarray(tower({"hour": np.float32([6, 18])})), [[1, 0], [-1, 0]], atol=1e-6)

    flagged = reading({"name": "hour", "kind": "cyclic", "period": 24, "missing": "flag"}, dim=3)
    tower = built(flagged, hour=(11.0, 3.0)).query
    output = tower({"hour": np.float32([6, 0]), "hour__missing": np.float32([0, 1])})
    np.testing.assert_allclose(np.asarray(output), [[1, 0, 0], [0, 0, 1]], atol=1e-6)


def attended(ids: list[int], weights: list[float]) -> list[float]:
    inputs = {"seen": np.int32([ids]), "seen__weight": np.float32([weights])}
    output: list[float] = np.asarray(built(reading(HISTORY | {"blocks": 2})).query(inputs))[0].tolist()
    return output


@pytest.mark.usefixtures("page")
def test_self_attention_reads_entries_in_order() -> None:
    expected = attended([1, 2, 3], [1, 1, 1])

    assert attended([1, 2, 3, 0], [1, 1, 1, 0]) == pytest.approx(expected, abs=1e-6)
    assert attended([1, 4, 2, 3], [1, 0, 1, 1]) == pytest.approx(expected, abs=1e-6)
    assert np.abs(np.subtract(attended([2, 1, 3], [1, 1, 1]), expected)).max() > 1e-3
    assert attended([1], [0]) == [0, 0, 0, 0]


KINDS: dict[str, tuple[dict[str, Any], list[tuple[int | None, ...]]]] = {
    "id": ({"dim": 3}, [(None, 3)]),
    "history": ({"table": "item_id", "dim": 4, "max_length": 7}, [(None, None, 4), (None, None)]),
    "bag": ({"dim": 2}, [(None, None, 2), (None, None)]),
    "text": ({"dim": 2, "hash_rows": 2**30}, [(None, None, 2), (None, None)]),
    "number": ({}, [(None, 1)]),
    "vector": ({"dims": 5, "normalise": True}, [(None, 5)]),
    "date": ({"dim": 3}, [(None, 3)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_read(kind: str) -> None:
    keys, expected = KINDS[kind]
    shapes, setups = [], list[FeatureSetup]()

    def part(*tensors: keras.KerasTensor) -> keras.KerasTensor:
        shapes.append([tensor.shape for tensor in tensors])
        first = tensors[0] if len(tensors) == 1 else ops.einsum("bpd,bp->bd", *tensors)
        return keras.layers.Dense(2)(first)

    def of_one(x: Any, setup: FeatureSetup) -> Any:
        setups.append(setup)
        return part(x)

    def of_two(x: Any, weights: Any, setup: FeatureSetup) -> Any:
        setups.append(setup)
        return part(x, weights)

    register.feature("mine", reads=kind)(of_two if len(expected) == 2 else of_one)
    recipe = reading({"name": "tags", "kind": "mine", **keys}, {"name": "user_id", "kind": "id", "dim": 2})
    try_own_layers(recipe)

    assert shapes == [expected]
    length = {"history": 7, "bag": 50, "text": 50}.get(kind)
    moments = (0.0, 1.0) if kind == "number" else (None, None)
    assert setups == [FeatureSetup("tags", "query", length, *moments)]
    assert recipe.own_layers == [("feature", "mine")]
    assert recipe.query.features[0].kind == kind


FEATURE = "query.features.1={name='history', table='item_id', dim=4, "
WRONG = {
    "unknown kind": (
        "kind='attend'}", r"query\.features\.1: feature: expected one of id, history, audience, bag,",
    ),
    "no kind": ("dims=3}", r"query\.features\.1\.kind: expected a value"),
    "a kind of no name": ("kind=3}", r"query\.features\.1\.kind: expected 'id', .*received 3"),
    "unknown parameter": (
        "kind='self_attention', head=3}",
        r"query\.features\.1\.head: expected one of heads, blocks, received an unknown key: did you mean 'heads'",
    ),
    "parameter of ours": ("kind='history', heads=3}", r"query\.features\.1\.heads: expected one of name.* unknown key"),
    "lacking": ("kind='cyclic'}", "period: expected a value, received none .feature 'cyclic'"),
    "type": ("kind='cyclic', period='day'}", "period: expected a number, received 'day' .feature 'cyclic'"),
    "key of another kind": ("kind='self_attention', dims=3}", "expected no dims:"),
    "replaced step": (
        "kind='self_attention', combiner='sum'}",
        r"query\.features\.1: feature 'history': expected no combiner with kind",
    ),
    "replaced transform": ("kind='cyclic', period=1, transform='log'}", "expected no transform with kind"),
}  # fmt: skip


@pytest.mark.parametrize(("rest", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("page")
def test_a_recipe_is_held_to_the_kind_s_parameters(tmp_path: Path, rest: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(tiny.write_job(tmp_path), [FEATURE + rest])


def test_functions_and_names_that_no_recipe_fits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"feature 'mine': expected reads to be one of id, .*, received 'word'"):
        register.feature("mine", reads="word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feature 'bag': expected a name that is not Longtail's own"):
        register.feature("bag", reads="bag")
    with pytest.raises(ValueError, match=r"feature 'mine': expected 3 positional argument\(s\).*<lambda>\(x, _\)"):
        register.feature("mine", reads="history")(lambda x, _: x)
    with pytest.raises(ValueError, match=r"feature 'mine': expected 2 positional argument\(s\)"):
        register.feature("mine", reads="number")(lambda x, _, __: x)

    register.feature("mine", reads="number")(lambda x, _, *, dim=3: x * dim)
    with pytest.raises(ValueError, match="feature 'mine': expected parameters that are no keys of a feature,"):
        reading({"name": "age", "kind": "mine"})


BUILT: dict[str, tuple[Any, str]] = {
    "one number a row": (
        lambda x, *_: ops.sum(x, axis=(1, 2)),
        r"query feature 'seen' \(mine\): expected shape \[B, width\].*received \(None,\)",
    ),
    "entries": (lambda x, *_: x, r"'seen' \(mine\): expected shape \[B, width\].*received \(None, None, 4\)"),
    "padding counts": (
        lambda x, *_: ops.mean(x, axis=1),
        "query tower, with feature 'mine': expected padding .* to change no output, received outputs .* apart",
    ),
    "nothing is no number": (
        lambda x, w, _: ops.einsum("bpd,bp->bd", x, w / ops.sum(w, axis=1, keepdims=True)),
        "with feature 'mine': expected finite outputs for a row of zeros without entries",
    ),
    "always two entries": (
        lambda x, w, _: ops.reshape(x[:, :2] * w[:, :2, None], (-1, 8)),
        "feature 'mine': expected layers .* for any number of rows and of entries",
    ),
}


@pytest.mark.parametrize(("function", "message"), BUILT.values(), ids=BUILT)
def test_a_kind_that_could_not_be_trained_or_served_is_refused(function: Any, message: str) -> None:
    register.feature("mine", reads="history")(lambda entries, weights, setup: function(entries, weights, setup))
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        try_own_layers(reading(HISTORY | {"kind": "mine"}))
