"""Checkpoints of variables on several devices.

Orbax writes checkpoints during training, each process its part, and reads them onto any number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import keras
import numpy.typing as npt
import orbax.checkpoint as ocp

from longtail.trainer.checkpoint import Checkpoints
from longtail.trainer.devices import is_first, wait_for_all

_VARIABLES, _STATE = "variables", "state"


class ShardedCheckpoints(Checkpoints):
    """Keep checkpoints in a folder that all processes share.

    Arrays that are no variables are written by the first process, as `Checkpoints` does.
    """

    def __init__(self, root: Path, identity: str) -> None:
        super().__init__(root.absolute(), identity)
        self._managers: dict[str, ocp.CheckpointManager] = {}

    def save(self, kind: str, variables: Sequence[keras.Variable | npt.NDArray[Any]], state: dict[str, Any]) -> None:
        """Copy variables, and write them as a checkpoint while the next steps run."""
        if not isinstance(variables[0], keras.Variable):
            if is_first():
                super().save(kind, variables, state)
            wait_for_all(f"{kind} saved")
            return
        for other in self._managers.values():
            other.wait_until_finished()  # finish one kind before the next begins, so that a crash leaves no newer state
        manager = self._manager(kind)
        newest = manager.latest_step()
        arrays = {str(at): keras.ops.convert_to_tensor(variable) for at, variable in enumerate(variables)}
        manager.save(
            0 if newest is None else newest + 1,
            args=ocp.args.Composite(
                variables=ocp.args.StandardSave(arrays),
                state=ocp.args.JsonSave({"identity": self.identity, "state": state}),
            ),
        )

    def load(self, kind: str, variables: Sequence[keras.Variable]) -> dict[str, Any] | None:
        """Restore variables from a checkpoint of any number of devices; return its state, or None without one."""
        manager = self._manager(kind)
        manager.wait_until_finished()
        number = manager.latest_step()
        if number is None:
            return super().load(kind, variables)
        kept = manager.restore(number, args=ocp.args.Composite(state=ocp.args.JsonRestore()))[_STATE]
        self._check(self.root / kind / str(number), kept["identity"])
        wanted = {
            str(at): jax.ShapeDtypeStruct(variable.shape, variable.value.dtype, sharding=variable.value.sharding)
            for at, variable in enumerate(variables)
        }
        # Not strict: the number of rows that only pad the parts depends on the number of devices.
        restore = ocp.args.StandardRestore(wanted, strict=False)
        arrays = manager.restore(number, args=ocp.args.Composite(variables=restore))[_VARIABLES]
        for at, variable in enumerate(variables):
            variable.assign(arrays[str(at)])
        state: dict[str, Any] = kept["state"]
        return state

    def finish(self) -> None:
        """Wait until all checkpoints are written."""
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def _manager(self, kind: str) -> ocp.CheckpointManager:
        if kind not in self._managers:
            apart = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"{self.root.name}-{kind}")
            options = ocp.CheckpointManagerOptions(
                max_to_keep=1, enable_async_checkpointing=True, multiprocessing_options=apart
            )
            self._managers[kind] = ocp.CheckpointManager(self.root / kind, options=options)
        return self._managers[kind]
