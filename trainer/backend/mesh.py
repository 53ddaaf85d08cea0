"""The backend on several JAX devices: a mesh of one axis over all processes.

`devices.py` selects it. Variables of `rows_variable` are split over the devices in equal parts of their rows; every
other variable is whole on each device, and inputs of steps and towers are split by their first axis. In a step each
device fetches the distinct rows that its part of the batch reads from their owners (`Requested`), and sends the
gradients back to the owners (`Owned`), both by all-to-all. All other functions are those of `jax.py`.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `R` rows of a device's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longtail.bundle.arrays import Array
from longtail.trainer.backend import jax as one_device
from longtail.trainer.backend.jax import pad_rows, run_blocks, sum_with_gradients
from longtail.trainer.backend.tensors import BlockLoss, Step, Tensor, Tensors

__all__ = [
    "bag_sums", "compile_step", "compile_tower", "distinct", "fill", "gather", "rows_variable", "scatter",
    "sum_of_blocks", "sums", "take",
]  # fmt: skip

AXIS = "devices"
_PARTS, _REPLICATED = PartitionSpec(AXIS), PartitionSpec()
_STRIPES = 1024
"""Neighbours of a table lie this many to a row's distance apart, so that no device has all frequent ones."""
_DEVIATIONS = 5
"""Above a fair share of rows for an owner that one round holds, in standard deviations of a Poisson count."""


def _mesh() -> Mesh:
    mesh: Mesh = keras.distribution.distribution().device_mesh.backend_mesh
    return mesh


def devices() -> int:
    """Return the number of devices that compute together."""
    return int(_mesh().size)


class Requested(NamedTuple):
    """Hold the distinct rows that each device reads, an equal share of `ids_U` each; ids past the end are no rows."""

    ids_U: jax.Array


class Owned(NamedTuple):
    """Hold distinct rows by owner, an equal share of `ids_U` each; ids past the end are no rows."""

    ids_U: jax.Array

    def __lt__(self, other: Any) -> Any:
        """Compare ids, as an array does."""
        return self.ids_U < other


