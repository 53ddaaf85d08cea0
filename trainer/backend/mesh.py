"""The devices that JAX computes on together: a mesh of one axis, of all processes.

Only JAX has a mesh; the rest of the trainer uses it through `trainer.devices`.

A table is split over the devices in equal parts of its rows. In a step each device fetches the distinct rows that its
share of the batch reads from their owners (`Requested`), and sends the gradients back to the owners (`Owned`), both by
all-to-all.

Legend: `N` ids, `U` distinct ids, `D` dimensions, `R` rows of a device's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longtail.bundle.arrays import Array

AXIS = "devices"
_STRIPES = 1024
"""Neighbours of a table lie this many to a row's distance apart, so that no device has all frequent ones."""
_DEVIATIONS = 5
"""Above a fair share of rows for an owner that one round holds, in standard deviations of a Poisson count."""


def join(coordinator: str | None, processes: int, process: int | None) -> None:
    """Join several processes that compute together, before anything is computed; arguments as `devices.Cluster`."""
    jax.distributed.initialize(coordinator, processes, process)


def wait_for_all(where: str) -> None:
    """Wait until every process has come to the same place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def of_all(values: Array) -> Array:
    """Stack what the processes have, of one shape and dtype in all of them, [processes, …]; to the last bit."""
    content = np.frombuffer(values.tobytes(), np.uint8)
    every: Array = np.ascontiguousarray(multihost_utils.process_allgather(content))
    return every.view(values.dtype).reshape(jax.process_count(), *values.shape)


def spread(over_all: bool) -> None:
    """Let what is built from now on compute on all devices, or on one."""
    if over_all:
        names = keras.distribution.list_devices()
        mesh = keras.distribution.DeviceMesh((len(names),), (AXIS,), names)
        keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    elif keras.distribution.distribution() is not None:
        keras.distribution.set_distribution(None)


def mesh_in_use() -> Mesh | None:
    """Return the mesh; None where one device computes."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.device_mesh.backend_mesh


