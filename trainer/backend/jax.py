"""Implement the backend on JAX: a step is a pure function of all variables, whose buffers XLA updates in place.

Several devices form a mesh of one axis, over all processes. Variables of `rows_variable` are split into equal parts of
rows, and every other variable is whole on each device; inputs of steps and towers are split by their first axis. Only
code that reads or writes rows mentions the mesh, so programs compute the same as on one device.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `B` bags, `P` places of a bag.
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
from longtail.trainer.backend import mesh as on_mesh
from longtail.trainer.backend.mesh import AXIS, Owned, Requested, by_rows, mesh_in_use
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

_Beside = TypeVar("_Beside")
_DENSE_ROWS = 4096
"""Most rows of which bags are summed by a product with a dense matrix of weights."""


def devices() -> int:
    """Return the number of devices that compute together."""
    mesh = mesh_in_use()
    return 1 if mesh is None else int(mesh.size)


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Create a variable that is read and written by rows, float32 [rows, width], in equal parts on all devices.

    Rows are added until all parts are equal; the attribute `rows` is the number without them. On a mesh
    `mesh.places_of` gives the places of rows.
    """
    if (distribution := keras.distribution.distribution()) is None:
        variable = keras.Variable(initializer, shape=(rows, width), dtype="float32", trainable=False, name=name)
        variable.rows = rows
        return variable
    variable = keras.Variable(
        "zeros", shape=(on_mesh.padded_rows(rows, devices()), width), dtype="float32", trainable=False, name=name,
        layout=keras.distribution.TensorLayout((AXIS, None), distribution.device_mesh),
    )  # fmt: skip
    variable.rows = rows
    if initializer != "zeros":
        fill(variable, [np.asarray(initializer((rows, width)))])
    return variable


def gather(table: keras.Variable, ids: jax.Array | Requested | Owned) -> jax.Array:
    """Return rows of a variable, shape [*ids.shape, D]; each device gets its own for `Requested` and `Owned` ids."""
    if isinstance(ids, Requested):
        return on_mesh.fetch_of(table.rows, table.value, ids)
    if isinstance(ids, Owned):
        return on_mesh.read_of(table.rows, table.value, ids)
    if (mesh := mesh_in_use()) is not None and hasattr(table, "rows"):
        return on_mesh.gather_of(mesh, table.rows)(table.value, ids)
    return jnp.take(table.value, ids, axis=0, mode="clip")


