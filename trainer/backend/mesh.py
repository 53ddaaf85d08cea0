"""The devices that JAX computes on together: a mesh of one axis, of all processes.

JAX alone has it; `trainer.devices` is where the rest of the trainer asks for it.

Legend: `U` distinct ids, `D` dimensions, `R` rows of a device's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"


def join(coordinator: str | None, processes: int, process: int | None) -> None:
    """Join several processes that compute together, before anything is computed; arguments as `devices.Cluster`."""
    jax.distributed.initialize(coordinator, processes, process)


def wait_for_all(where: str) -> None:
    """Wait until every process has come to the same place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


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


@cache
def gather_of(mesh: Mesh) -> Callable[..., jax.Array]:
    """Sum the rows that each device holds, so that no device sees another's part."""

    def rows_of(part_RD: jax.Array, ids: jax.Array) -> jax.Array:
        places = ids - jax.lax.axis_index(AXIS) * part_RD.shape[0]
        own = (places >= 0) & (places < part_RD.shape[0])
        rows = jnp.take(part_RD, places, axis=0, mode="clip")
        of_all: jax.Array = jax.lax.psum(jnp.where(own[..., None], rows, 0), AXIS)
        return of_all

    parts, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(rows_of, mesh=mesh, in_specs=(parts, whole), out_specs=whole))


@cache
def scatter_of(mesh: Mesh) -> Callable[..., jax.Array]:
    """Write on every device the rows that it holds."""

    def written(part_RD: jax.Array, ids_U: jax.Array, rows_UD: jax.Array) -> jax.Array:
        places_U = ids_U - jax.lax.axis_index(AXIS) * part_RD.shape[0]
        places_U = jnp.where(places_U < 0, part_RD.shape[0], places_U)
        return part_RD.at[places_U].set(rows_UD, mode="drop")

    parts, whole = PartitionSpec(AXIS), PartitionSpec()
    return jax.jit(jax.shard_map(written, mesh=mesh, in_specs=(parts, whole, whole), out_specs=parts))
