"""Towers as ONNX models, and the check that ONNX Runtime computes what was trained.

Legend: `B` batch, `D` dimensions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from longtail.bundle import onnx_session
from longtail.bundle.arrays import Array, Float32
from longtail.trainer import backend, register
from longtail.trainer.backend import ops
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ExportError
from longtail.trainer.model.towers import Towers, build_towers, in_float32

if TYPE_CHECKING:
    from longtail.trainer.trained import Trained

ONNX_LIMIT = 2**31 - 2**24
"""Bytes of weights that one ONNX model can hold, with room for the rest of it."""
_TOLERANCE = 1e-4
_OF_TOWERS = {"name", "seed", "data", "query", "label", "model", "objectives", "training"}
"""Sections of a recipe that say what its towers are; a loss of one's own may be unknown to a child process."""


def export_towers(trained: Trained) -> tuple[bytes, bytes | None]:
    """ONNX models of the query tower and, if labels have features beside their id, the label tower.

    Raises:
        ExportError: a tower is larger than ONNX allows (2 GiB), or the child process failed.
    """
    recipe, towers = trained.recipe, trained.model.towers
    for side, tower in exported(recipe, towers).items():
        size = sum(
            weight.shape[0] * int(np.prod(weight.shape[1:])) * 4 for weight in tower.weights if len(weight.shape)
        )
        if size > ONNX_LIMIT:
            raise ExportError(
                f"{side} tower: expected at most {ONNX_LIMIT} bytes of weights, ONNX's limit, found {size}: "
                "raise min_count or lower dim of its largest feature"
            )
    models = onnx_models(recipe, towers, trained.encoding.vocabulary_rows, trained.encoding.numbers)
    return models["query"], models.get("label")


def exported(recipe: Recipe, towers: Towers) -> dict[str, keras.Model]:
    """The towers that a bundle has, by side."""
    return {"query": towers.query} | ({"label": towers.label} if recipe.describes_labels else {})


def onnx_models(
    recipe: Recipe, towers: Towers, vocabulary_rows: Mapping[str, int], numbers: Mapping[str, tuple[float, float]]
) -> dict[str, bytes]:
    """ONNX models of the towers that a bundle has, by side.

    Keras exports to ONNX from TensorFlow; towers of another backend are rebuilt and exported by a child process that
    runs TensorFlow.

    Args:
        recipe: what the towers were built by.
        towers: with their weights.
        vocabulary_rows, numbers: what they were built by, too.

    Raises:
        ExportError: the child process failed.
    """
    sides = list(exported(recipe, towers))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if keras.backend.backend() == "tensorflow":
            write_onnx(towers, sides, work)
        else:
            job = {
                "recipe": recipe.model_dump(mode="json", by_alias=True, include=_OF_TOWERS),
                "vocabulary_rows": vocabulary_rows,
                "numbers": numbers,
                "sides": sides,
                "modules": register.modules_of(recipe.own_layers),
            }
            _export_in_child(job, towers, work)
        return {side: (work / f"{side}.onnx").read_bytes() for side in sides}


def write_onnx(towers: Towers, sides: list[str], folder: Path) -> None:
    """Write `query.onnx` and `label.onnx`; TensorFlow backend only."""
    for side in sides:
        tower = towers.query if side == "query" else towers.label
        tower(
            {
                name: ops.zeros([2 if n is None else n for n in spec.shape], spec.dtype)
                for name, spec in tower.input.items()
            }
        )
        with in_float32(tower), _temporary_files_in(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Keras' exporter asks NumPy for a name it has dropped
            export = backend.without_autograph(tower.export)
            export(str(folder / f"{side}.onnx"), format="onnx", verbose=False)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Keras' exporter has AutoGraph rewrite a function to a temporary file, beside which Python keeps its bytecode."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _export_in_child(job: dict[str, Any], towers: Towers, folder: Path) -> None:
    if "__main__" in job["modules"]:
        raise ExportError(
            f"export on the TensorFlow backend: expected towers of one's own in a module that a child process "
            f"imports, since towers are trained on {keras.backend.backend()}, received some of __main__"
        )
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    for at, weight in enumerate([*towers.query.weights, *towers.label.weights]):
        np.save(folder / f"{at}.npy", ops.convert_to_numpy(weight), allow_pickle=False)
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
    """What the child process runs: rebuild the towers, load their weights, write ONNX."""
    work = Path(folder)
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    for module in job["modules"]:
        import_module(module)
    towers = build_towers(Recipe.model_validate(job["recipe"]), job["vocabulary_rows"], job["numbers"])
    for at, weight in enumerate([*towers.query.weights, *towers.label.weights]):
        weight.assign(np.load(work / f"{at}.npy", allow_pickle=False))
    write_onnx(towers, job["sides"], work)


def check_parity(name: str, model: bytes, inputs: Mapping[str, Array], expected_BD: Float32) -> None:
    """Refuse a tower that ONNX Runtime computes otherwise than the training framework.

    Args:
        name: name of the tower, for the error.
        model: ONNX.
        inputs: by name, [B] or [B, P].
        expected_BD: embeddings by the training framework.

    Raises:
        ExportError: other inputs, another shape, or embeddings more than 1e-4 of their scale apart.
        TowerError: ONNX Runtime does not load the model.
    """
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
