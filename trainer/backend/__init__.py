"""Keras and its backend: operations for which Keras has no backend-neutral form, and Keras itself at first use.

Recipes are checked against `SAMPLERS`, `WEIGHTS`, `LOSSES` and `ROW_OPTIMIZERS`, whose functions compute tensors. Their
modules take `keras` and `ops` from here, so that checking a recipe loads no Keras.

`tensorflow.py` and `jax.py` define the same functions: access to tables by rows, and compiled steps. `mesh.py` replaces
some of JAX's where several devices compute.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longtail.trainer.backend.tensors import Operations, Step, Tensor, Tensors

if TYPE_CHECKING:
    import keras

    from longtail.trainer.backend.tensorflow import *  # noqa: F403 (other backends have the same names)

    ops: Operations
else:

    class _LazyModule:
        """Import a module when one of its names is first used."""

        def __init__(self, module: str) -> None:
            self.__name__ = module

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # the next access finds it without this function
            return value

    keras, ops = _LazyModule("keras"), _LazyModule("keras.ops")

    def __getattr__(name: str) -> Any:
        """Load the functions of Keras' backend when one of them is first used."""
        if not name.startswith("__") and "gather" not in globals():
            select(keras.backend.backend())
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def select(backend: str) -> None:
    """Use the functions of `tensorflow`, `jax` or `mesh` in this process."""
    if backend not in ("tensorflow", "jax", "mesh"):
        raise ImportError(f"Keras backend: expected tensorflow or jax, found {backend}")
    for name in ("jax", "mesh") if backend == "mesh" else (backend,):
        module = import_module(f"{__name__}.{name}")
        globals().update({function: getattr(module, function) for function in module.__all__})


__all__ = ["Step", "Tensor", "Tensors", "keras", "ops", "select"]
