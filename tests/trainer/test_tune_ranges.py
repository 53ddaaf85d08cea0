"""What `[tune]` may say, which recipe given values make, and recipes as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtail.trainer import RecipeError, load_recipe
from longtail.trainer.config import recipe_toml
from longtail.trainer.search_space import SearchSpace
from tests.trainer import tiny

RECIPES = sorted((Path(__file__).parents[2] / "trainer/recipes").glob("*.toml"))


def ranges(spec: dict[str, Any], **sections: Any) -> SearchSpace:
    return SearchSpace(tiny.recipe(tune={"ranges": spec}, **sections))


def test_table_is_set_before_its_keys() -> None:
    space = ranges({
        "loss.sampler.negatives": {"low": 4, "high": 64}, "loss.sampler": {"choices": [{"name": "uniform"}]},
        "query.features.0.dim": {"low": 4, "high": 8},
    })  # fmt: skip
    values = {"loss.sampler.negatives": 9, "loss.sampler": {"name": "uniform"}, "query.features.0.dim": 4}

    recipe = space.create_recipe(values)

    assert str(recipe.loss.sampler) == "uniform(negatives = 9)"
    assert recipe.query.features[0].dim == 4
    assert recipe.tune is None
    assert recipe.data == space.recipe.data


def test_impossible_combination_is_refused() -> None:
    space = ranges({"loss.sampler": {"choices": ["in_batch", "full"]}, "loss.hits": {"choices": ["mask", "mask_known"]},
                 "training.accumulate": {"choices": [1, 2]}})  # fmt: skip

    assert space.create_recipe({"loss.hits": "mask", "training.accumulate": 2}).training.accumulate == 2
    with pytest.raises(RecipeError, match=r"training\.accumulate: expected 1 with loss\.hits 'mask_known'"):
        space.create_recipe({"loss.hits": "mask_known", "training.accumulate": 2})


def test_recipe_params_hold_values_within_ranges() -> None:
    spec = {"model.temperature": {"low": 0.05, "high": 0.5}, "model.dim": {"low": 4, "high": 12},
             "loss.sampler": {"choices": ["in_batch", {"name": "uniform", "negatives": 8}]}}  # fmt: skip

    assert ranges(spec).recipe_params() == {"model.temperature": 0.1, "model.dim": 4, "loss.sampler": "in_batch"}
    params = ranges(spec, loss={"sampler": {"negatives": 8, "name": "uniform"}}).recipe_params()
    assert params == {"model.temperature": 0.1, "model.dim": 4, "loss.sampler": '{"name": "uniform", "negatives": 8}'}
    assert ranges(spec, model={"temperature": 0.6}).recipe_params() == {"model.dim": 4, "loss.sampler": "in_batch"}, (
        "above"
    )


REFUSED = {
    "unknown key": ({"model.temprature": {"low": 0.1, "high": 1}}, r"model\.temprature: expected one of dim, "),
    "unknown section": ({"mdoel.dim": {"low": 1, "high": 2}}, r"mdoel: expected one of name, seed, .*unknown key"),
    "type": ({"model.dim": {"low": 1.5, "high": 2}}, r"model\.dim = 1\.5: model\.dim: expected a whole number"),
    "impossible high": ({"optimizer.momentum": {"low": 0.5, "high": 1.5}}, r"momentum = 1\.5: .*less than 1"),
    "unknown choice": ({"loss.sampler": {"choices": ["in_bach"]}}, r"expected one of in_batch, .* received 'in_bach'"),
    "lacking": ({"loss.sampler": {"choices": ["uniform"]}}, r"negatives: expected a value, received none"),
    "no such feature": ({"query.features.7.dim": {"low": 4, "high": 8}}, r"expected an index below 1, received '7'"),
    "metric": ({"evaluation.metric": {"choices": ["recall@2"]}}, r"expected no range of .*'evaluation\.m"),
    "split": ({"data.split.valid": {"low": 0.1, "high": 0.2}}, r"received 'data\.split\.valid'"),
    "seed": ({"seed": {"low": 0, "high": 9}}, r"received 'seed'"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_range_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        ranges(spec)
    assert "\n" not in str(refused.value)


MALFORMED = {
    "order": ({"low": 2, "high": 1}, "expected low < high, received 2 and 1"),
    "half": ({"low": 2}, "expected choices, or low and high, received low"),
    "nothing": ({}, "expected choices, or low and high, received none"),
    "both": ({"low": 1, "choices": [1]}, "expected choices alone, or low and high, received choices and others"),
    "log of 0": ({"low": 0.0, "high": 1.0, "log": True}, "log: expected low > 0"),
    "unknown": ({"lo": 1}, "expected one of low, high, log, choices, received an unknown key"),
}


@pytest.mark.parametrize(("spec", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_range_is_refused_with_its_key(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    lines = ", ".join(f"{name} = {str(value).lower()}" for name, value in spec.items())
    recipe = tiny.write_job(tmp_path, recipe=f'{tiny.RECIPE}\n[tune.ranges]\n"model.dim" = {{ {lines} }}\n')
    with pytest.raises(RecipeError, match=rf"tune\.ranges\.model\.dim(\.\w+)?: {message}"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"objectives": ["recal@2"]}, r"tune\.objectives: expected metrics among recall@2, .*, received 'recal@2'"),
        ({"objectives": ["recall@3"]}, r"received 'recall@3'"),
        ({"constraints": {"recall@2/tial": 0.1}}, r"tune\.constraints: .*received 'recall@2/tial'"),
        ({"objectives": ["recall@2", "recall@2"]}, "expected distinct metrics"),
    ],
)
def test_metrics_that_are_not_measured_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.recipe(tune={"ranges": {"model.dim": {"choices": [4]}}, **section})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_the_same_once_written(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "again.toml").write_text(recipe_toml(recipe, tmp_path))

    again = load_recipe(tmp_path / "again.toml")

    assert again.model_copy(update={"data": recipe.data}) == recipe
    assert again.data.train.resolve() == recipe.data.train.resolve()  # type: ignore[union-attr]
