"""The parts of a tower's input, one per feature.

Legend: `B` batch, `P` positions of a bag, `D` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras

from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config import FeatureConfig
from longtail.trainer.config.towers import KindChoice, TowerChoice
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import POOLED, TOWERS, FeatureSetup, Side, TowerSetup
from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.model.pooling import Recency, Symmetric, WeightedBag
from longtail.trainer.model.sequences import SequenceEncoder


class SignedLog(keras.layers.Layer):
    """Compute sign(x)·log(1 + |x|)."""

    def call(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape, float32."""
        return ops.sign(x) * ops.log(1.0 + ops.abs(x))


class OrMissing(keras.layers.Layer):
    """Replace missing rows by a learned vector, initially 0."""

    def __init__(self, width: int, *, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.vector = self.add_weight(shape=(width,), initializer="zeros", name="missing")
        self.built = True

    def call(self, x_BD: Tensor, missing_B: Tensor) -> Tensor:
        """Return rows, float32 [B, D]; `missing_B` is 1 for a missing row, else 0."""
        missing_B1 = ops.expand_dims(missing_B, 1)
        rows_BD: Tensor = x_BD * (1 - missing_B1) + missing_B1 * self.vector
        return rows_BD


@dataclass(frozen=True)
class FeatureParts:
    """Build the parts of one tower.

    Attributes:
        numbers: mean and standard deviation of `number` features without `transform = "quantile"`, by name.
        pairs: number of training pairs of every row of a table, by name of a feature with symmetric weights.
    """

    side: Side
    tables: Mapping[str, EmbeddingTable]
    numbers: Mapping[str, tuple[float, float]]
    precision: str
    pairs: Mapping[str, EmbeddingTable] = field(default_factory=dict)
    inputs: dict[str, keras.KerasTensor] = field(default_factory=dict)

    def build(self, feature: FeatureConfig) -> keras.KerasTensor:
        """Build the part of one feature, [B, width]."""
        if feature.kind in ("number", "vector"):
            return self._build_lookup(feature) if feature.in_buckets else self._build_numbers(feature)
        return self._build_bag(feature) if feature.kind in POOLED else self._build_lookup(feature)

    def _build_lookup(self, feature: FeatureConfig) -> keras.KerasTensor:
        """Build the part of an id, a range or a date, from its table."""
        dated = feature.kind == "date"
        ids = self._input(feature.name, (len(feature.parts),) if dated else (), "int32")
        x = self.tables[feature.table_name](ids)
        if dated:
            x = keras.layers.GlobalAveragePooling1D(dtype="float32")(x)
        return x if feature.custom_kind is None else self._build_custom(feature, feature.custom_kind, x)

    def _build_bag(self, feature: FeatureConfig) -> keras.KerasTensor:
        """Build the part of a history, audience, bag or text."""
        ids = self._input(feature.name, (None,), "int32")
        weights = self._input(f"{feature.name}__weight", (None,), "float32")
        if feature.weights == "symmetric":
            symmetric = Symmetric(name=f"{feature.name}_symmetric", dtype="float32")
            weights = symmetric(weights, self.pairs[feature.name](ids))
        if feature.half_life is not None:
            weights = Recency(feature.half_life, name=f"{feature.name}_recency")(weights)
        table = self.tables[feature.table_name]
        if feature.encoder is not None:
            encoder = SequenceEncoder(
                table, feature.encoder, max_length=feature.max_length, feature=feature.name, precision=self.precision
            )
            return encoder(ids, weights)
        if feature.custom_kind is not None:
            return self._build_custom(feature, feature.custom_kind, table(ids), weights)
        bag = WeightedBag(table, feature.combiner, name=f"{feature.name}_bag", damping=feature.damping)
        return bag(ids, weights)

    def _build_numbers(self, feature: FeatureConfig) -> keras.KerasTensor:
        """Build the part of a number or a vector."""
        # A custom kind gets the raw number, and standardises it itself by the mean and deviation of its setup.
        x = self._input(feature.name, () if feature.kind == "number" else (feature.dims,), "float32")
        if feature.kind == "number":
            x = keras.layers.Reshape((1,), dtype="float32")(x)
            if feature.custom_kind is None:
                mean, std = self.numbers[feature.name]
                if feature.transform == "log":
                    x = SignedLog(name=f"{feature.name}_log", dtype="float32")(x)
                x = keras.layers.Rescaling(1 / std, -mean / std, dtype="float32")(x)
        if feature.normalise:
            x = keras.layers.UnitNormalization(dtype="float32")(x)
        if feature.projection is not None:
            x = keras.layers.Dense(feature.projection, dtype=self.precision, name=f"{feature.name}_projection")(x)
        if feature.custom_kind is not None:
            x = self._build_custom(feature, feature.custom_kind, x)
        if not feature.has_flag:
            return x
        flag = self._input(f"{feature.name}__missing", (), "float32")
        x = OrMissing(x.shape[-1], name=f"{feature.name}_or_missing")(x, flag)
        if feature.kind == "vector":
            return x
        return keras.layers.Concatenate()([x, keras.layers.Reshape((1,), dtype="float32")(flag)])

    def _build_custom(self, feature: FeatureConfig, kind: KindChoice, *tensors: keras.KerasTensor) -> keras.KerasTensor:
        """Build the part of a custom kind."""
        mean, std = self.numbers[feature.name] if feature.kind == "number" else (None, None)
        length = feature.max_length if feature.kind in POOLED else None
        setup = FeatureSetup(feature.name, self.side, length, mean, std)
        source = f"{self.side} feature {feature.name!r} ({kind.name})"
        return _call_custom(source, kind.row.part, (*tensors, setup), kind.arguments, self.precision)

    def _input(self, name: str, shape: tuple[int | None, ...], dtype: str) -> keras.KerasTensor:
        self.inputs[name] = keras.Input(shape, dtype=dtype, name=name)
        return self.inputs[name]


def build_custom_tower(
    x: keras.KerasTensor, choice: TowerChoice, setup: TowerSetup, precision: str
) -> keras.KerasTensor:
    """Build a custom tower on the combination [B, width]; the output has any width."""
    source = f"{setup.side}.tower {choice.name!r}"
    return _call_custom(source, TOWERS[choice.name], (x, setup), choice.arguments, precision)


def _call_custom(
    source: str, function: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any], precision: str
) -> keras.KerasTensor:
    """Call a custom function, and refuse an output that is not [B, width]."""
    # Layers that the function creates get the recipe's precision, unless the function sets another.
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        output = function(*positional, **arguments)
    except Exception as error:
        raise RecipeError(
            f"{source}: expected a function that builds Keras layers, received {type(error).__name__}: {error}"
        ) from error
    finally:
        keras.config.set_dtype_policy(policy)
    if not isinstance(output, keras.KerasTensor):
        raise RecipeError(f"{source}: expected a Keras tensor of shape [B, width], received {type(output).__name__}")
    if len(output.shape) != 2 or output.shape[0] is not None or output.shape[1] is None:
        raise RecipeError(
            f"{source}: expected shape [B, width], (None, width) to Keras, received {tuple(output.shape)}"
        )
    if not keras.backend.is_float_dtype(output.dtype):
        raise RecipeError(f"{source}: expected floating-point numbers, received {output.dtype}")
    return output
