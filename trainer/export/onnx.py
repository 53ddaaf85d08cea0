"""Export towers to ONNX and check their outputs.

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

from longtail.bundle.arrays import Array, Float32
from longtail.bundle.bundle import TABLES
from longtail.bundle.tower import onnx_session
from longtail.trainer import register
from longtail.trainer.arrays import assign, read_values, write_array
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ExportError
from longtail.trainer.export.tables import large_tables, link_tables
from longtail.trainer.model.towers import Towers, build_towers, in_float32

if TYPE_CHECKING:
    from longtail.trainer.trained import Trained

ONNX_LIMIT = 2**31 - 2**24
"""Largest size of the weights of one ONNX model, bytes.

Protobuf limits a message to 2 GiB; 16 MiB are left for the graph.
"""
STAND_IN_ROWS = 8
"""Rows of the small array that replaces a large table during an export."""
_TOLERANCE = 1e-4
_OF_TOWERS = {"name", "seed", "data", "query", "label", "model", "objectives", "training"}
"""Sections of a recipe that define its towers; a child process may not know a custom loss."""


def export_towers(trained: Trained, folder: Path) -> tuple[dict[str, bytes], dict[str, Path]]:
    """Write `query_tower.onnx`, `label_tower.onnx` and the large tables.

    The models refer to these tables, and a warm start reads them.

    Returns:
        ONNX models by side, with `label` only if labels have other features than their id; files of tables by name.
    """
    recipe, towers = trained.recipe, trained.model.towers
    large = large_tables(towers)
    file_of = {id(table.table): name for name, (_, table) in large.items()}
    read = {}
    for side, tower in exported_towers(recipe, towers).items():
        read[side] = {file_of[id(weight)] for weight in tower.weights if id(weight) in file_of}
        size = sum(int(np.prod(weight.shape)) * 4 for weight in tower.weights if id(weight) not in file_of)
        if size > ONNX_LIMIT:
            raise ExportError(
                f"{side} tower: expected at most {ONNX_LIMIT} bytes of weights outside its tables, the limit of ONNX, "
                f"found {size}: make its layers narrower"
            )
    files, stand_in = {name: folder / TABLES / f"{name}.npy" for name in large}, {}
    (folder / TABLES).mkdir(exist_ok=True)
    for i, (name, (_, table)) in enumerate(large.items()):
        write_array(files[name], table.table)
        # Random rows, so that `link_tables` can recognise each stand-in by its values in the exported model.
        stand_in[name] = np.random.default_rng(i).standard_normal((STAND_IN_ROWS, table.dim), np.float32)
    rows = dict(trained.encoding.vocabulary_rows) | {rows: STAND_IN_ROWS for rows, _ in large.values()}
    models = onnx_models(
        recipe, towers, rows, trained.encoding.numbers, {id_: stand_in[file_of[id_]] for id_ in file_of}
    )
    for side, model in models.items():
        models[side], replaced = link_tables(model, stand_in, files)
        if missing := read[side] - replaced:
            raise ExportError(
                f"{side} tower: expected a model that looks up rows of {', '.join(sorted(missing))}, found no such "
                "lookup: a layer reads the table as a whole"
            )
        (folder / f"{side}_tower.onnx").write_bytes(models[side])
    return models, files


def exported_towers(recipe: Recipe, towers: Towers) -> dict[str, keras.Model]:
    """Return the towers that a bundle holds, by side."""
    return {"query": towers.query} | ({"label": towers.label} if recipe.describes_labels else {})


def onnx_models(
    recipe: Recipe, towers: Towers, vocabulary_rows: Mapping[str, int], numbers: Mapping[str, tuple[float, float]],
    instead: Mapping[int, Float32] = MappingProxyType({}),
) -> dict[str, bytes]:  # fmt: skip
    """Convert the towers of a bundle to ONNX models, by side.

    The conversion needs TensorFlow. With `instead`, towers are rebuilt with the other values. With another backend,
    a child process rebuilds the towers in TensorFlow.

    Args:
        vocabulary_rows, numbers: arguments of `build_towers`; `vocabulary_rows` must match the rows of `instead`.
        instead: replacements for the values of some weights, by the weight's `id`; the number of rows may differ.
    """
    sides = list(exported_towers(recipe, towers))
    job = {
        "recipe": dump_towers(recipe),
        "vocabulary_rows": vocabulary_rows,
        "numbers": numbers,
        "sides": sides,
        "modules": register.list_modules(recipe.own_layers),
    }
    values = [instead[id(weight)] if id(weight) in instead else read_values(weight) for weight in _weights(towers)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if keras.backend.backend() == "tensorflow":
            write_onnx(_rebuilt(recipe, job, values) if instead else towers, sides, work)
        else:
            _export_in_child(job, values, work)
        return {side: (work / f"{side}.onnx").read_bytes() for side in sides}


def dump_towers(recipe: Recipe) -> dict[str, Any]:
    """Dump a recipe's sections that define its towers, for a child process."""
    # Sampler `full` is allowed with all towers; the default, `in_batch`, is not allowed with sequences.
    return recipe.model_dump(mode="json", by_alias=True, include=_OF_TOWERS) | {
        "loss": {"sampler": "full", "weight": "unit"}
    }


