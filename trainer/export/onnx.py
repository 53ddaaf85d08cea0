"""Towers as ONNX models, and the check that ONNX Runtime computes what was trained.

Legend: `B` batch, `D` dimensions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from longtail.bundle import onnx_session
from longtail.bundle.arrays import Array, Float32
from longtail.bundle.bundle import TABLES
from longtail.trainer import register
from longtail.trainer.arrays import assign, values_of, write_array
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ExportError
from longtail.trainer.export.tables import large_tables, with_tables
from longtail.trainer.model.towers import Towers, build_towers, in_float32

if TYPE_CHECKING:
    from longtail.trainer.trained import Trained

ONNX_LIMIT = 2**31 - 2**24
"""Bytes of weights that one ONNX model can hold, with room for the rest of it."""
STAND_IN_ROWS = 8
"""Rows of what stands for a table in an export."""
_TOLERANCE = 1e-4
_OF_TOWERS = {"name", "seed", "data", "query", "label", "model", "objectives", "training"}
"""Sections of a recipe that say what its towers are; a loss of one's own may be unknown to a child process."""


def export_towers(trained: Trained, folder: Path) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Write `query_tower.onnx`, `label_tower.onnx` and the tables that they refer to or that training goes on from.

    Returns:
        ONNX models by side, with `label` where labels have more features than their id; files of tables by name.
    """
    recipe, towers = trained.recipe, trained.model.towers
    large = large_tables(towers)
    apart = {id(table.table): name for name, (_, table) in large.items()}
    read = {}
    for side, tower in exported(recipe, towers).items():
        read[side] = {apart[id(weight)] for weight in tower.weights if id(weight) in apart}
        size = sum(int(np.prod(weight.shape)) * 4 for weight in tower.weights if id(weight) not in apart)
        if size > ONNX_LIMIT:
            raise ExportError(
                f"{side} tower: expected at most {ONNX_LIMIT} bytes of weights beside its tables, ONNX's limit, found "
                f"{size}: make its layers narrower"
            )
    files, stand_in = {name: folder / TABLES / f"{name}.npy" for name in large}, {}
    (folder / TABLES).mkdir(exist_ok=True)
    for place, (name, (_, table)) in enumerate(large.items()):
        write_array(files[name], table.table)
        stand_in[name] = np.random.default_rng(place).standard_normal((STAND_IN_ROWS, table.dim), np.float32)
    rows = dict(trained.encoding.vocabulary_rows) | {rows: STAND_IN_ROWS for rows, _ in large.values()}
    models = onnx_models(recipe, towers, rows, trained.encoding.numbers, {id_: stand_in[apart[id_]] for id_ in apart})
    for side, model in models.items():
        models[side], found = with_tables(model, stand_in, files)
        if missing := read[side] - found:
            raise ExportError(
                f"{side} tower: expected a model that looks rows of {', '.join(sorted(missing))} up, found none of "
                "them in it: a layer reads a table as a whole"
            )
        (folder / f"{side}_tower.onnx").write_bytes(models[side])
    return models, files


def exported(recipe: Recipe, towers: Towers) -> dict[str, keras.Model]:
    """Return the towers that a bundle has, by side."""
    return {"query": towers.query} | ({"label": towers.label} if recipe.describes_labels else {})


def onnx_models(
    recipe: Recipe, towers: Towers, vocabulary_rows: Mapping[str, int], numbers: Mapping[str, tuple[float, float]],
    instead: Mapping[int, Float32] = MappingProxyType({}),
) -> dict[str, bytes]:  # fmt: skip
    """ONNX models of the towers that a bundle has, by side.

    Keras exports to ONNX from TensorFlow. Towers of other values than their own are rebuilt for it; those of another
    backend by a child process that runs TensorFlow.

    Args:
        vocabulary_rows, numbers: what they are built by again, `vocabulary_rows` of as many rows as `instead` has.
        instead: values of weights in place of their own, of the same shape but for rows, by the weight's `id`.
    """
    sides = list(exported(recipe, towers))
    job = {
        "recipe": recipe.model_dump(mode="json", by_alias=True, include=_OF_TOWERS),
        "vocabulary_rows": vocabulary_rows,
        "numbers": numbers,
        "sides": sides,
        "modules": register.modules_of(recipe.own_layers),
    }
    values = [instead[id(weight)] if id(weight) in instead else values_of(weight) for weight in _weights(towers)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if keras.backend.backend() == "tensorflow":
            write_onnx(_rebuilt(recipe, job, values) if instead else towers, sides, work)
        else:
            _export_in_child(job, values, work)
        return {side: (work / f"{side}.onnx").read_bytes() for side in sides}


def _weights(towers: Towers) -> list[keras.Variable]:
    return [*towers.query.weights, *towers.label.weights]


def _rebuilt(recipe: Recipe, job: Mapping[str, Any], values: Sequence[Array]) -> Towers:
    towers = build_towers(recipe, job["vocabulary_rows"], job["numbers"])
    for weight, value in zip(_weights(towers), values, strict=True):
        assign(weight, value)
    return towers


def write_onnx(towers: Towers, sides: list[str], folder: Path) -> None:
    """Write `query.onnx` and `label.onnx`; TensorFlow backend only."""
    import tensorflow as tf  # which another backend does without
    import tf2onnx

    for side in sides:
        tower = towers.query if side == "query" else towers.label
        specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in tower.input.items()]

        def embed(*columns: Any, tower: keras.Model = tower) -> Any:
            return tower(dict(zip(tower.input, columns, strict=True)))

        # Keras' own exporter has AutoGraph write Python files, and traces each tower twice.
        with in_float32(tower):
            traced = tf.function(embed, input_signature=specs, autograph=False)
            tf2onnx.convert.from_function(traced, specs, output_path=str(folder / f"{side}.onnx"))


def _export_in_child(job: dict[str, Any], values: Sequence[Array], folder: Path) -> None:
    if "__main__" in job["modules"]:
        raise ExportError(
            f"export on the TensorFlow backend: expected towers of one's own in a module that a child process "
            f"imports, since towers are trained on {keras.backend.backend()}, received some of __main__"
        )
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    for at, value in enumerate(values):
        np.save(folder / f"{at}.npy", value, allow_pickle=False)
    path = os.pathsep.join(place for place in sys.path if place)
    child = subprocess.run(
        [sys.executable, "-c", f"from longtail.trainer.export.onnx import export_job; export_job({str(folder)!r})"],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise ExportError(
            f"export on the TensorFlow backend: expected exit 0, found {child.returncode}: {child.stderr[-2000:]}"
        )


def export_job(folder: str) -> None:
    """Rebuild the towers in the child process, load their weights, and write ONNX."""
    work = Path(folder)
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    for module in job["modules"]:
        import_module(module)
    recipe = Recipe.model_validate(job["recipe"])
    values = [np.load(work / f"{at}.npy", allow_pickle=False) for at in range(len(list(work.glob("*.npy"))))]
    write_onnx(_rebuilt(recipe, job, values), job["sides"], work)


def check_parity(name: str, model: bytes | Path, inputs: Mapping[str, Array], expected_BD: Float32) -> None:
    """Refuse a tower that ONNX Runtime computes otherwise than the training framework."""
    session = onnx_session(model, name)
    wanted = {node.name for node in session.get_inputs()}
    if wanted != set(inputs):
        raise ExportError(f"{name}: expected queries with the inputs {sorted(wanted)}, received {sorted(inputs)}")
    found_BD = session.run(None, dict(inputs))[0]
    if found_BD.shape != expected_BD.shape:
        raise ExportError(f"{name}: expected embeddings of shape {expected_BD.shape}, found {found_BD.shape}")
    worst = float(np.abs(found_BD - expected_BD).max())
    if not worst <= _TOLERANCE * max(1.0, float(np.abs(expected_BD).max())):
        raise ExportError(f"{name}: expected the trained outputs within {_TOLERANCE}, found {worst:.3g} apart")
