"""The devices that JAX computes on together: a mesh of one axis, of all processes.

JAX alone has it; `trainer.devices` is where the rest of the trainer asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"


def join(coordinator: str | None, processes: int, process: int | None) -> None:
    """Become one of several processes that compute together; before anything is computed.

    Args:
        coordinator: HOST:PORT that process 0 listens on; by default what SLURM or MPI say.
        processes: how many there are.
        process: which of them this one is, from 0; by default as the coordinator.

    Raises:
        RuntimeError, ValueError: the others do not come, or nothing says where they are.
    """
    jax.distributed.initialize(coordinator, processes, process)


def wait_for_all(where: str) -> None:
    """Return when every process has come to the same place."""
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
    """The mesh; None where one device computes."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else distribution.device_mesh.backend_mesh


def devices() -> int:
    """How many devices compute together."""
    mesh = mesh_in_use()
    return 1 if mesh is None else int(mesh.size)


def by_rows(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns in equal parts of their first axis on all devices; whole on each where they cannot be equal."""
    if (mesh := mesh_in_use()) is None:
        return dict(columns)

    def placed(column: Any) -> Any:
        if isinstance(column, jax.Array) and not column.is_fully_addressable:
            return column
        values = np.asarray(column)
        parts = PartitionSpec(AXIS) if values.ndim and len(values) % mesh.size == 0 else PartitionSpec()
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, parts), values.__getitem__)

    return {name: placed(column) for name, column in columns.items()}
