"""Jobs on several devices and in several processes; a job in one process on one device runs nothing of this file.

All processes run the same program on the same data, and wait for each other where a variable is computed or read. Each
process ranks its share of an evaluation's queries. Only the first process writes files that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from longtail.bundle.arrays import Array
from longtail.extras import pip_install
from longtail.trainer import backend
from longtail.trainer.backend import keras
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ProcessError, RecipeError


@dataclass(frozen=True)
class Cluster:
    """Locate the processes of a job.

    Attributes:
        coordinator: HOST:PORT of the first process; by default the one that SLURM or MPI set.
        process: number of this process, from 0; by default the one that SLURM or MPI set.
    """

    coordinator: str | None = None
    process: int | None = None


@dataclass
class World:
    """Count the processes that compute together; `process` is the number of this one, from 0."""

    processes: int = 1
    process: int = 0


WORLD = World()
"""The processes of this job, which `join` sets. Process 0 writes."""


def join_processes(recipe: Recipe, cluster: Cluster) -> None:
    """Join the other processes of a job, before anything is computed."""
    processes = recipe.training.processes
    if processes == 1:
        raise RecipeError(f"--process: expected training.processes above 1, found {processes}")
    if (cluster.coordinator is None) != (cluster.process is None):
        raise RecipeError("cluster: expected both coordinator and process, or neither, received one of them")
    if cluster.process is not None and not 0 <= cluster.process < processes:
        raise RecipeError(f"--process: expected 0 … {processes - 1} of {processes}, received {cluster.process}")
    if processes == WORLD.processes:
        return
    _check_backend()
    try:
        join(cluster.coordinator, processes, cluster.process)
    except (RuntimeError, ValueError) as error:
        address = cluster.coordinator or "the address that SLURM or MPI set"
        raise ProcessError(f"expected {processes} processes by {address}, found: {_first_line(error)}") from error


def join(coordinator: str | None, processes: int, process: int | None) -> None:
    """Join several processes; arguments as in `Cluster`."""
    import jax

    jax.distributed.initialize(coordinator, processes, process)
    WORLD.processes, WORLD.process = processes, int(jax.process_index())


def use_devices(recipe: Recipe) -> None:
    """Put models that are built later on all devices, or on one device again."""
    if recipe.training.devices == "one":
        keras.distribution.set_distribution(None)
        backend.select("jax")
        return
    _check_backend()
    spread_over_devices()
    from longtail.trainer.backend.mesh import devices

    part, count = recipe.training.batch_size // recipe.training.accumulate, devices()
    if part % count:
        raise RecipeError(f"training.batch_size: expected a multiple of {count} devices, received {part} pairs a part")


def spread_over_devices() -> None:
    """Put models that are built later on all devices."""
    from longtail.trainer.backend.mesh import AXIS

    names = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((len(names),), (AXIS,), names)
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    backend.select("mesh")


def describe_devices() -> str:
    """Count the devices of a job, and those of each process."""
    from longtail.trainer.backend.mesh import devices

    count, processes = devices(), WORLD.processes
    return f"On {count} devices" + (
        "" if processes == 1 else f", {count // processes} of each of {processes} processes"
    )


def wait_for_all(step: str) -> None:
    """Wait until every process has come to the same step."""
    if WORLD.processes > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(step)


def stack_processes(values: Array) -> Array:
    """Stack equally shaped arrays of all processes, [processes, …], to the last bit."""
    from jax.experimental import multihost_utils

    # As bytes, because JAX would round float64 to float32.
    gathered: Array = np.ascontiguousarray(multihost_utils.process_allgather(np.frombuffer(values.tobytes(), np.uint8)))
    return gathered.view(values.dtype).reshape(WORLD.processes, *values.shape)


def check_same_inputs(facts: Mapping[str, str]) -> None:
    """Refuse processes with different facts, by name, in ASCII; 64 characters of each count."""
    facts_PF = stack_processes(np.array([*facts.values()], "S64"))
    for name, fact_P in zip(facts, facts_PF.T, strict=True):
        if len(others := np.flatnonzero(fact_P != fact_P[0])):
            raise ProcessError(
                f"{name}: expected the same in all {len(fact_P)} processes, found {fact_P[0].decode()} in process 0 "
                f"and {fact_P[others[0]].decode()} in process {others[0]}: start all with the same recipe and data"
            )


@contextmanager
def first_before_others(step: str) -> Iterator[None]:
    """Run the block in the first process, then in the others, which read its files."""
    if WORLD.process:
        wait_for_all(step)
    yield
    if not WORLD.process:
        wait_for_all(step)


@contextmanager
def private_folder() -> Iterator[Path]:
    """Create a temporary folder for files that only the first process keeps."""
    with TemporaryDirectory() as name:
        yield Path(name)


def describe_lost_process(error: BaseException) -> str | None:
    """Describe an error that another process' end caused, in one line; None for any other error."""
    if type(error).__name__ != "JaxRuntimeError" or WORLD.processes == 1:
        return None
    return (
        f"process {WORLD.process} of {WORLD.processes}: another one has stopped ({_first_line(error)}); start all of "
        "them again to go on from the last checkpoint"
    )


def check_installed() -> None:
    """Refuse several devices without JAX, before Keras is loaded."""
    if find_spec("jax") is None:
        raise RecipeError(f'training.devices = "all": expected jax to be installed: {pip_install("jax")}')


def _check_backend() -> None:
    check_installed()
    if (name := keras.backend.backend()) != "jax":
        raise RecipeError(f'training.devices = "all": expected Keras on JAX (KERAS_BACKEND=jax), found {name}')


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
