"""Try custom layers before training: build, run and export them on random inputs.

Layers that the service could not run are refused within seconds, not after the training.

Legend: `B` batch, `P` positions of a bag, `D` dimensions.
"""

from __future__ import annotations

import keras
import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Float32
from longtail.trainer import backend
from longtail.trainer.backend import ops
from longtail.trainer.config import Recipe, TowerConfig
from longtail.trainer.errors import RecipeError
from longtail.trainer.export.onnx import check_parity, exported_towers, onnx_models
from longtail.trainer.model.embedding import EmbeddingTable, list_layers
from longtail.trainer.model.towers import build_towers, in_float32

_ROWS = 7
"""Rows of every table in the trial; the checks do not depend on the number."""

_BATCH, _ENTRIES = 3, (1, 5)
"""Rows of a trial batch, and the two numbers of entries of its bags."""

_TOLERANCE = 1e-4
"""Largest change of an output by padding."""


def try_own_layers(recipe: Recipe) -> None:
    """Refuse custom layers that could not be trained, exported or served.

    A recipe without custom layers passes at once.
    """
    if not recipe.own_layers:
        return
    features = (*recipe.query.features, *recipe.label.features)
    names = [name for feature in features if feature.has_table for name in (feature.table_name, feature.entry_table)]
    rows = {name: _ROWS for name in names if name is not None}
    numbers = {feature.name: (0.0, 1.0) for feature in features if feature.kind == "number"}
    layers = ", ".join(f"{kind} {name!r}" for kind, name in dict.fromkeys(recipe.own_layers))
    try:
        towers = build_towers(recipe, rows, numbers)
        configs = {"query": recipe.query, "label": recipe.label}
        tried = {}
        for side, tower in (("query", towers.query), ("label", towers.label)):
            few, many = (_inputs(tower, configs[side], longest) for longest in _ENTRIES)
            with in_float32(tower):
                _check_layers(f"{side} tower, with {layers}", tower, many)
                tried[side] = _check_entries(f"{side} tower, with {layers}", tower, few, many)
        models = onnx_models(recipe, towers, rows, numbers)
        for side in exported_towers(recipe, towers):
            for inputs, expected_BD in tried[side]:
                check_parity(f"{side} tower", models[side], inputs, expected_BD)
    except RecipeError:
        raise
    except Exception as error:  # Keras, its backend, tf2onnx and ONNX Runtime raise errors of any type
        raise RecipeError(
            f"{layers}: expected layers that make a Keras model, export to ONNX and compute the same there, for any "
            f"number of rows and of entries, received {type(error).__name__}: {error}"
        ) from error


def _check_layers(title: str, tower: keras.Model, inputs: Inputs) -> None:
    """Refuse layers with untrained weights, losses or random draws in training."""
    tables = {
        id(weight) for layer in list_layers(tower) if isinstance(layer, EmbeddingTable) for weight in layer.weights
    }
    if untrained := [weight.path for weight in tower.non_trainable_weights if id(weight) not in tables]:
        raise RecipeError(
            f"{title}: expected only trained weights, as checkpoints hold no others, received {', '.join(untrained)}"
        )
    if penalised := [layer.name for layer in list_layers(tower) if layer.losses]:
        raise RecipeError(
            f"{title}: expected layers without losses, as training would not add them, received {', '.join(penalised)}"
        )
    # A layer that draws random numbers advances the state of its seed generator, which is untrained.
    seeds = [variable for variable in tower.non_trainable_variables if id(variable) not in tables]
    before = [ops.convert_to_numpy(seed) for seed in seeds]
    tower(inputs, training=True)
    if drawn := [
        seed.path for seed, old in zip(seeds, before, strict=True) if (ops.convert_to_numpy(seed) != old).any()
    ]:
        raise RecipeError(
            f"{title}: expected layers that draw nothing in training (the recipe's dropout is there, and "
            f"longtail.trainer.model.embedding.Dropout), received draws of {', '.join(drawn)}"
        )


def _check_entries(title: str, tower: keras.Model, few: Inputs, many: Inputs) -> list[tuple[Inputs, Float32]]:
    """Refuse layers whose output changes with padding or is not finite.

    The amount of padding depends on the other rows of a batch, so it must not change an output.
    """
    padded = dict(few)
    for name in few:
        if f"{name}__weight" in few:
            names = (name, f"{name}__weight")
            more = many[name].shape[1] - few[name].shape[1]
            padded |= {name: np.pad(column, ((0, 0), (0, more))) for name, column in few.items() if name in names}
    compiled = backend.compile_tower(tower)

    def embedded(inputs: Inputs) -> Float32:
        return ops.convert_to_numpy(compiled(inputs))

    of_few_BD, of_many_BD = embedded(few), embedded(many)
    difference = float(np.abs(embedded(padded) - of_few_BD).max())
    if not difference <= _TOLERANCE:
        raise RecipeError(
            f"{title}: expected padding (entries of weight 0) to change no output, received outputs "
            f"{difference:.3g} apart"
        )
    nothing = {name: np.zeros_like(column) for name, column in few.items()}
    if not np.isfinite(embedded(nothing)).all():
        raise RecipeError(f"{title}: expected finite outputs for a row of zeros without entries, received NaN or ±inf")
    row = {name: column[:1] for name, column in many.items()}
    return [(few, of_few_BD), (many, of_many_BD), (row, of_many_BD[:1])]


def _inputs(tower: keras.Model, config: TowerConfig, longest: int) -> Inputs:
    """Draw random inputs of a tower, with full bags."""
    rng = np.random.default_rng(0)
    lengths = {feature.name: min(longest, feature.max_length) for feature in config.features}
    inputs: Inputs = {}
    for name, spec in tower.input.items():
        length = lengths[name.removesuffix("__weight").removesuffix("__missing")]
        shape = [_BATCH, *(length if size is None else size for size in spec.shape[1:])]
        if spec.dtype == "int32":
            inputs[name] = rng.integers(0, _ROWS, shape).astype(np.int32)
        elif name.endswith("__weight"):
            inputs[name] = np.ones(shape, np.float32)
        elif name.endswith("__missing"):
            inputs[name] = rng.integers(0, 2, shape).astype(np.float32)
        else:
            inputs[name] = rng.normal(size=shape).astype(np.float32)
    return inputs
