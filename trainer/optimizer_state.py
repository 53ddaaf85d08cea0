"""The optimisers' state that a bundle may keep for the next training, and what of it a new job takes over.

`optimizer.npz` has an array per slot, `WEIGHT/OPTIMIZER.SLOT` of a weight in `weights.npz` or `tables/`, such as
`tables/item_id/adam.mean`: float32, its rows those of the table. Beside Adam's moments stands how many steps they saw,
for its bias correction goes on by them: `tables/NAME/adam.steps` and `dense/steps`. Where a penalty or a decay waits
for a row's next touch, `l2.touched` and `decay.touched` are counted back from the end: −3 is three steps before it.
Schedules and warm-up are of a run and begin anew.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import keras
import numpy as np

from longtail.bundle.arrays import Array
from longtail.trainer.arrays import assign, values_of
from longtail.trainer.backend import ops
from longtail.trainer.model.two_tower import TwoTower
from longtail.trainer.model.updates import Updates
from longtail.trainer.optimizers import STEPS
from longtail.trainer.warm_start import CarriedOver, WarmStart, dense_weights

_DENSE_STEPS = "dense/steps"
_TOUCHED = "touched"


def optimizer_state_of(model: TwoTower, updates: Updates) -> bytes:
    """Return the state of all optimisers as it stands, as the file `optimizer.npz`."""
    done = int(ops.convert_to_numpy(updates.steps_done))
    arrays = {}
    for table, groups in _row_slots(updates).items():
        for group, slots in groups.items():
            for slot, variable in slots.items():
                ago = done if slot == _TOUCHED else -done if slot == STEPS else 0
                arrays[f"tables/{table}/{group}.{slot}"] = values_of(variable) - np.float32(ago)
    for weight, slots in _dense_slots(model, updates).items():
        arrays |= {f"{weight}/{slot}": ops.convert_to_numpy(variable) for slot, variable in slots.items()}
    if updates.config.dense == "adam" and model.dense_variables:
        arrays[_DENSE_STEPS] = np.array(int(ops.convert_to_numpy(updates.dense.iterations)), np.int64)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def carry_over_state(warm_start: WarmStart, model: TwoTower, updates: Updates, carried: CarriedOver) -> None:
    """Put the state that a bundle keeps into fresh optimisers, of all weights in `carried`, and add to it what was."""
    if warm_start.slots is None:
        carried.left["optimizer"] = warm_start.no_slots
        return
    for table, groups in _row_slots(updates).items():
        if table in carried.places:
            for group, slots in groups.items():
                _carry_rows(warm_start.slots, f"tables/{table}", group, slots, carried)
    _carry_dense(warm_start.slots, model, updates, carried)


def _carry_rows(
    saved: Mapping[str, Array], weight: str, group: str, slots: Mapping[str, keras.Variable], carried: CarriedOver
) -> None:
    """Carry over the slots of one optimiser of one table: rows follow their ids, new ones keep the fresh value."""
    places, old_rows = carried.places[weight.removeprefix("tables/")]
    shapes = {slot: () if slot == STEPS else (old_rows, *variable.shape[1:]) for slot, variable in slots.items()}
    if why := _misfit(saved, weight, {f"{group}.{slot}": shape for slot, shape in shapes.items()}):
        carried.left[f"{weight}/{group}"] = why
        return
    for slot, variable in slots.items():
        old = saved[f"{weight}/{group}.{slot}"]
        if slot == STEPS:
            variable.assign(old)
            continue
        rows = values_of(variable)
        rows[places >= 0] = old[places[places >= 0]]
        assign(variable, rows)
    carried.state.append(f"{weight}/{group}")


def _carry_dense(saved: Mapping[str, Array], model: TwoTower, updates: Updates, carried: CarriedOver) -> None:
    """Carry over slots by weight; Adam, which counts steps for all weights at once, takes all or none."""
    left, fitting, counts = {}, [], updates.config.dense == "adam"
    for weight, slots in _dense_slots(model, updates).items():
        if weight not in carried.dense:
            left[weight] = "the weight itself starts fresh"
        elif why := _misfit(saved, weight, {slot: tuple(variable.shape) for slot, variable in slots.items()}):
            left[weight] = why
        else:
            fitting.append((weight, slots))
    if counts and not left and fitting and _DENSE_STEPS not in saved:
        left[_DENSE_STEPS] = "the bundle has no such count"
    carried.left.update({weight if weight == _DENSE_STEPS else f"{weight}/state": why for weight, why in left.items()})
    if counts and left:
        if fitting:
            first = next(iter(left))
            carried.left["dense/state"] = f"Adam counts its steps for all dense weights at once, and {first} has none"
        return
    for weight, slots in fitting:
        for slot, variable in slots.items():
            variable.assign(saved[f"{weight}/{slot}"])
        carried.state.append(weight)
    if counts and fitting:
        updates.dense.iterations.assign(saved[_DENSE_STEPS])
        updates.dense_before.assign(saved[_DENSE_STEPS])


def _row_slots(updates: Updates) -> dict[str, dict[str, dict[str, keras.Variable]]]:
    """Return slots by name of every optimiser of every table; tables without are left out."""
    found: dict[str, dict[str, dict[str, keras.Variable]]] = {}
    for table, optimizer in updates.rows.items():
        groups = {updates.config.embeddings: optimizer.slots} if optimizer.slots else {}
        if table in updates.l2:
            groups["l2"] = {_TOUCHED: updates.l2[table].touched}
        if table in updates.decay:
            groups["decay"] = {_TOUCHED: updates.decay[table].touched}
        found[table] = groups
    return found


def _dense_slots(model: TwoTower, updates: Updates) -> dict[str, dict[str, keras.Variable]]:
    """Return slots of every dense weight, by weight, by `OPTIMIZER.SLOT`."""
    names = {id(variable): name for name, variable in dense_weights(model).items()}
    found: dict[str, dict[str, keras.Variable]] = {}
    for slot, variables in updates.dense_slots().items():
        for weight, variable in zip(model.dense_variables, variables, strict=True):
            found.setdefault(names[id(weight)], {})[f"{updates.config.dense}.{slot}"] = variable
    return found


def _misfit(saved: Mapping[str, Array], weight: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why the slots of a weight do not fit, by slot; None if they do."""
    if any(f"{weight}/{slot}" not in saved for slot in shapes):
        there = sorted(name.removeprefix(f"{weight}/") for name in saved if name.startswith(f"{weight}/"))
        return f"expected {', '.join(sorted(shapes))}, found {', '.join(there) or 'no state'}"
    for slot, shape in shapes.items():
        if (found := saved[f"{weight}/{slot}"].shape) != shape:
            return f"{slot}: expected shape {shape}, found {found}"
    return None
