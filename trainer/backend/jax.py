"""The backend on JAX: a step is a pure function of all variables, whose buffers XLA updates in place.

`mesh.py` replaces the functions that read or write rows where several devices compute. tensorflow.py has the docstrings
of functions that are alike on both.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `B` bags, `P` positions of a bag.
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

_Auxiliary = TypeVar("_Auxiliary")
_DENSE_ROWS = 4096
"""Most rows of which bags are summed by a product with a dense matrix of weights."""

__all__ = [
    "bag_sums", "compile_loss", "compile_step", "compile_tower", "count", "distinct", "fill", "gather",
    "make_deterministic", "on_cpu", "rows_variable", "scatter", "sum_of_blocks", "sums", "take", "unique",
    "value_and_gradients",
]  # fmt: skip


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Create a variable that is read and written by rows, float32 [rows, width]; its attribute `rows` counts them."""
    variable = keras.Variable(initializer, shape=(rows, width), dtype="float32", trainable=False, name=name)
    variable.rows = rows
    return variable


def gather(table: keras.Variable, ids: jax.Array) -> jax.Array:
    """Return rows of a variable, shape [*ids.shape, D]."""
    # Padding has ids past the end; its rows may be any, as their updates are dropped.
    return jnp.take(table.value, ids, axis=0, mode="clip")


def scatter(table: keras.Variable, ids_U: jax.Array, rows_UD: jax.Array) -> None:
    """Replace rows of a variable; ids past its end are dropped."""
    table.assign(table.value.at[ids_U].set(rows_UD, mode="drop"))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks, [N, D] each, in order."""
    # Collected on the host: on the device, every block would copy the table.
    rows, start = np.zeros(tuple(table.shape), table.dtype), 0
    for rows_ND in blocks:
        rows[start : start + len(rows_ND)] = rows_ND
        start += len(rows_ND)
    table.assign(rows)


def unique(ids_N: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Return distinct ids padded with `limit`, an id past every table's end; positions, [N]."""
    # XLA needs a fixed size, so the array has room for the largest number of distinct ids.
    distinct, positions = jnp.unique(ids_N, return_inverse=True, size=min(ids_N.shape[0], limit), fill_value=limit)
    return distinct, positions.reshape(ids_N.shape)


def distinct(ids: Sequence[jax.Array], limit: int, *, shared: bool = False) -> tuple[jax.Array, list[jax.Array]]:  # noqa: ARG001
    """Return the distinct ids of arrays, [U], and positions in them, in each array's shape."""
    ids_U, positions_N = unique(jnp.concatenate([array.reshape(-1) for array in ids]), limit)
    positions = jnp.split(positions_N, np.cumsum([array.size for array in ids])[:-1])
    return ids_U, [flat.reshape(array.shape) for flat, array in zip(positions, ids, strict=True)]


def take(rows_UD: jax.Array, positions: jax.Array, *, shared: bool = False) -> jax.Array:  # noqa: ARG001
    """Return rows by positions among the ids of `distinct`, shape [*positions.shape, D]."""
    return jnp.take(rows_UD, positions, axis=0)


def bag_sums(rows_UD: jax.Array, positions_BP: jax.Array, weights_BP: jax.Array, *, shared: bool = False) -> jax.Array:
    """Sum the rows of every bag by constant weights, float32 [B, D]; positions are those of `distinct`."""
    if len(rows_UD) > _DENSE_ROWS:
        return jnp.einsum("bpd,bp->bd", take(rows_UD, positions_BP, shared=shared), weights_BP)
    bags, rows = len(positions_BP), len(rows_UD)
    weights_BU = jnp.zeros((bags, rows)).at[jnp.arange(bags)[:, None], positions_BP].add(weights_BP)
    return weights_BU @ rows_UD


def sums(
    table: keras.Variable, parts: Sequence[tuple[jax.Array, jax.Array]], gradients: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum gradients by distinct id: ids, [U], their rows, and sums, [U, D]."""
    ids_U, positions_N = unique(jnp.concatenate([ids for ids, _ in parts]), table.rows)
    sums_UD = jax.ops.segment_sum(jnp.concatenate(gradients), positions_N, num_segments=len(ids_U))
    return ids_U, gather(table, ids_U), sums_UD


def count(positions_N: jax.Array, distinct_U: jax.Array) -> jax.Array:
    """Count the occurrences of every distinct id, float32 [U]."""
    return jnp.zeros(distinct_U.shape).at[positions_N].add(1.0)


class _InnerScope(keras.StatelessScope):  # type: ignore[misc]  # Keras is untyped
    """A Keras scope with values of some variables; all other variables have their values in the outer scope.

    Without this class Keras would take the outer variables' values at tracing time, as constants of the program, whose
    buffers are donated to the step and then deleted.
    """

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the variable's value in this scope, or else in the outer one."""
        value, outer = super().get_current_value(variable), self.original_scope
        return outer.get_current_value(variable) if value is None and outer is not None else value


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Auxiliary]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Auxiliary], list[Tensor], list[Tensor]]:
    """Compute a loss, its auxiliary output, and gradients by `rows`, float32 [U, D], and variables."""

    def pure(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, _Auxiliary]:
        with _InnerScope(state_mapping=list(zip(variables, values, strict=True))):
            return loss(rows)

    values = [variable.value for variable in variables]
    value, (row_gradients, gradients) = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(rows, values)
    return value, row_gradients, gradients