def scatter(table: keras.Variable, ids_U: jax.Array | Owned, rows_UD: jax.Array) -> None:
    """Replace rows of a variable; ids past its end are dropped."""
    if isinstance(ids_U, Owned):
        table.assign(on_mesh.write_of(table.rows, table.value, ids_U, rows_UD))
        return
    table.assign(table.value.at[ids_U].set(rows_UD, mode="drop"))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks of them, [N, D] each, in order; rows past the last become 0."""
    shape, sharding = tuple(table.shape), table.value.sharding
    own = [part[0].indices(shape[0])[:2] for part in sharding.addressable_devices_indices_map(shape).values()]
    first, last = min(start for start, _ in own), max(end for _, end in own)
    rows, start = np.zeros((last - first, *shape[1:]), table.dtype), 0
    for rows_ND in blocks:
        places_N = np.arange(start, start + len(rows_ND))
        if mesh_in_use() is not None:
            places_N = on_mesh.places_of(places_N, table.rows)
        own_N = (places_N >= first) & (places_N < last)
        rows[places_N[own_N] - first] = rows_ND[own_N]
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


def distinct(
    ids: Sequence[jax.Array], limit: int, *, shared: bool = False
) -> tuple[jax.Array | Requested, list[jax.Array]]:
    """Return the distinct ids of several arrays, [U], and the positions of each array's, shaped as it is.

    On a mesh they are of each device's parts of the arrays if they are not `shared`; ids are for `gather` and `sums`
    then, positions for `take`.
    """
    if (mesh := mesh_in_use()) is not None and not shared:
        return on_mesh.distinct_of(mesh, ids, limit)
    ids_U, positions_N = unique(jnp.concatenate([each.reshape(-1) for each in ids]), limit)
    positions = jnp.split(positions_N, np.cumsum([each.size for each in ids])[:-1])
    return ids_U, [at.reshape(each.shape) for at, each in zip(positions, ids, strict=True)]


def take(rows_UD: jax.Array, positions: jax.Array, *, shared: bool = False) -> jax.Array:
    """Return rows by positions among the ids of `distinct`, shape [*positions.shape, D]."""
    if (mesh := mesh_in_use()) is not None and not shared:
        return on_mesh.take_of(mesh, rows_UD, positions)
    return jnp.take(rows_UD, positions, axis=0)


def bag_sums(rows_UD: jax.Array, positions_BP: jax.Array, weights_BP: jax.Array, *, shared: bool = False) -> jax.Array:
    """Sum the rows of every bag by constant weights, float32 [B, D]; positions are those of `distinct`."""
    if mesh_in_use() is not None or len(rows_UD) > _DENSE_ROWS:
        return jnp.einsum("bpd,bp->bd", take(rows_UD, positions_BP, shared=shared), weights_BP)
    bags, rows = len(positions_BP), len(rows_UD)
    weights_BU = jnp.zeros((bags, rows)).at[jnp.arange(bags)[:, None], positions_BP].add(weights_BP)
    return weights_BU @ rows_UD


def sums(
    table: keras.Variable, read: Sequence[tuple[Any, jax.Array]], gradients: Sequence[jax.Array]
) -> tuple[Any, jax.Array, jax.Array]:
    """Return the distinct ids that were read together, [U], their rows, and the sums of their gradients, [U, D]."""
    ids = [ids_U for ids_U, _ in read]
    if isinstance(ids[0], Requested):
        owned, sums_UD = on_mesh.sums_of(table.rows, table.value, ids, gradients)
        return owned, gather(table, owned), sums_UD
    if len(read) == 1:
        return *read[0], gradients[0]
    ids_U, positions_N = unique(jnp.concatenate(ids), table.rows)
    sums_UD = jax.ops.segment_sum(jnp.concatenate(gradients), positions_N, num_segments=len(ids_U))
    return ids_U, gather(table, ids_U), sums_UD


def count(positions_N: jax.Array, distinct_U: jax.Array) -> jax.Array:
    """Count the occurrences of every distinct id, float32 [U]."""
    return jnp.zeros(distinct_U.shape).at[positions_N].add(1.0)


class _Within(keras.StatelessScope):  # type: ignore[misc]  # Keras is untyped
    """A Keras scope with values of some variables; all other variables have their values in the outer scope.

    Without this class Keras would take the outer variables' values at tracing time, as constants of the program, whose
    buffers are donated to the step and then deleted.
    """

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Return the variable's value in this scope, or else in the outer one."""
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
    loss: BlockLoss, shared: Tensors, rows: Tensors, fixed: Any, seen: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Return the sum of a loss over blocks of rows, differentiated block by block: as TensorFlow's.

    On a mesh each device computes its own rows. What all rows see it gathers from the others, and gives each of them
    the sum of its part's gradient, once for all blocks.
    """
    mesh, every = mesh_in_use(), jax.tree.leaves(rows)[0].shape[0]

    def of_rows_here(shared: Tensors, seen: Any, rows: Tensors, fixed: Any, real_B: jax.Array) -> Any:
        each = -(-len(real_B) // blocks)

        def cut(column: jax.Array, more: Any = None) -> jax.Array:
            return on_mesh.lengthened(column, blocks, more).reshape(blocks, each, *column.shape[1:])

        def sum_of(shared: Tensors, rows: Tensors, fixed: Any, real: jax.Array) -> tuple[Tensor, Tensors]:
            losses: Any
            losses, kept = loss(shared, rows, fixed, seen)
            return jnp.sum(losses, where=real), kept

        def add(sums: Any, block: Any) -> tuple[Any, Any]:
            of_block = jax.value_and_grad(sum_of, argnums=(0, 1), has_aux=True)
            (value, kept), (of_shared, of_rows) = of_block(shared, *block)
            return jax.tree.map(jnp.add, sums, (value, of_shared)), (of_rows, kept)

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, shared))
        sums, columns = jax.lax.scan(add, nothing, (*jax.tree.map(cut, (rows, fixed)), cut(real_B, False)))
        return sums, jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:])[: len(real_B)], columns)

    def summed(shared: Tensors, rows: Tensors, fixed: Any, seen: Any) -> tuple[Any, Any]:
        real_B = jnp.ones(every, bool)
        if mesh is None:
            (value, of_shared), (of_rows, kept) = of_rows_here(shared, seen, rows, fixed, real_B)
        else:
            rows, fixed = jax.tree.map(lambda column: on_mesh.lengthened(column, mesh.size, None), (rows, fixed))
            real_B = on_mesh.lengthened(real_B, mesh.size, False)
            (value, of_shared), columns = on_mesh.sum_of_parts(mesh, of_rows_here, shared, seen, rows, fixed, real_B)
            of_rows, kept = jax.tree.map(lambda column: column[:every], columns)
        return (value, kept), (of_shared, of_rows)

    @jax.custom_vjp
    def total(shared: Tensors, rows: Tensors, fixed: Any, seen: Any) -> Any:
        return summed(shared, rows, fixed, seen)[0]

    def backward(gradients: Any, upstream: Any) -> tuple[Any, Any, None, None]:
        return (*jax.tree.map(lambda gradient: upstream[0] * gradient, gradients), None, None)

    total.defvjp(summed, backward)
    value, kept = total(shared, rows, fixed, seen)
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
