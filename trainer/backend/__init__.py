"""Where Keras and its backend are reached: imported on first use, and the operations Keras has no neutral form for.

The tables `SAMPLERS`, `WEIGHTS`, `LOSSES` and `ROW_OPTIMIZERS` are rows of functions of tensors, and a recipe is
checked against those very tables. Their modules take `keras` and `ops` from here, so that a recipe can be read
without loading Keras. Modules that build Keras layers import Keras themselves.

What Keras lacks is sparse access to tables and compiled steps; `tensorflow.py` and `jax.py` have both, in functions
of the same names.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from longtail.trainer.backend.tensors import Operations, Step, Tensor

if TYPE_CHECKING:
    import keras

    from longtail.trainer.backend.tensorflow import (
        bag_sums,
        compile_loss,
        compile_step,
        compile_tower,
        count,
        devices,
        distinct,
        fill,
        gather,
        make_deterministic,
        on_cpu,
        rows_variable,
        scatter,
        sum_of_blocks,
        sums,
        take,
        unique,
        value_and_gradients,
    )

__all__ = [
    "Step",
    "Tensor",
    "bag_sums",
    "compile_loss",
    "compile_step",
    "compile_tower",
    "count",
    "devices",
    "distinct",
    "fill",
    "gather",
    "keras",
    "make_deterministic",
    "on_cpu",
    "ops",
    "rows_variable",
    "scatter",
    "sum_of_blocks",
    "sums",
    "take",
    "unique",
    "value_and_gradients",
]


class _OnFirstUse:
    """Stands for a module and imports the module when one of its names is first used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._module), name)


if TYPE_CHECKING:
    ops: Operations
else:
    keras, ops = _OnFirstUse("keras"), _OnFirstUse("keras.ops")

    def __getattr__(name: str) -> Any:
        """Return an operation of the backend in use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_in_use(), name)


def _in_use() -> ModuleType:
    """Return the operations of Keras' backend."""
    name = keras.backend.backend()
    if name not in ("tensorflow", "jax"):
        raise ImportError(f"Keras backend: expected tensorflow or jax, found {name}")
    return import_module(f"longtail.trainer.backend.{name}")