def rows_variable(rows: int, width: int, *, name: str, initializer: Any = "zeros") -> keras.Variable:
    """Create a variable in equal parts of rows on all devices, float32 [rows, width]; its attribute `rows` is `rows`.

    Rows are added until all parts are equal; `storage_rows` maps ids to rows of the variable.
    """
    stripes = min(rows, _STRIPES)
    padded = -(-(-(-rows // stripes) * stripes) // devices()) * devices()
    layout = keras.distribution.TensorLayout((AXIS, None), keras.distribution.distribution().device_mesh)
    variable = keras.Variable(
        "zeros", shape=(padded, width), dtype="float32", trainable=False, name=name, layout=layout
    )
    variable.rows = rows
    # Filled afterwards, because rows are not stored in the order of their ids.
    if initializer != "zeros":
        fill(variable, [np.asarray(initializer((rows, width)))])
    return variable


def storage_rows(ids: Any, rows: int) -> Any:
    """Map ids of a table to rows of its variable; neighbours, equally frequent, lie apart.

    The map is the same on any number of devices.
    """
    stripes = min(rows, _STRIPES)
    return ids % stripes * -(-rows // stripes) + ids // stripes


def _part_rows(ids: jax.Array, rows: int, part_rows: int) -> jax.Array:
    """Map ids to rows of this device's part; ids of other devices are past its end."""
    local = storage_rows(ids, rows) - jax.lax.axis_index(AXIS) * part_rows
    return jnp.where((ids < rows) & (local >= 0) & (local < part_rows), local, part_rows)


def _map_parts(function: Callable[..., Any], in_specs: Any = _PARTS, out_specs: Any = _PARTS) -> Callable[..., Any]:
    """Run a function on each device, with the device's parts of arrays."""
    # Not checked: all devices have the same number of rounds, which JAX cannot see.
    return jax.shard_map(function, mesh=_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


@cache
def _gather_whole(mesh: Mesh, rows: int) -> Callable[..., jax.Array]:
    """Sum the rows that each device holds, so that no device sees another device's part."""

    def read(part_RD: jax.Array, ids: jax.Array) -> jax.Array:
        local = part_RD.at[_part_rows(ids, rows, len(part_RD))].get(mode="fill", fill_value=0)
        summed_rows: jax.Array = jax.lax.psum(local, AXIS)
        return summed_rows

    return jax.jit(jax.shard_map(read, mesh=mesh, in_specs=(_PARTS, _REPLICATED), out_specs=_REPLICATED))


def gather(table: keras.Variable, ids: jax.Array | Requested | Owned) -> jax.Array:
    """Return rows of a variable, shape [*ids.shape, D]; each device gets its share for `Requested` and `Owned` ids."""
    if not isinstance(ids, Requested | Owned):
        if hasattr(table, "rows"):
            return _gather_whole(_mesh(), table.rows)(table.value, ids)
        return one_device.gather(table, ids)
    rows, shards = table.rows, devices()

    def fetch(part_RD: jax.Array, ids_U: jax.Array) -> jax.Array:
        rounds = _Rounds(ids_U, rows, len(part_RD), shards)

        def run(number: jax.Array, rows_UD: jax.Array) -> jax.Array:
            sent = part_RD.at[rounds.requested(number)].get(mode="fill", fill_value=0)
            return rows_UD + _exchange(sent).at[rounds.slots(number)].get(mode="fill", fill_value=0)

        return rounds.fold(run, jnp.zeros((len(ids_U), part_RD.shape[1]), part_RD.dtype))

    def read(part_RD: jax.Array, ids_U: jax.Array) -> jax.Array:
        return part_RD.at[_part_rows(ids_U, rows, len(part_RD))].get(mode="fill", fill_value=0)

    rows_UD: jax.Array = _map_parts(fetch if isinstance(ids, Requested) else read)(table.value, ids.ids_U)
    return rows_UD


def scatter(table: keras.Variable, ids_U: jax.Array | Owned, rows_UD: jax.Array) -> None:
    """Replace rows of a variable; ids past its end are dropped."""
    if not isinstance(ids_U, Owned):
        one_device.scatter(table, ids_U, rows_UD)
        return

    def write(part_RD: jax.Array, ids_U: jax.Array, part_UD: jax.Array) -> jax.Array:
        return part_RD.at[_part_rows(ids_U, table.rows, len(part_RD))].set(part_UD, mode="drop")

    table.assign(_map_parts(write)(table.value, ids_U.ids_U, rows_UD))


def fill(table: keras.Variable, blocks: Iterable[Array]) -> None:
    """Replace all rows by blocks, [N, D] each, in order; rows past the last become 0."""
    shape, sharding = tuple(table.shape), table.value.sharding
    parts = [index[0].indices(shape[0])[:2] for index in sharding.addressable_devices_indices_map(shape).values()]
    start, end = min(low for low, _ in parts), max(high for _, high in parts)  # of this process
    rows, count = np.zeros((end - start, *shape[1:]), table.dtype), 0
    for rows_ND in blocks:
        stored_N = storage_rows(np.arange(count, count + len(rows_ND)), table.rows)
        local_N = (stored_N >= start) & (stored_N < end)
        rows[stored_N[local_N] - start] = rows_ND[local_N]
        count += len(rows_ND)

    def part(index: tuple[slice, ...] | None) -> Array:
        low, high, _ = (index or (slice(None),))[0].indices(shape[0])
        return rows[low - start : high - start]

    table.assign(jax.make_array_from_callback(shape, sharding, part))


def distinct(
    ids: Sequence[jax.Array], limit: int, *, shared: bool = False
) -> tuple[jax.Array | Requested, list[jax.Array]]:
    """Return the distinct ids of arrays, [U], and positions in them, in each array's shape.

    If they are not `shared`, ids and positions are those of each device's parts of the arrays.
    """
    if shared:
        return one_device.distinct(ids, limit)

    def find(*parts: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        flat_N = jnp.concatenate([part.reshape(-1) for part in parts])
        # One more than the table has rows, for the id that only pads.
        ids_U, positions_N = jnp.unique(flat_N, return_inverse=True, size=min(len(flat_N), limit + 1), fill_value=limit)
        positions = jnp.split(positions_N, np.cumsum([part.size for part in parts])[:-1])
        return ids_U, [flat.reshape(part.shape) for flat, part in zip(positions, parts, strict=True)]

    ids_U, positions = _map_parts(find)(*(pad_rows(array, devices(), limit) for array in ids))
    return Requested(ids_U), [padded[: len(array)] for padded, array in zip(positions, ids, strict=True)]


def take(rows_UD: jax.Array, positions: jax.Array, *, shared: bool = False) -> jax.Array:
    """Return rows by positions among the ids of `distinct`, shape [*positions.shape, D]."""
    if shared:
        return one_device.take(rows_UD, positions)
    take_parts = _map_parts(lambda part_UD, positions: jnp.take(part_UD, positions, axis=0, mode="clip"))
    rows: jax.Array = take_parts(rows_UD, pad_rows(positions, devices()))
    return rows[: len(positions)]


def bag_sums(rows_UD: jax.Array, positions_BP: jax.Array, weights_BP: jax.Array, *, shared: bool = False) -> jax.Array:
    """Sum the rows of every bag by constant weights, float32 [B, D]; positions are those of `distinct`."""
    return jnp.einsum("bpd,bp->bd", take(rows_UD, positions_BP, shared=shared), weights_BP)


def sums(
    table: keras.Variable, parts: Sequence[tuple[Any, jax.Array]], gradients: Sequence[jax.Array]
) -> tuple[Any, jax.Array, jax.Array]:
    """Return a batch's distinct ids by owner, [U], their rows, and sums of their gradients.

    `gradients` and the sums are float32 [U, D].
    """
    rows, part_rows, shards = table.rows, table.shape[0] // devices(), devices()
    requests = [ids.ids_U for ids, _ in parts]

    def add(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids, gradients = arguments[: len(requests)], arguments[len(requests) :]
        all_N = jax.lax.all_gather(jnp.concatenate(ids), AXIS, tiled=True)
        local_N = _part_rows(all_N, rows, part_rows)
        size = min(len(all_N), part_rows)
        local_U, first_U = jnp.unique(local_N, return_index=True, size=size, fill_value=part_rows)
        sums_UD = jnp.zeros((size, gradients[0].shape[1]), gradients[0].dtype)
        for ids_U, gradients_UD in zip(ids, gradients, strict=True):
            rounds = _Rounds(ids_U, rows, part_rows, shards)

            def run(number: jax.Array, sums_UD: jax.Array, rounds: _Rounds = rounds, sent: Any = gradients_UD) -> Any:
                requested = rounds.requested(number)
                slots = jnp.zeros((shards, rounds.width, sent.shape[1]), sent.dtype)
                received = _exchange(slots.at[rounds.slots(number)].set(sent, mode="drop"))
                positions = jnp.where(requested < part_rows, jnp.searchsorted(local_U, requested), size)
                return sums_UD.at[positions].add(received, mode="drop")

            sums_UD = rounds.fold(run, sums_UD)
        return jnp.where(local_U < part_rows, all_N[first_U], rows), sums_UD

    ids_U, sums_UD = _map_parts(add)(*requests, *gradients)
    return Owned(ids_U), gather(table, Owned(ids_U)), sums_UD


class _Rounds:
    """Schedule the exchange of rows between devices that need them and devices that own them.

    In a round each device exchanges at most `width` rows with every other device, slightly more than an equal share.
    The pair of devices with the most rows determines the number of rounds, nearly always one.
    """

    def __init__(self, ids_U: jax.Array, rows: int, part_rows: int, shards: int) -> None:
        share = -(-len(ids_U) // shards)
        self.width = min(len(ids_U), part_rows, share + math.ceil(_DEVIATIONS * math.sqrt(share)))
        self.part_rows, self.shards = part_rows, shards
        stored_U = jnp.where(ids_U < rows, storage_rows(ids_U, rows), shards * part_rows)
        self.owner_U, self.local_U = stored_U // part_rows, stored_U % part_rows
        order_U = jnp.argsort(self.owner_U)
        first_U = jnp.searchsorted(self.owner_U[order_U], self.owner_U)
        self.rank_U = jnp.zeros_like(order_U).at[order_U].set(jnp.arange(len(ids_U))) - first_U
        fullest = jnp.max(jnp.where(self.owner_U < shards, self.rank_U // self.width + 1, 0))
        self.number = jax.lax.pmax(fullest, AXIS)

    def slots(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return every id's owner and column in a round; columns of other rounds' ids are out of bounds."""
        return self.owner_U, jnp.where(self.rank_U // self.width == number, self.rank_U % self.width, self.width)

    def requested(self, number: jax.Array) -> jax.Array:
        """Return this device's rows that every device needs in a round, int32 [shards, width]."""
        none = jnp.full((self.shards, self.width), self.part_rows, self.local_U.dtype)
        return _exchange(none.at[self.slots(number)].set(self.local_U, mode="drop"))

    def fold(self, run: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        """Fold `run` over all rounds."""
        result: jax.Array = jax.lax.fori_loop(0, self.number, run, start)
        return result


def _exchange(sent: jax.Array) -> jax.Array:
    """Send each device its row of the first axis; receive one from each."""
    received: jax.Array = jax.lax.all_to_all(sent, AXIS, 0, 0)
    return received


def sum_of_blocks(
    loss: BlockLoss, shared: dict[str, Any], rows: Tensors, fixed: Any, fixed_shared: Any, *, blocks: int
) -> tuple[Tensor, Tensors]:
    """Sum a loss over blocks of rows, each device over its part of the rows.

    A device gathers `shared` from the others, and keeps its part of the summed gradients, once for all blocks.
    """
    count, shards = jax.tree.leaves(rows)[0].shape[0], devices()
    blocks = -(-blocks // shards)
    specs = {name: _PARTS if array.ndim else _REPLICATED for name, array in shared.items()}

    def run_part(parts: Mapping[str, Any], rows: Any, fixed: Any, fixed_shared: Any, real_B: jax.Array) -> Any:
        gathered = {
            name: jax.lax.all_gather(part, AXIS, tiled=True)[: len(shared[name])] if part.ndim else part
            for name, part in parts.items()
        }
        (value, gradients), columns = run_blocks(loss, blocks, gathered, rows, fixed, fixed_shared, real_B)
        reduced = {
            name: jax.lax.psum_scatter(pad_rows(gradient, shards), AXIS, tiled=True)
            if gradient.ndim
            else jax.lax.psum(gradient, AXIS)
            for name, gradient in gradients.items()
        }
        return (jax.lax.psum(value, AXIS), reduced), columns

    mapped = _map_parts(run_part, (specs, _PARTS, _PARTS, _REPLICATED, _PARTS), ((_REPLICATED, specs), _PARTS))

    def run(shared: dict[str, Any], rows: Any, fixed: Any, fixed_shared: Any) -> Any:
        padded = {name: pad_rows(array, shards) if array.ndim else array for name, array in shared.items()}
        rows, fixed = jax.tree.map(lambda column: pad_rows(column, shards, None), (rows, fixed))
        real_B = pad_rows(jnp.ones(count, bool), shards, False)
        (value, gradients), columns = mapped(padded, rows, fixed, fixed_shared, real_B)
        cut = {name: grad[: len(shared[name])] if grad.ndim else grad for name, grad in gradients.items()}
        return (value, cut), jax.tree.map(lambda column: column[:count], columns)

    return sum_with_gradients(run, shared, rows, fixed, fixed_shared)


def compile_step(step: Step, variables: Sequence[keras.Variable]) -> Step:
    """Compile a step that assigns to variables, which keep their devices."""
    shardings = NamedSharding(_mesh(), _REPLICATED), [variable.value.sharding for variable in variables]
    return one_device.compile_step(step, variables, out_shardings=shardings, put=_split_batch)


def compile_tower(tower: keras.Model) -> Callable[[Mapping[str, Any]], jax.Array]:
    """Compile a tower's outputs, whole on every device."""
    return one_device.compile_tower(tower, out_shardings=NamedSharding(_mesh(), _REPLICATED), put=_split_batch)


def _split_batch(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Split columns by their first axis over all devices; a column that has no equal parts is whole on each device."""
    mesh = _mesh()

    def put(column: Any) -> Any:
        # Such a column lies on the devices of all processes already.
        if isinstance(column, jax.Array) and not column.is_fully_addressable:
            return column
        values = np.asarray(column)
        parts = _PARTS if values.ndim and len(values) % mesh.size == 0 else _REPLICATED
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, parts), values.__getitem__)

    return {name: put(column) for name, column in columns.items()}
