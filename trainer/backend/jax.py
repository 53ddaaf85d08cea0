"""JAX: a step is a pure function of all variables, compiled with donated buffers, which XLA updates in place.

Legend: `N` ids, `U` distinct ids, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from longtail.bundle.arrays import Array
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

_Beside = TypeVar("_Beside")


def gather(table: keras.Variable, ids: jax.Array) -> jax.Array:
    """Rows of a variable, shape [*ids.shape, D]."""
    return jnp.take(table.value, ids, axis=0, mode="clip")


def scatter(table: keras.Variable, ids_U: jax.Array, rows_UD: jax.Array) -> None:
    """Replace rows of a variable; ids past its end are dropped."""
    table.assign(table.value.at[ids_U].set(rows_UD, mode="drop"))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks of them, [N, D] each, in order."""
    rows, start = np.empty(tuple(table.shape), table.dtype), 0
    for rows_ND in blocks:
        rows[start : start + len(rows_ND)] = rows_ND
        start += len(rows_ND)
    table.assign(rows)


def unique(ids_N: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Distinct ids padded to a fixed length with `limit`, an id past every table's end; positions, [N]."""
    distinct, positions = jnp.unique(ids_N, return_inverse=True, size=min(ids_N.shape[0], limit), fill_value=limit)
    return distinct, positions.reshape(ids_N.shape)


def count(positions_N: jax.Array, distinct_U: jax.Array) -> jax.Array:
    """How often every distinct id came, float32 [U]."""
    return jnp.zeros(distinct_U.shape).at[positions_N].add(1.0)


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Beside]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Beside], list[Tensor], list[Tensor]]:
    """The loss and what it returns beside it; its gradients with respect to `rows`, and to dense variables.

    Args:
        loss: of the rows to a scalar, and whatever else is wanted of it.
        rows: distinct rows of every table, float32 [U, D] each.
        variables: dense variables that the loss reads.
    """

    def pure(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, _Beside]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss(rows)

    values = [variable.value for variable in variables]
    value, (row_gradients, gradients) = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(rows, values)
    return value, row_gradients, gradients


def sum_of_blocks(
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Tensors, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """The sum of a loss over blocks of rows, differentiated block by block: as TensorFlow's."""

    def summed(shared: Tensors, rows: Tensors, fixed: Tensors) -> tuple[Any, Any]:
        cut = jax.tree.map(lambda column: column.reshape(blocks, -1, *column.shape[1:]), (rows, fixed))

        def add(sums: Any, block: Any) -> tuple[Any, Any]:
            of_block = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (value, kept), (of_shared, of_rows) = of_block(shared, *block)
            return jax.tree.map(jnp.add, sums, (value, of_shared)), (of_rows, kept)

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, shared))
        (value, of_shared), columns = jax.lax.scan(add, nothing, cut)
        of_rows, kept = jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:]), columns)
        return (value, kept), (of_shared, of_rows)

    @jax.custom_vjp
    def total(shared: Tensors, rows: Tensors, fixed: Tensors) -> Any:
        return summed(shared, rows, fixed)[0]

    def backward(gradients: Any, upstream: Any) -> tuple[Any, Any, None]:
        return (*jax.tree.map(lambda gradient: upstream[0] * gradient, gradients), None)

    total.defvjp(summed, backward)
    value, kept = total(shared, rows, fixed)
    return value, jax.lax.stop_gradient(kept)


def on_cpu() -> bool:
    """Whether tensors are in this machine's memory."""
    return jax.default_backend() == "cpu"


def compile_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing to do: the whole step is compiled with XLA."""
    return function


def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:
    """Compile a step that assigns to variables."""

    def pure(values: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            result = step(batch)
        return result, [scope.get_current_value(variable) for variable in variables]

    compiled = jax.jit(pure, donate_argnums=0)

    def run(batch: dict[str, Any]) -> Any:
        result, values = compiled([variable.value for variable in variables], batch)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return result

    return run


def compile_tower(tower: keras.Model) -> Callable[[Mapping[str, Any]], jax.Array]:
    """A tower's outputs outside of training, compiled for every shape of inputs, not operation by operation; in the
    precision that the tower computes in when it is first called."""
    variables = tower.variables

    def pure(values: list[Tensor], inputs: Mapping[str, Any]) -> jax.Array:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs: jax.Array = tower(inputs)
            return outputs

    compiled = jax.jit(pure)

    def run(inputs: Mapping[str, Any]) -> jax.Array:
        embedded: jax.Array = compiled([variable.value for variable in variables], dict(inputs))
        return embedded

    return run


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing to do: JAX rewrites no source."""
    return function


def make_deterministic() -> None:
    """Nothing to do: XLA's CPU programs are; on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true."""
