"""Towers and feature kinds of one's own: where they are called, and what their layers may not do.

Legend: `B` batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from longtail.trainer.config.towers import KindChoice, TowerChoice
from longtail.trainer.errors import RecipeError
from longtail.trainer.layers import TOWERS, FeatureSetup, TowerSetup


def own_tower(x: keras.KerasTensor, choice: TowerChoice, setup: TowerSetup, precision: str) -> keras.KerasTensor:
    """Build a custom tower on the combination [B, width]; [B, any width]."""
    where = f"{setup.side}.tower {choice.name!r}"
    return _part(where, TOWERS[choice.name], (x, setup), choice.arguments, precision)


def own_part(
    tensors: tuple[keras.KerasTensor, ...], kind: KindChoice, setup: FeatureSetup, precision: str
) -> keras.KerasTensor:
    """Build the part of a custom feature kind from the feature's tensors, as `FeatureKind` says; [B, any width]."""
    where = f"{setup.side} feature {setup.name!r} ({kind.name})"
    return _part(where, kind.row.part, (*tensors, setup), kind.arguments, precision)


def layers_of(tower: keras.Model) -> list[keras.layers.Layer]:
    """Return every layer of a tower, and those that layers are made of."""
    return list(tower._flatten_layers(include_self=False))


def _part(
    where: str, function: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any], precision: str
) -> keras.KerasTensor:
    """Return what a function of one's own builds, refused unless it is [B, width]."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        made = function(*positional, **arguments)
    except Exception as error:
        raise RecipeError(
            f"{where}: expected a function that builds Keras layers, received {type(error).__name__}: {error}"
        ) from error
    finally:
        keras.config.set_dtype_policy(policy)
    if not isinstance(made, keras.KerasTensor):
        raise RecipeError(f"{where}: expected a Keras tensor of shape [B, width], received {type(made).__name__}")
    if len(made.shape) != 2 or made.shape[0] is not None or made.shape[1] is None:
        raise RecipeError(f"{where}: expected shape [B, width], (None, width) to Keras, received {tuple(made.shape)}")
    if not keras.backend.is_float_dtype(made.dtype):
        raise RecipeError(f"{where}: expected floating-point numbers, received {made.dtype}")
    return made
