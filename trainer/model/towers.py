"""Construction of the two towers: embeddings → combination → MLP → projection → maps of objectives → unit norm.

Legend: `B` batch, `S` blocks of histories, `P` places of a block, `D` model dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import FeatureConfig, Recipe, TowerConfig
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import Side, TowerSetup
from longtail.trainer.model.embedding import Dropout, EmbeddingTable, InputKey, UnitNorm, layers_of
from longtail.trainer.model.features import FeatureParts, own_tower
from longtail.trainer.model.objectives import ObjectiveMaps


@dataclass(frozen=True)
class Towers:
    """Hold both towers and their tables.

    Attributes:
        tables: embedding tables by name; towers may share them.
        readers: (tower, input name) → name of the table whose ids the input holds. The key of rows that are added to
            label embeddings is `("entry", name in label_rows)`.
        label_rows: untrained tables of label embeddings for histories, by name, float32 [L + 1, D]. Label y has row
            y + 1: the output of the label tower, plus a row of an embedding table with `entries = "both"`. Row 0 is 0.
        pairs: number of training pairs of every row of a feature's table, by tower and feature, float32 [rows, 1], for
            features with symmetric weights; not trained.
    """

    query: keras.Model
    label: keras.Model
    tables: dict[str, EmbeddingTable]
    readers: dict[InputKey, str]
    label_rows: dict[str, EmbeddingTable]
    pairs: dict[InputKey, EmbeddingTable]


def dropouts(tower: keras.Model) -> list[Dropout]:
    """List the dropout layers of a tower."""
    return [layer for layer in layers_of(tower) if isinstance(layer, Dropout)]


def draw_masks(
    tower: keras.Model, rows: Tensor, inputs: Mapping[str, Tensor], seed: keras.random.SeedGenerator
) -> dict[Dropout, Tensor]:
    """Draw a mask for every dropout layer; masks cover rows [B, …] or entries of a history [S, P]."""
    layers = dropouts(tower)
    sizes = [ops.shape(rows)[0] if layer.entries_of is None else ops.size(inputs[layer.entries_of]) for layer in layers]
    return {layer: layer.draw(size, seed) for layer, size in zip(layers, sizes, strict=True)}


@contextmanager
def in_float32(tower: keras.Model) -> Iterator[keras.Model]:
    """Make a tower compute in float32 inside the block, as the service does."""
    layers = [layer for layer in layers_of(tower) if layer.compute_dtype != "float32"]
    policies = [layer.dtype_policy for layer in layers]
    try:
        for layer in layers:
            layer.dtype_policy = "float32"
        yield tower
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy


def build_towers(
    recipe: Recipe, vocabulary_rows: Mapping[str, int], numbers: Mapping[str, tuple[float, float]]
) -> Towers:
    """Build both towers with initial weights, drawn by the recipe's seed.

    Args:
        vocabulary_rows: number of rows of every table of ids, by name. It also overrides the recipe's number of rows of
            other tables.
        numbers: mean and standard deviation of standardised `number` features, by name.
    """
    tables: dict[str, EmbeddingTable] = {}
    label_rows: dict[str, EmbeddingTable] = {}
    readers: dict[InputKey, str] = {}
    pairs: dict[InputKey, EmbeddingTable] = {}

    def read(key: InputKey, name: str, feature: FeatureConfig) -> None:
        readers[key] = name
        if name not in tables:
            rows = vocabulary_rows.get(name, feature.table_rows or 0)
            seed = recipe.seed + len(tables)
            tables[name] = EmbeddingTable(
                rows, feature.dim, scale=recipe.model.init_scale, seed=seed, name=f"table_{name}"
            )

    for side, tower in (("query", recipe.query), ("label", recipe.label)):
        for feature in tower.features:
            name = feature.table_name
            if not feature.has_table:
                continue
            if feature.weights == "symmetric":
                table = EmbeddingTable(vocabulary_rows[name], 1, scale=0.0, seed=0, name=f"pairs_{side}_{feature.name}")
                pairs[side, feature.name] = table
            if not feature.reads_label_tower:
                read((side, feature.name), name, feature)
                continue
            readers[side, feature.name] = name
            label_rows[name] = EmbeddingTable(
                vocabulary_rows[name], feature.dim, scale=0.0, seed=0, name=f"table_{name}"
            )
            if feature.entry_table is not None:
                read(("entry", name), feature.entry_table, feature)
    keras.utils.set_random_seed(recipe.seed)  # dense layers draw initial weights from Keras' global generator
    query, label = (_build(side, recipe, tables | label_rows, pairs, numbers) for side in ("query", "label"))
    return Towers(query, label, tables, readers, label_rows, pairs)


def _build(
    side: Side, recipe: Recipe, tables: dict[str, EmbeddingTable], pairs: Mapping[InputKey, EmbeddingTable],
    numbers: Mapping[str, tuple[float, float]],
) -> keras.Model:  # fmt: skip
    tower: TowerConfig = recipe.query if side == "query" else recipe.label
    model, precision, name = recipe.model, recipe.training.precision, f"{side}_tower"
    own_pairs = {name: table for (of, name), table in pairs.items() if of == side}
    features = FeatureParts(side, tables, numbers, precision, own_pairs)
    parts = [features.of(feature) for feature in tower.features]
    widths = [part.shape[-1] for part in parts]
    if tower.combine == "sum" and len(set(widths)) > 1:  # the recipe's check cannot know the widths of custom kinds
        raise RecipeError(f"{side}: combine = 'sum': expected features of equal width, received {widths}")
    join = keras.layers.Add() if tower.combine == "sum" else keras.layers.Concatenate()
    x = join(parts) if len(parts) > 1 else parts[0]
    if tower.dropout:
        x = Dropout(tower.dropout, x.shape[-1], name=f"{name}_dropout")(x)
    if tower.input_activation == "relu":
        x = keras.layers.Activation("relu", dtype="float32")(x)
    if tower.tower is None:
        for width in tower.hidden:
            x = keras.layers.Dense(width, activation="relu", dtype=precision)(x)
        plain = not tower.hidden and tower.input_activation == "linear"
        if not plain or x.shape[-1] != model.dim:
            x = keras.layers.Dense(model.dim, dtype=precision)(x)
    else:
        x = own_tower(x, tower.tower, TowerSetup(name, side, model.dim), precision)
        if x.shape[-1] != model.dim:
            x = keras.layers.Dense(model.dim, dtype=precision)(x)
    # The last layer is always float32: `UnitNorm` and `ObjectiveMaps` are, and a linear activation casts the rest.
    if side == "query" and (shares := recipe.export_shares):
        x = ObjectiveMaps(shares, model.dim, unit=model.similarity == "cosine", name=f"{name}_objectives")(x)
    elif model.similarity == "cosine":
        x = UnitNorm(name=f"{name}_direction")(x)
    else:
        x = keras.layers.Activation("linear", dtype="float32")(x)
    return keras.Model(features.inputs, x, name=name)
