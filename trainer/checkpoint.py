"""Checkpoints, from which an interrupted job resumes as if it had never stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longtail.bundle.store import atomic_directory
from longtail.trainer.arrays import read_array, write_array
from longtail.trainer.config import Recipe
from longtail.trainer.devices import WORLD, private_folder, wait_for_all
from longtail.trainer.errors import CheckpointError

if TYPE_CHECKING:
    import keras

    from longtail.trainer.data.dataset import Dataset

_STATE = "state.json"
_VERSION = 2
"""Version of the state; raise it if the same recipe and data give a different state."""


def hash_run(recipe: Recipe, dataset: Dataset, warm_start: str | None = None) -> str:
    """Compute the hex sha256 of a run: its recipe without paths, plug-in sources, data, and first weights."""
    # The co-occurrence term is fitted after training, so its settings may change.
    settings = recipe.model_dump(mode="json", exclude={"name": True, "data": True, "tune": True, "cooccurrence": True})
    # A run may resume on other devices or processes.
    for name in ("devices", "processes"):
        del settings["training"][name]
    settings |= {"reduction": recipe.data.reduction, "version": _VERSION}
    if own_rows := recipe.own_rows:
        settings["own_rows"] = own_rows
    if warm_start is not None:
        settings["warm_start"] = warm_start
    content = json.dumps(settings, sort_keys=True) + dataset.fingerprint
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass(eq=False)
class Checkpoints:
    """Keep the newest and the best state of one run; refuse checkpoints of another `identity`.

    A checkpoint is a directory that appears only once it is complete. The old one is removed after the new one is
    written, so a crash always leaves one. Any number of devices can read it.
    """

    root: Path
    identity: str

    def save(self, kind: str, variables: Sequence[keras.Variable | npt.NDArray[Any]], state: dict[str, Any]) -> None:
        """Write variables or arrays and `state` as the newest checkpoint of a kind: `latest`, `best`, `retrieved`."""
        old = self._list_numbered(kind)
        number = old[-1][0] + 1 if old else 0
        with atomic_directory(self.root / f"{kind}-{number}") as working:
            for i, variable in enumerate(variables):
                write_array(working / f"{i}.npy", variable)
            (working / _STATE).write_text(json.dumps({"identity": self.identity, "state": state}), encoding="utf-8")
        for _, path in old:
            shutil.rmtree(path)

    def load(self, kind: str, variables: Sequence[keras.Variable]) -> dict[str, Any] | None:
        """Restore variables from the newest checkpoint of a kind; return its state, or None without one."""
        if (newest := self._newest(kind)) is None:
            return None
        path, state = newest
        for i, variable in enumerate(variables):
            read_array(path / f"{i}.npy", variable)
        return state

    def read(self, kind: str) -> tuple[npt.NDArray[Any], dict[str, Any]] | None:
        """Return the array of a kind with its state; None without a checkpoint."""
        if (newest := self._newest(kind)) is None:
            return None
        path, state = newest
        return np.load(path / "0.npy", allow_pickle=False), state

    def _newest(self, kind: str) -> tuple[Path, dict[str, Any]] | None:
        if not (numbered := self._list_numbered(kind)):
            return None
        path = numbered[-1][1]
        content = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if content["identity"] != self.identity:
            raise CheckpointError(
                f"{path}: expected a checkpoint of this recipe and data ({self.identity[:12]}), "
                f"found one of another ({content['identity'][:12]}): choose another --out, or remove {self.root}"
            )
        return path, content["state"]

    def _list_numbered(self, kind: str) -> list[tuple[int, Path]]:
        paths = self.root.glob(f"{kind}-*")
        return sorted((int(path.name.removeprefix(f"{kind}-")), path) for path in paths)


class SharedCheckpoints(Checkpoints):
    """Keep checkpoints in a folder that all processes share: all gather the variables, and the first writes them."""

    def save(self, kind: str, variables: Sequence[keras.Variable | npt.NDArray[Any]], state: dict[str, Any]) -> None:
        """Write variables or arrays and `state` as the newest checkpoint of a kind."""
        if WORLD.process:
            with private_folder() as folder:
                Checkpoints(folder, self.identity).save(kind, variables, state)
        else:
            super().save(kind, variables, state)
        wait_for_all(f"{kind} saved")


def shared_facts(recipe: Recipe, dataset: Dataset, warm_start: str | None) -> dict[str, str]:
    """Return what all processes of a job have in common, by name."""
    splits = {"training pairs": dataset.train, "validation pairs": dataset.valid, "test pairs": dataset.test}
    sizes = {"query ids": dataset.query_ids, "label ids": dataset.label_ids} | splits
    return {
        **{name: f"{len(rows):,}" for name, rows in sizes.items()},
        "ids, pairs and feature tables (sha256)": dataset.fingerprint,
        "recipe and first weights (sha256)": hash_run(recipe, dataset, warm_start),
    }


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Lock a job's folder; raises CheckpointError if another job holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Unlike a lock file, this lock ends with its process, however that ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(f"{folder}: expected no other job here, found one: wait, or give another OUT") from error
    try:
        yield folder
    finally:
        os.close(descriptor)
