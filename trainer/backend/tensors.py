"""Types of tensors and of operations on tensors, for all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt


class Tensor(Protocol):
    """A TensorFlow tensor or a JAX array; its shape is in the names of parameters and variables.

    A suffix gives the axes: `queries_BD` is [B, D]; the legend in a module's docstring explains the letters. Functions
    that only read a `Tensor` also accept NumPy arrays.
    """

    @property
    def shape(self) -> Any:
        """Sizes of the axes; None for one that is not known while a graph is traced."""

    @property
    def dtype(self) -> Any:
        """As the backend names it."""

    def __float__(self) -> float: ...
    def __getitem__(self, key: Any, /) -> Tensor: ...
    def __neg__(self) -> Tensor: ...
    def __add__(self, other: Any, /) -> Tensor: ...
    def __radd__(self, other: Any, /) -> Tensor: ...
    def __sub__(self, other: Any, /) -> Tensor: ...
    def __rsub__(self, other: Any, /) -> Tensor: ...
    def __mul__(self, other: Any, /) -> Tensor: ...
    def __rmul__(self, other: Any, /) -> Tensor: ...
    def __truediv__(self, other: Any, /) -> Tensor: ...
    def __rtruediv__(self, other: Any, /) -> Tensor: ...
    def __floordiv__(self, other: Any, /) -> Tensor: ...
    def __gt__(self, other: Any, /) -> Tensor: ...
    def __ge__(self, other: Any, /) -> Tensor: ...
    def __lt__(self, other: Any, /) -> Tensor: ...


class Operations(Protocol):
    """`keras.ops` as the type checker sees it, which knows no types of Keras: tensors come out of every operation."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]: ...

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Sizes of the axes: integers, or tensors where one is not known while a graph is traced."""

    def top_k(self, x: Any, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest values along the last axis, and their positions."""

    def convert_to_numpy(self, x: Any) -> npt.NDArray[Any]:
        """Return a copy in the memory of the host."""


Step = Callable[[dict[str, Any]], Tensor]
"""One update of a model by a batch, tensors by name; returns the mean loss."""

Tensors = dict[str, Tensor]
BlockLoss = Callable[[Tensors, Tensors, Any, Any], tuple[Tensor, Tensors]]
"""Losses of some rows, of tensors by name: of all rows and of each, differentiated; of each and of all, not so."""