def by_rows(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns in equal parts of their first axis on all devices; whole on each where they cannot be equal."""
    if (mesh := mesh_in_use()) is None:
        return dict(columns)

    def placed(column: Any) -> Any:
        if isinstance(column, jax.Array) and not column.is_fully_addressable:
            return column
        values = np.asarray(column)
        parts = PartitionSpec(AXIS) if values.ndim and len(values) % mesh.size == 0 else PartitionSpec()
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, parts), values.__getitem__)

    return {name: placed(column) for name, column in columns.items()}


class Requested(NamedTuple):
    """Distinct rows that each device reads, an equal share of `ids_U` for each; past a table's end there is none."""

    mesh: Mesh
    ids_U: jax.Array


class Owned(NamedTuple):
    """Distinct rows where they lie, an equal share of `ids_U` for each device; past the table's end there is none."""

    mesh: Mesh
    ids_U: jax.Array

    def __lt__(self, other: Any) -> Any:
        """Compare ids, as an array does."""
        return self.ids_U < other


def padded_rows(rows: int, shards: int) -> int:
    """Return the number of a table's rows with padding, so that all devices' parts are equal."""
    stripes = min(rows, _STRIPES)
    return -(-(-(-rows // stripes) * stripes) // shards) * shards


def places_of(ids: Any, rows: int) -> Any:
    """Return where rows of a table lie, the same on any number of devices: neighbours, equally frequent, lie apart."""
    stripes = min(rows, _STRIPES)
    return ids % stripes * -(-rows // stripes) + ids // stripes


def _own_places(ids: jax.Array, rows: int, part_rows: int) -> jax.Array:
    """Return where ids lie in this device's part; past its end where they do not."""
    places = places_of(ids, rows) - jax.lax.axis_index(AXIS) * part_rows
    return jnp.where((ids < rows) & (places >= 0) & (places < part_rows), places, part_rows)


def lengthened(column: jax.Array, multiple: int, value: Any = 0) -> jax.Array:
    """Lengthen the first axis to a multiple of a number, by a value; by its last entry where that is None."""
    more = -len(column) % multiple
    if not more:
        return column
    filled = {"mode": "edge"} if value is None else {"constant_values": value}
    longer: jax.Array = jnp.pad(column, [(0, more)] + [(0, 0)] * (column.ndim - 1), **filled)
    return longer


def _on_parts(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let each device compute a function of its parts of arrays, whose results are its parts of others."""
    # Not checked: how many rounds there are is the same on all devices, and JAX does not see it.
    parts = PartitionSpec(AXIS)
    made: Callable[..., Any] = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    return made


@cache
def gather_of(mesh: Mesh, rows: int) -> Callable[..., jax.Array]:
    """Sum the rows that each device holds, so that no device sees another's part."""

    def rows_of(part_RD: jax.Array, ids: jax.Array) -> jax.Array:
        found = part_RD.at[_own_places(ids, rows, len(part_RD))].get(mode="fill", fill_value=0)
        of_all: jax.Array = jax.lax.psum(found, AXIS)
        return of_all

    parts, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(rows_of, mesh=mesh, in_specs=(parts, whole), out_specs=whole))


def distinct_of(mesh: Mesh, ids: Sequence[jax.Array], limit: int) -> tuple[Requested, list[jax.Array]]:
    """Return the distinct ids of each device's parts of arrays, and each element's position among its device's ids."""

    def found(*parts: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        flat_N = jnp.concatenate([part.reshape(-1) for part in parts])
        size = min(len(flat_N), limit + 1)
        ids_U, at_N = jnp.unique(flat_N, return_inverse=True, size=size, fill_value=limit)
        ends = np.cumsum([part.size for part in parts])[:-1]
        return ids_U, [at.reshape(part.shape) for at, part in zip(jnp.split(at_N, ends), parts, strict=True)]

    ids_U, positions = _on_parts(mesh, found)(*(lengthened(each, mesh.size, limit) for each in ids))
    return Requested(mesh, ids_U), [at[: len(each)] for at, each in zip(positions, ids, strict=True)]


def take_of(mesh: Mesh, rows_UD: jax.Array, positions: jax.Array) -> jax.Array:
    """Return rows by positions of `distinct_of`, shape [*positions.shape, D]."""
    taken = _on_parts(mesh, lambda part_UD, at: jnp.take(part_UD, at, axis=0, mode="clip"))
    found: jax.Array = taken(rows_UD, lengthened(positions, mesh.size))
    return found[: len(positions)]


class _Rounds:
    """Schedule of the exchange of rows between devices that need them and devices that own them.

    In a round each device exchanges at most `width` rows with every other device, slightly more than an equal share.
    The pair of devices with the most rows determines the number of rounds, nearly always one.
    """

    def __init__(self, ids_U: jax.Array, rows: int, part_rows: int, shards: int) -> None:
        requested, share = len(ids_U), -(-len(ids_U) // shards)
        self.width = min(requested, part_rows, share + math.ceil(_DEVIATIONS * math.sqrt(share)))
        self.part_rows, self.shards = part_rows, shards
        places_U = jnp.where(ids_U < rows, places_of(ids_U, rows), shards * part_rows)
        self.owner_U, self.place_U = places_U // part_rows, places_U % part_rows
        order_U = jnp.argsort(self.owner_U)
        first_U = jnp.searchsorted(self.owner_U[order_U], self.owner_U)
        self.rank_U = jnp.zeros_like(order_U).at[order_U].set(jnp.arange(requested)) - first_U
        fullest = jnp.max(jnp.where(self.owner_U < shards, self.rank_U // self.width + 1, 0))
        self.number = jax.lax.pmax(fullest, AXIS)

    def at(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return every id's owner and column in a round; columns of other rounds' ids are out of bounds."""
        return self.owner_U, jnp.where(self.rank_U // self.width == number, self.rank_U % self.width, self.width)

    def requested(self, number: jax.Array) -> jax.Array:
        """Return the places of this device's rows that every device needs in a round, int32 [shards, width]."""
        none = jnp.full((self.shards, self.width), self.part_rows, self.place_U.dtype)
        return exchanged(none.at[self.at(number)].set(self.place_U, mode="drop"))

    def run(self, once: Callable[[jax.Array, jax.Array], jax.Array], first: jax.Array) -> jax.Array:
        """Fold `once` over all rounds, starting from `first`."""
        made: jax.Array = jax.lax.fori_loop(0, self.number, once, first)
        return made


def exchanged(sent: jax.Array) -> jax.Array:
    """Send each device its row of an array's first axis, and receive one row from each."""
    received: jax.Array = jax.lax.all_to_all(sent, AXIS, 0, 0)
    return received


def fetch_of(rows: int, table_RD: jax.Array, requested: Requested) -> jax.Array:
    """Return the rows that each device requested, float32 [U, D]."""

    def fetched(part_RD: jax.Array, ids_U: jax.Array) -> jax.Array:
        rounds = _Rounds(ids_U, rows, len(part_RD), requested.mesh.size)

        def once(number: jax.Array, rows_UD: jax.Array) -> jax.Array:
            found = part_RD.at[rounds.requested(number)].get(mode="fill", fill_value=0)
            return rows_UD + exchanged(found).at[rounds.at(number)].get(mode="fill", fill_value=0)

        return rounds.run(once, jnp.zeros((len(ids_U), part_RD.shape[1]), part_RD.dtype))

    made: jax.Array = _on_parts(requested.mesh, fetched)(table_RD, requested.ids_U)
    return made


def sums_of(
    rows: int, table_RD: jax.Array, requested: Sequence[Requested], gradients: Sequence[jax.Array]
) -> tuple[Owned, jax.Array]:
    """Return the distinct requested rows of all devices, on their owners, and the sums of their gradients."""
    mesh = requested[0].mesh
    part_rows = len(table_RD) // mesh.size

    def summed(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids, parts = arguments[: len(requested)], arguments[len(requested) :]
        all_N = jax.lax.all_gather(jnp.concatenate(ids), AXIS, tiled=True)
        own_N = _own_places(all_N, rows, part_rows)
        size = min(len(all_N), part_rows)
        own_U, at_N = jnp.unique(own_N, return_index=True, size=size, fill_value=part_rows)
        sums_UD = jnp.zeros((size, parts[0].shape[1]), parts[0].dtype)
        for ids_U, part_UD in zip(ids, parts, strict=True):
            rounds = _Rounds(ids_U, rows, part_rows, mesh.size)

            def once(number: jax.Array, sums_UD: jax.Array, rounds: _Rounds = rounds, part_UD: Any = part_UD) -> Any:
                places = rounds.requested(number)
                sent = jnp.zeros((mesh.size, rounds.width, part_UD.shape[1]), part_UD.dtype)
                received = exchanged(sent.at[rounds.at(number)].set(part_UD, mode="drop"))
                at = jnp.where(places < part_rows, jnp.searchsorted(own_U, places), size)
                return sums_UD.at[at].add(received, mode="drop")

            sums_UD = rounds.run(once, sums_UD)
        return jnp.where(own_U < part_rows, all_N[at_N], rows), sums_UD

    ids_U, sums_UD = _on_parts(mesh, summed)(*(each.ids_U for each in requested), *gradients)
    return Owned(mesh, ids_U), sums_UD


def read_of(rows: int, table_RD: jax.Array, owned: Owned) -> jax.Array:
    """Return rows where they lie, float32 [U, D]."""

    def read(part_RD: jax.Array, ids_U: jax.Array) -> jax.Array:
        return part_RD.at[_own_places(ids_U, rows, len(part_RD))].get(mode="fill", fill_value=0)

    made: jax.Array = _on_parts(owned.mesh, read)(table_RD, owned.ids_U)
    return made


def write_of(rows: int, table_RD: jax.Array, owned: Owned, rows_UD: jax.Array) -> jax.Array:
    """Write rows where they lie."""

    def written(part_RD: jax.Array, ids_U: jax.Array, part_UD: jax.Array) -> jax.Array:
        return part_RD.at[_own_places(ids_U, rows, len(part_RD))].set(part_UD, mode="drop")

    made: jax.Array = _on_parts(owned.mesh, written)(table_RD, owned.ids_U, rows_UD)
    return made


def sum_of_parts(
    mesh: Mesh, sums: Callable[..., Any], shared: Mapping[str, Any], seen: Any, *columns: Any
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], Any]:
    """Let each device compute sums over its rows: a value and its gradients by `shared`, and columns of the rows.

    Args:
        shared: arrays that all rows see; each device gathers them from the others, and keeps its part of the gradients.
        seen: further arrays that all rows see, in dicts of any depth.
        columns: of the rows, in dicts of any depth.
    """
    parts, whole = PartitionSpec(AXIS), PartitionSpec()
    specs = {name: parts if array.ndim else whole for name, array in shared.items()}

    def of_part(own: Mapping[str, jax.Array], seen: Any, *columns: Any) -> Any:
        gathered = {
            name: jax.lax.all_gather(part, AXIS, tiled=True)[: len(shared[name])] if part.ndim else part
            for name, part in own.items()
        }
        (value, gradients), made = sums(gathered, seen, *columns)
        reduced = {
            name: jax.lax.psum_scatter(lengthened(gradient, mesh.size), AXIS, tiled=True)
            if gradient.ndim
            else jax.lax.psum(gradient, AXIS)
            for name, gradient in gradients.items()
        }
        return (jax.lax.psum(value, AXIS), reduced), made

    mapped = jax.shard_map(
        of_part, mesh=mesh, in_specs=(specs, whole, *(parts for _ in columns)), out_specs=((whole, specs), parts),
        check_vma=False,
    )  # fmt: skip
    equal = {name: lengthened(array, mesh.size) if array.ndim else array for name, array in shared.items()}
    (value, gradients), made = mapped(equal, seen, *columns)
    cut = {name: each[: len(shared[name])] if each.ndim else each for name, each in gradients.items()}
    return (value, cut), made
