"""Layers of one's own, built, run and exported before anything is read: what the service could not run is refused
within seconds, not after the training.

Legend: `B` batch, `P` positions of a bag, `D` dimensions.
"""

from __future__ import annotations

import keras
import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Float32
from longtail.trainer.backend import ops
from longtail.trainer.config import Recipe
from longtail.trainer.errors import RecipeError
from longtail.trainer.export.onnx import check_parity, exported, onnx_models
from longtail.trainer.model.own_layers import layers_of
from longtail.trainer.model.towers import Towers, build_towers, in_float32

_ROWS = 7
"""Of every table here; what a layer computes does not depend on them."""


def try_own_layers(recipe: Recipe) -> None:
    """Refuse towers of one's own that could not be trained, exported or served; a recipe without any passes at once.

    Raises:
        RecipeError: a tower cannot be built; a layer has state that training does not keep, or computes something
            else in training; the towers do not export to ONNX, or compute something else there.
    """
    if not recipe.own_layers:
        return
    rows = {
        feature.table_name: _ROWS
        for feature in (*recipe.query.features, *recipe.label.features)
        if feature.has_table and feature.table_rows is None
    }
    features = (*recipe.query.features, *recipe.label.features)
    numbers = {feature.name: (0.0, 1.0) for feature in features if feature.kind == "number"}
    own = ", ".join(f"{kind} {name!r}" for kind, name in dict.fromkeys(recipe.own_layers))
    try:
        towers = build_towers(recipe, rows, numbers)
        for side, tower in (("query", towers.query), ("label", towers.label)):
            _check_layers(f"{side} tower, with {own}", tower, towers)
        models = onnx_models(recipe, towers, rows, numbers)
        for side, tower in exported(recipe, towers).items():
            for batch, length in ((3, 4), (1, 1)):
                inputs = _inputs(tower, batch, length)
                check_parity(f"{side} tower", models[side], inputs, _embedded(tower, inputs))
    except RecipeError:
        raise
    except Exception as error:  # whatever Keras, its backend, tf2onnx or ONNX Runtime makes of them
        raise RecipeError(
            f"{own}: expected layers that make a Keras model, export to ONNX and compute the same there, for any "
            f"number of rows and of entries, received {type(error).__name__}: {error}"
        ) from error


def _check_layers(where: str, tower: keras.Model, towers: Towers) -> None:
    """Refuse layers with more than trained weights, and those that compute something else in training."""
    tables = {id(table.table) for table in towers.tables.values()}
    if kept := [weight.path for weight in tower.non_trainable_weights if id(weight) not in tables]:
        raise RecipeError(
            f"{where}: expected trained weights alone, as checkpoints hold no others, received {', '.join(kept)}"
        )
    if penalised := [layer.name for layer in layers_of(tower) if layer.losses]:
        raise RecipeError(
            f"{where}: expected no losses of layers, which training does not add (optimizer.weight_decay is there), "
            f"received some of {', '.join(penalised)}"
        )
    seeds = [variable for variable in tower.non_trainable_variables if id(variable) not in tables]
    before = [ops.convert_to_numpy(seed) for seed in seeds]
    tower(_inputs(tower, 3, 4), training=True)
    if drawn := [
        seed.path for seed, old in zip(seeds, before, strict=True) if (ops.convert_to_numpy(seed) != old).any()
    ]:
        raise RecipeError(
            f"{where}: expected layers that draw nothing in training (the recipe's dropout is there, and "
            f"longtail.trainer.model.embedding.Dropout), received draws of {', '.join(drawn)}"
        )


def _embedded(tower: keras.Model, inputs: Inputs) -> Float32:
    with in_float32(tower):
        embedded: Float32 = ops.convert_to_numpy(tower(inputs))
    return embedded


def _inputs(tower: keras.Model, batch: int, length: int) -> Inputs:
    """Inputs of a tower: ids of any row, bags of some length that are full, other numbers of any size."""
    rng = np.random.default_rng(batch)
    inputs: Inputs = {}
    for name, spec in tower.input.items():
        shape = [batch, *(length if size is None else size for size in spec.shape[1:])]
        if spec.dtype == "int32":
            inputs[name] = rng.integers(0, _ROWS, shape).astype(np.int32)
        elif name.endswith("__weight"):
            inputs[name] = np.ones(shape, np.float32)
        elif name.endswith("__missing"):
            inputs[name] = rng.integers(0, 2, shape).astype(np.float32)
        else:
            inputs[name] = rng.normal(size=shape).astype(np.float32)
    return inputs
