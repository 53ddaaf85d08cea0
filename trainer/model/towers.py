"""Construction of the two towers: embeddings → combination → MLP → projection → maps of objectives → unit norm.

Legend: `B` batch, `D` model dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import Recipe, TowerConfig
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import Side, TowerSetup
from longtail.trainer.model.embedding import Dropout, EmbeddingTable, InputKey, UnitNorm, list_layers
from longtail.trainer.model.features import FeatureParts, build_custom_tower


@dataclass(frozen=True)
class Towers:
    """Hold both towers and their tables.

    Attributes:
        tables: embedding tables by name; towers may share them.
        readers: (tower, input name) → name of the table whose ids the input holds; ("entry", name of label rows) for
            rows that are added to label embeddings.
        label_rows: untrained tables of label embeddings for histories, by name, float32 [L + 1, D]. Label y has row
            y + 1: the output of the label tower, plus a row of an embedding table with `entries = "both"`. Row 0 is 0.
        pairs: number of training pairs of every row of a table, float32 [rows, 1], by tower and feature with symmetric
            weights.
    """

    query: keras.Model
    label: keras.Model
    tables: dict[str, EmbeddingTable]
    readers: dict[InputKey, str]
    label_rows: dict[str, EmbeddingTable]
    pairs: dict[InputKey, EmbeddingTable]


@contextmanager
def in_float32(tower: keras.Model) -> Iterator[keras.Model]:
    """Make a tower compute in float32 inside the block, as the service does."""
    layers = [layer for layer in list_layers(tower) if layer.compute_dtype != "float32"]
    policies = [layer.dtype_policy for layer in layers]
    try:
        for layer in layers:
            layer.dtype_policy = "float32"
        yield tower
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            layer.dtype_policy = policy


class ObjectiveMaps(keras.layers.Layer):
    """Map query embeddings by objective: u_o = (I + A_o) x, served as Σ ŝ_o u_o.

    The score of the served vector is exactly Σ ŝ_o f_o [METHODS §2.4]. A_o is 0 initially: all objectives begin with
    the output of the tower, and a penalty on weights pulls them together.

    Args:
        shares: ŝ by objective, in the order of the recipe; the sum is 1.
        unit: divides each u_o by its norm.
    """

    def __init__(self, shares: Mapping[str, float], dim: int, *, unit: bool, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.shares = list(shares.values())
        self.direction = UnitNorm(dtype="float32") if unit else None
        self.maps = [self.add_weight(shape=(dim, dim), initializer="zeros", name=objective) for objective in shares]
        self.built = True
        self._objectives_B: Tensor | None = None

    def call(self, x_BD: Tensor) -> Tensor:
        """Return the served vectors, float32 [B, D]; inside `map_by_objective`, each row by its own objective."""
        if self._objectives_B is None:
            served = [share * self._map(x_BD, i) for i, share in enumerate(self.shares) if share]
            return sum(served[1:], served[0])
        # Few objectives: all maps of all rows cost less than a gather of a [D, D] matrix per row.
        objective_B1 = ops.expand_dims(self._objectives_B, 1)
        rows_BD = self._map(x_BD, 0)
        for i in range(1, len(self.maps)):
            rows_BD = ops.where(ops.equal(objective_B1, i), self._map(x_BD, i), rows_BD)
        return rows_BD

    def _map(self, x_BD: Tensor, i: int) -> Tensor:
        """Compute u_o of one objective, float32 [B, D]."""
        rows_BD = x_BD + ops.matmul(x_BD, self.maps[i])
        return rows_BD if self.direction is None else self.direction(rows_BD)


@contextmanager
def map_by_objective(tower: keras.Model, objectives_B: Tensor | None) -> Iterator[None]:
    """Make a query tower map rows by their objectives, int32 [B], inside the block."""
    maps = [layer for layer in tower.layers if isinstance(layer, ObjectiveMaps)]
    if maps and objectives_B is None:
        raise ValueError("a step with objectives: expected _objective in its batch, received none")
    try:
        for layer in maps:
            layer._objectives_B = ops.convert_to_tensor(objectives_B)
        yield
    finally:
        for layer in maps:
            layer._objectives_B = None


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

    for side, tower in (("query", recipe.query), ("label", recipe.label)):
        for feature in tower.features:
            key, name = (side, feature.name), feature.table_name
            if not feature.has_table:
                continue
            if feature.weights == "symmetric":
                pairs[key] = EmbeddingTable(
                    vocabulary_rows[name], 1, scale=0.0, seed=0, name=f"pairs_{side}_{feature.name}"
                )
            if feature.entries != "table":
                readers[key] = name
                rows = vocabulary_rows[name]
                label_rows[name] = EmbeddingTable(rows, feature.dim, scale=0.0, seed=0, name=f"table_{name}")
                if feature.entry_table is None:
                    continue
                key, name = ("entry", name), feature.entry_table
            readers[key] = name
            if name not in tables:
                rows = vocabulary_rows.get(name) or feature.table_rows or 0
                # A seed for each table: with one seed, tables of one width would begin alike.
                seed = recipe.seed + len(tables)
                scale = recipe.model.init_scale
                tables[name] = EmbeddingTable(rows, feature.dim, scale=scale, seed=seed, name=f"table_{name}")
    keras.utils.set_random_seed(recipe.seed)  # dense layers draw initial weights from Keras' global generator
    query, label = (_build(side, recipe, tables | label_rows, pairs, numbers) for side in ("query", "label"))
    return Towers(query, label, tables, readers, label_rows, pairs)


def _build(
    side: Side, recipe: Recipe, tables: dict[str, EmbeddingTable], pairs: Mapping[InputKey, EmbeddingTable],
    numbers: Mapping[str, tuple[float, float]],
) -> keras.Model:  # fmt: skip
    tower: TowerConfig = recipe.query if side == "query" else recipe.label
    model, precision, name = recipe.model, recipe.training.precision, f"{side}_tower"
    side_pairs = {name: table for (tower_side, name), table in pairs.items() if tower_side == side}
    features = FeatureParts(side, tables, numbers, precision, side_pairs)
    parts = [features.build(feature) for feature in tower.features]
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
        x = build_custom_tower(x, tower.tower, TowerSetup(name, side, model.dim), precision)
        if x.shape[-1] != model.dim:
            x = keras.layers.Dense(model.dim, dtype=precision)(x)
    # The last layer is always float32: `UnitNorm` and `ObjectiveMaps` are, and a linear activation casts the rest.
    if side == "query" and recipe.objectives:
        unit = model.similarity == "cosine"
        x = ObjectiveMaps(recipe.export_shares, model.dim, unit=unit, name=f"{name}_objectives")(x)
    elif model.similarity == "cosine":
        x = UnitNorm(name=f"{name}_direction", dtype="float32")(x)
    else:
        x = keras.layers.Activation("linear", dtype="float32")(x)
    return keras.Model(features.inputs, x, name=name)
