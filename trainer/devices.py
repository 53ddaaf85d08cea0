"""Run a job on several devices and in several processes: start, shared work, files, and the loss of a process.

All processes run the same program on the same data and wait for each other when a variable is computed or read. Each
process ranks its share of an evaluation's queries. Only the first process writes files.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from longtail.bundle.arrays import Array
from longtail.bundle.store import working_directory
from longtail.extras import pip_install
from longtail.trainer import backend
from longtail.trainer.backend import keras
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ProcessError, RecipeError


@dataclass(frozen=True)
class Cluster:
    """Where the processes of a job find each other.

    Attributes:
        coordinator: HOST:PORT that the first of them listens on; by default what SLURM or MPI say.
        process: which one this is, from 0; by default the same.
    """

    coordinator: str | None = None
    process: int | None = None


def take_part(recipe: Recipe, cluster: Cluster) -> None:
    """Join the other processes of a job that has several; before anything is computed."""
    processes = recipe.training.processes
    if processes == 1:
        if cluster != Cluster():
            raise RecipeError(f"--coordinator and --process: expected training.processes above 1, found {processes}")
        return
    if (cluster.coordinator is None) != (cluster.process is None):
        raise RecipeError("--coordinator and --process: expected both or neither, received one of them")
    if cluster.process is not None and not 0 <= cluster.process < processes:
        raise RecipeError(f"--process: expected 0 … {processes - 1} of {processes}, received {cluster.process}")
    if processes == number_of_processes():
        return
    _check_backend()
    from longtail.trainer.backend import mesh

    try:
        mesh.join(cluster.coordinator, processes, cluster.process)
    except (RuntimeError, ValueError) as error:
        where = cluster.coordinator or "what SLURM or MPI say"
        raise ProcessError(f"expected {processes} processes by {where}, found: {_first_line(error)}") from error


def use_devices(recipe: Recipe) -> None:
    """Place models that are built from now on onto the recipe's devices."""
    everywhere = recipe.training.devices == "all"
    if everywhere:
        _check_backend()
    if keras.backend.backend() != "jax":
        return
    from longtail.trainer.backend import mesh

    mesh.spread(everywhere)
    size, devices = recipe.training.batch_size // recipe.training.accumulate, backend.devices()
    if size % devices:
        raise RecipeError(
            f"training.batch_size: expected a multiple of {devices} devices, received {size} pairs a part"
        )


def number_of_processes() -> int:
    """Return the number of processes that compute together."""
    jax = sys.modules.get("jax")  # `process_count` opens the devices, so it is called only if there is a cluster
    return int(jax.process_count()) if jax is not None and jax.distributed.is_initialized() else 1


def process() -> int:
    """Return the number of this process, from 0."""
    return 0 if number_of_processes() == 1 else int(sys.modules["jax"].process_index())


def is_first() -> bool:
    """Return whether this process is the one that writes."""
    return process() == 0


def wait_for_all(where: str) -> None:
    """Wait until every process has come to the same place."""
    if number_of_processes() > 1:
        from longtail.trainer.backend import mesh

        mesh.wait_for_all(where)


def of_all(values: Array) -> Array:
    """Stack what the processes have, of one shape and dtype in all of them, [processes, …]."""
    if number_of_processes() == 1:
        return values[None]
    from longtail.trainer.backend import mesh

    return mesh.of_all(values)


def check_alike(facts: Mapping[str, str]) -> None:
    """Refuse to go on where processes do not have the same facts, by name and in ASCII; 64 characters of each count."""
    found_PF = of_all(np.array([*facts.values()], "S64"))
    for name, found_P in zip(facts, found_PF.T, strict=True):
        if len(others := np.flatnonzero(found_P != found_P[0])):
            first, other = found_P[0].decode(), found_P[others[0]].decode()
            raise ProcessError(
                f"{name}: expected the same in all {len(found_P)} processes, found {first} in process 0 and {other} in "
                f"process {others[0]}: start all with the same recipe and data"
            )


@contextmanager
def first_before_others(where: str) -> Iterator[None]:
    """Run the block in the first process, then in the others, which find what it has written."""
    if not is_first():
        wait_for_all(where)
    yield
    if is_first():
        wait_for_all(where)


@contextmanager
def sibling_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder to make `target` in: of the first process, a sibling of it."""
    if is_first():
        with working_directory(target) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def of_lost_process(error: BaseException) -> str | None:
    """Get one line to say of an error that comes of another process' end; None if it is another."""
    if type(error).__name__ != "JaxRuntimeError" or number_of_processes() == 1:
        return None
    return (
        f"process {process()} of {number_of_processes()}: another one has stopped ({_first_line(error)}); start all of "
        "them again to go on from the last checkpoint"
    )


def check_installed() -> None:
    """Refuse what several devices need and is not there; before Keras is loaded."""
    if missing := [name for name in ("jax", "orbax") if find_spec(name) is None]:
        raise RecipeError(
            f'training.devices = "all": expected {" and ".join(missing)} to be installed: {pip_install("jax")}'
        )


def _check_backend() -> None:
    check_installed()
    if (found := keras.backend.backend()) != "jax":
        raise RecipeError(f'training.devices = "all": expected Keras on JAX (KERAS_BACKEND=jax), found {found}')


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]