def _weights(towers: Towers) -> list[keras.Variable]:
    return [*towers.query.weights, *towers.label.weights]


def _rebuilt(recipe: Recipe, job: Mapping[str, Any], values: Sequence[Array]) -> Towers:
    towers = build_towers(recipe, job["vocabulary_rows"], job["numbers"])
    for weight, value in zip(_weights(towers), values, strict=True):
        assign(weight, value)
    return towers


def write_onnx(towers: Towers, sides: list[str], folder: Path) -> None:
    """Write `query.onnx` and `label.onnx`; TensorFlow backend only."""
    import tensorflow as tf  # imported here because other backends train without it
    import tf2onnx

    for side in sides:
        tower = towers.query if side == "query" else towers.label
        specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in tower.input.items()]

        def embed(*columns: Any, tower: keras.Model = tower) -> Any:
            return tower(dict(zip(tower.input, columns, strict=True)))

        # `keras.Model.export` would make AutoGraph write Python files, and would trace each tower twice.
        with in_float32(tower):
            traced = tf.function(embed, input_signature=specs, autograph=False)
            tf2onnx.convert.from_function(traced, specs, output_path=str(folder / f"{side}.onnx"))


def _export_in_child(job: dict[str, Any], values: Sequence[Array], folder: Path) -> None:
    if "__main__" in job["modules"]:
        raise ExportError(
            "export on the TensorFlow backend: a custom layer in __main__ is not allowed because a child process must "
            f"import it when towers are trained on {keras.backend.backend()}; move it to a module of its own"
        )
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    for i, value in enumerate(values):
        np.save(folder / f"{i}.npy", value, allow_pickle=False)
    path = os.pathsep.join(folder_path for folder_path in sys.path if folder_path)
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
    """Rebuild the towers in a child process, load their weights, and write ONNX."""
    work = Path(folder)
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    for module in job["modules"]:
        import_module(module)
    recipe = Recipe.model_validate(job["recipe"])
    values = [np.load(work / f"{i}.npy", allow_pickle=False) for i in range(len(list(work.glob("*.npy"))))]
    write_onnx(_rebuilt(recipe, job, values), job["sides"], work)


def check_parity(name: str, model: bytes | Path, inputs: Mapping[str, Array], expected_BD: Float32) -> None:
    """Refuse a tower for which ONNX Runtime and the training framework disagree."""
    session = onnx_session(model, name)
    names = {node.name for node in session.get_inputs()}
    if names != set(inputs):
        raise ExportError(f"{name}: expected queries with the inputs {sorted(names)}, received {sorted(inputs)}")
    found_BD = session.run(None, dict(inputs))[0]
    if found_BD.shape != expected_BD.shape:
        raise ExportError(f"{name}: expected embeddings of shape {expected_BD.shape}, found {found_BD.shape}")
    worst = float(np.abs(found_BD - expected_BD).max())
    # `not … <=` also refuses NaN.
    if not worst <= _TOLERANCE * max(1.0, float(np.abs(expected_BD).max())):
        raise ExportError(f"{name}: expected the trained outputs within {_TOLERANCE}, found {worst:.3g} apart")