def sum_of_blocks(
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Any, fixed_shared: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Sum a loss over blocks of rows, differentiated block by block; concatenate the rows' state."""

    def run(shared: Tensors, rows: Tensors, fixed: Any, fixed_shared: Any) -> Any:
        real_B = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
        return run_blocks(loss, blocks, shared, rows, fixed, fixed_shared, real_B)

    return sum_with_gradients(run, shared, rows, fixed, fixed_shared)


def run_blocks(
    loss: BlockLoss, blocks: int, shared: Tensors, rows: Tensors, fixed: Any, fixed_shared: Any, real_B: jax.Array
) -> Any:
    """Compute (sum, gradients by `shared`), (gradients by `rows`, state), block by block of rows.

    `real_B` is False for rows that only fill up a block.
    """
    height = -(-len(real_B) // blocks)

    def cut(column: jax.Array, filler: Any = None) -> jax.Array:
        return pad_rows(column, blocks, filler).reshape(blocks, height, *column.shape[1:])

    def block_sum(shared: Tensors, rows: Tensors, fixed: Any, real: jax.Array) -> tuple[Tensor, Tensors]:
        losses: Any
        losses, state = loss(shared, rows, fixed, fixed_shared)
        return jnp.sum(losses, where=real), state

    def add(sums: Any, block: Any) -> tuple[Any, Any]:
        (value, state), (by_shared, by_row) = jax.value_and_grad(block_sum, argnums=(0, 1), has_aux=True)(
            shared, *block
        )
        return jax.tree.map(jnp.add, sums, (value, by_shared)), (by_row, state)

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, shared))
    sums, columns = jax.lax.scan(add, zeros, (*jax.tree.map(cut, (rows, fixed)), cut(real_B, False)))
    return sums, jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:])[: len(real_B)], columns)


def pad_rows(column: jax.Array, multiple: int, filler: Any = 0) -> jax.Array:
    """Pad the first axis to a multiple with `filler`, or its last entry if None."""
    missing = -len(column) % multiple
    if not missing:
        return column
    mode = {"mode": "edge"} if filler is None else {"constant_values": filler}
    return jnp.pad(column, [(0, missing)] + [(0, 0)] * (column.ndim - 1), **mode)


def sum_with_gradients(
    run: Callable[..., Any], shared: Tensors, rows: Tensors, fixed: Any, fixed_shared: Any
) -> tuple[Tensor, Tensors]:
    """Return the sum and state that `run` computes; their gradients come from the same pass."""

    def forward(*arguments: Any) -> tuple[Any, Any]:
        (value, by_shared), (by_row, state) = run(*arguments)
        return (value, state), (by_shared, by_row)

    @jax.custom_vjp
    def total(*arguments: Any) -> Any:
        return forward(*arguments)[0]

    def backward(gradients: Any, upstream: Any) -> tuple[Any, Any, None, None]:
        return (*jax.tree.map(lambda gradient: upstream[0] * gradient, gradients), None, None)

    total.defvjp(forward, backward)
    value, state = total(shared, rows, fixed, fixed_shared)
    return value, jax.lax.stop_gradient(state)


def on_cpu() -> bool:
    """Return whether tensors are in this machine's memory."""
    return jax.default_backend() == "cpu"


def compile_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: the whole step is compiled with XLA."""
    return function


def compile_step(
    step: Step, variables: Sequence[keras.Variable], *, out_shardings: Any = None, put: Callable[..., Any] = dict
) -> Step:
    """Compile a step that assigns to variables; `put` puts a batch onto devices."""

    def pure(values: list[Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            result = step(batch)
        return result, [scope.get_current_value(variable) for variable in variables]

    compiled = jax.jit(pure, donate_argnums=0, out_shardings=out_shardings)

    def run(batch: dict[str, Any]) -> Any:
        result, values = compiled([variable.value for variable in variables], put(batch))
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return result

    return run


def compile_tower(
    tower: keras.Model, *, out_shardings: Any = None, put: Callable[..., Any] = dict
) -> Callable[[Mapping[str, Any]], jax.Array]:
    """Compile a tower's outputs outside of training, in its precision at the first call."""
    variables = tower.variables

    def pure(values: list[Tensor], inputs: Mapping[str, Any]) -> jax.Array:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            embeddings_BD: jax.Array = tower(inputs)
            return embeddings_BD

    compiled = jax.jit(pure, out_shardings=out_shardings)

    def run(inputs: Mapping[str, Any]) -> jax.Array:
        embeddings_BD: jax.Array = compiled([variable.value for variable in variables], put(inputs))
        return embeddings_BD

    return run


def make_deterministic() -> None:
    """Do nothing: XLA's CPU programs are deterministic; on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true."""
