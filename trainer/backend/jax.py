"""JAX: a step is a pure function of all variables, compiled with donated buffers, which XLA updates in place.

On several devices a mesh of one axis has them all, of all processes. Variables of `rows_variable` lie on it in equal
parts of rows, every other variable whole on each device; what a step and a tower take lies on it by its first axis.
Programs say nothing of it but where rows are read and written, so that they compute what they do on one device.

Legend: `N` ids, `U` distinct ids, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from longtail.bundle.arrays import Array
from longtail.trainer.backend.mesh import AXIS, by_rows, gather_of, mesh_in_use, scatter_of
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

_Beside = TypeVar("_Beside")


def devices() -> int:
    """Return how many devices compute together."""
    mesh = mesh_in_use()
    return 1 if mesh is None else int(mesh.size)


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Create a variable that is read and written by rows, float32 [rows, width], in equal parts on all devices.

    There are more rows where parts could not be equal; its attribute `rows` is the number that was wanted.
    """
    shards, placed = devices(), {}
    if (distribution := keras.distribution.distribution()) is not None:
        placed = {"layout": keras.distribution.TensorLayout((AXIS, None), distribution.device_mesh)}
    shape = (-(-rows // shards) * shards, width)
    variable = keras.Variable(initializer, shape=shape, dtype="float32", trainable=False, name=name, **placed)
    variable.rows = rows
    return variable


def gather(table: keras.Variable, ids: jax.Array) -> jax.Array:
    """Return rows of a variable, shape [*ids.shape, D]."""
    if (mesh := mesh_in_use()) is not None and hasattr(table, "rows"):
        rows: jax.Array = gather_of(mesh)(table.value, ids)
        return rows
    return jnp.take(table.value, ids, axis=0, mode="clip")


def scatter(table: keras.Variable, ids_U: jax.Array, rows_UD: jax.Array) -> None:
    """Replace rows of a variable; ids past its end are dropped."""
    if (mesh := mesh_in_use()) is not None and hasattr(table, "rows"):
        table.assign(scatter_of(mesh)(table.value, ids_U, rows_UD))
        return
    table.assign(table.value.at[ids_U].set(rows_UD, mode="drop"))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks of them, [N, D] each, in order; rows past the last become 0."""
    shape, sharding = tuple(table.shape), table.value.sharding
    own = [part[0].indices(shape[0])[:2] for part in sharding.addressable_devices_indices_map(shape).values()]
    first, last = min(start for start, _ in own), max(end for _, end in own)
    rows, start = np.zeros((last - first, *shape[1:]), table.dtype), 0
    for rows_ND in blocks:
        low, high = max(start, first), min(start + len(rows_ND), last)
        if low < high:
            rows[low - first : high - first] = rows_ND[low - start : high - start]
        start += len(rows_ND)

    if mesh_in_use() is None:
        table.assign(rows)
        return

    def part(index: tuple[slice, ...] | None) -> Array:
        low, high, _ = (index or (slice(None),))[0].indices(shape[0])
        of_device: Array = rows[low - first : high - first]
        return of_device

    table.assign(jax.make_array_from_callback(shape, sharding, part))


def unique(ids_N: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Return distinct ids padded to a fixed length with `limit`, an id past every table's end; positions, [N]."""
    distinct, positions = jnp.unique(ids_N, return_inverse=True, size=min(ids_N.shape[0], limit), fill_value=limit)
    return distinct, positions.reshape(ids_N.shape)


def count(positions_N: jax.Array, distinct_U: jax.Array) -> jax.Array:
    """Return how often every distinct id came, float32 [U]."""
    return jnp.zeros(distinct_U.shape).at[positions_N].add(1.0)


class _Within(keras.StatelessScope):  # type: ignore[misc]  # Keras is untyped
    """Has values for some variables; all others have those of the scope around it.

    By itself Keras' scope gives those that variables held when the step was traced: a constant of the program, gone
    with the buffers that the step was given.
    """

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the variable's value here, or around."""
        value, around = super().get_current_value(variable), self.original_scope
        return around.get_current_value(variable) if value is None and around is not None else value


def value_and_gradients(
    loss: Callable[[list[Tensor]], tuple[Tensor, _Beside]], rows: list[Tensor], variables: Sequence[keras.Variable]
) -> tuple[tuple[Tensor, _Beside], list[Tensor], list[Tensor]]:
    """Compute the loss and what it returns with it; its gradients by `rows`, float32 [U, D], and by variables."""

    def pure(rows: list[Tensor], values: list[Tensor]) -> tuple[Tensor, _Beside]:
        with _Within(state_mapping=list(zip(variables, values, strict=True))):
            return loss(rows)

    values = [variable.value for variable in variables]
    value, (row_gradients, gradients) = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True)(rows, values)
    return value, row_gradients, gradients


def sum_of_blocks(
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Return the sum of a loss over blocks of rows, differentiated block by block: as TensorFlow's."""

    spread = devices() > 1  # then every block has rows of every device

    def cut(column: jax.Array) -> jax.Array:
        if spread:
            return column.reshape(-1, blocks, *column.shape[1:]).swapaxes(0, 1)
        return column.reshape(blocks, -1, *column.shape[1:])

    def whole(column: jax.Array) -> jax.Array:
        ordered = column.swapaxes(0, 1) if spread else column
        return ordered.reshape(-1, *column.shape[2:])

    def summed(shared: Tensors, rows: Tensors, fixed: Any) -> tuple[Any, Any]:
        def add(sums: Any, block: Any) -> tuple[Any, Any]:
            of_block = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            (value, kept), (of_shared, of_rows) = of_block(shared, *block)
            return jax.tree.map(jnp.add, sums, (value, of_shared)), (of_rows, kept)

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, shared))
        (value, of_shared), columns = jax.lax.scan(add, nothing, jax.tree.map(cut, (rows, fixed)))
        of_rows, kept = jax.tree.map(whole, columns)
        return (value, kept), (of_shared, of_rows)

    @jax.custom_vjp
    def total(shared: Tensors, rows: Tensors, fixed: Any) -> Any:
        return summed(shared, rows, fixed)[0]

    def backward(gradients: Any, upstream: Any) -> tuple[Any, Any, None]:
        return (*jax.tree.map(lambda gradient: upstream[0] * gradient, gradients), None)

    total.defvjp(summed, backward)
    value, kept = total(shared, rows, fixed)
    return value, jax.lax.stop_gradient(kept)


def on_cpu() -> bool:
    """Return whether tensors are in this machine's memory."""
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

    placed = None
    if (mesh := mesh_in_use()) is not None:
        placed = (NamedSharding(mesh, PartitionSpec()), [variable.value.sharding for variable in variables])
    compiled = jax.jit(pure, donate_argnums=0, out_shardings=placed)

    def run(batch: dict[str, Any]) -> Any:
        result, values = compiled([variable.value for variable in variables], by_rows(batch))
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return result

    return run


def compile_tower(tower: keras.Model) -> Callable[[Mapping[str, Any]], jax.Array]:
    """Compile a tower's outputs outside of training, in the precision that it computes in when it is first called."""
    variables = tower.variables

    def pure(values: list[Tensor], inputs: Mapping[str, Any]) -> jax.Array:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs: jax.Array = tower(inputs)
            return outputs

    mesh = mesh_in_use()
    compiled = jax.jit(pure, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))

    def run(inputs: Mapping[str, Any]) -> jax.Array:
        embedded: jax.Array = compiled([variable.value for variable in variables], by_rows(inputs))
        return embedded

    return run


def make_deterministic() -> None:
    """Nothing to do: XLA's CPU programs are; on a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true."""
