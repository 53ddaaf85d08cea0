"""From a trained model to a bundle: ONNX towers checked against Keras, labels, the λ curve, reports.

Legend: `B` batch, `C` calibration queries, `D` dimensions.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
from keras import ops

from longtail.bundle import SCHEMA_VERSION, BiasRemoval, Bundle, Labels, Loss, Manifest
from longtail.bundle.arrays import Int32
from longtail.trainer.config import Recipe
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.export.parity import check_parity
from longtail.trainer.model.towers import Towers, build_towers, in_float32
from longtail.trainer.train import Trained

_ONNX_LIMIT = 2**31 - 2**24
_CALIBRATION_QUERIES = 1000
_SOFTWARE = ("longtail", "keras", "numpy", "pyarrow", "onnxruntime")


def to_bundle(trained: Trained, held_out_rows: Int32, bias_removal: BiasRemoval, reports: dict[str, bytes]) -> Bundle:
    """The bundle of a trained model, not yet written.

    Args:
        trained: the model and its data.
        held_out_rows: query rows to draw calibration queries from.
        bias_removal: the dial, with its curve.
        reports: files to keep with the model.

    Raises:
        ExportError: a tower is too large for ONNX, or computes something else there.
    """
    recipe, dataset, model = trained.recipe, trained.dataset, trained.model
    catalogue = trained.catalogue()
    rng = np.random.default_rng(recipe.seed)
    rows_C = np.sort(rng.permutation(held_out_rows)[:_CALIBRATION_QUERIES]).astype(np.int32)
    inputs = trained.encoding.query.of_queries(rows_C)
    queries_CD = model.embed_queries(inputs)
    embedded = np.linalg.norm(queries_CD, axis=1) > 0
    query_tower, label_tower = export_towers(trained)
    check_parity("query_tower.onnx", query_tower, inputs, queries_CD)
    if label_tower is not None:
        sample = {name: column[:_CALIBRATION_QUERIES] for name, column in trained.encoding.label_inputs.items()}
        check_parity("label_tower.onnx", label_tower, sample, catalogue.embeddings[:_CALIBRATION_QUERIES])
    buckets = buckets_for(recipe.evaluation, catalogue.counts)
    display = recipe.data.display if dataset.label_table is not None else []
    empty = pa.table({})
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=recipe.name,
        created_at=datetime.now(UTC),
        labels=len(dataset.label_ids),
        dim=recipe.model.dim,
        similarity=recipe.model.similarity,
        temperature=model.temperature,
        label_bias=catalogue.bias is not None,
        kappa=catalogue.augmentation.kappa,
        kappa_bias=catalogue.augmentation.kappa_bias,
        loss=Loss(
            family=str(recipe.loss.family),
            sampler=str(recipe.loss.sampler),
            weight=str(recipe.loss.weight),
        ),
        query_features=trained.encoding.query_features,
        label_features=trained.encoding.label_features,
        display=display,
        buckets=buckets,
        bias_removal=bias_removal,
        training_data={
            "fingerprint": dataset.fingerprint(),
            "read_at": dataset.read_at.isoformat(),
            "pairs": len(dataset.train),
            "queries": len(dataset.query_ids),
            "training_queries": dataset.training_queries(),
            "seed": recipe.seed,
            "epochs": len(trained.history.losses),
        },
        software={name: version(name) for name in _SOFTWARE}
        | {"backend": keras.backend.backend(), "python": platform.python_version()},
    )
    return Bundle(
        manifest=manifest,
        labels=Labels(
            ids=dataset.label_ids,
            counts=catalogue.counts,
            log_pn=catalogue.log_pn,
            buckets=catalogue.buckets,
            bias=catalogue.bias,
            display=dataset.label_table.select(display) if dataset.label_table is not None else empty,
        ),
        embeddings=catalogue.embeddings,
        calibration_queries=queries_CD[embedded],
        query_tower=query_tower,
        label_tower=label_tower,
        vocabularies=trained.encoding.vocabularies,
        proposal=model.proposal,
        reports=reports,
    )


def export_towers(trained: Trained) -> tuple[bytes, bytes | None]:
    """ONNX models of the query tower and, if labels have features beside their id, the label tower.

    Keras exports to ONNX from TensorFlow; a model trained on another backend is rebuilt and exported by
    a child process that runs TensorFlow.

    Raises:
        ExportError: a tower is larger than ONNX allows (2 GiB), or the child process failed.
    """
    recipe, towers = trained.recipe, trained.model.towers
    with_label = any(feature.name != recipe.data.label_id for feature in recipe.label.features)
    sides = {"query": towers.query} | ({"label": towers.label} if with_label else {})
    for side, tower in sides.items():
        size = sum(
            weight.shape[0] * int(np.prod(weight.shape[1:])) * 4 for weight in tower.weights if len(weight.shape)
        )
        if size > _ONNX_LIMIT:
            raise ExportError(
                f"{side} tower: expected at most {_ONNX_LIMIT} bytes of weights, ONNX's limit, found {size}: "
                "raise min_count or lower dim of its largest feature"
            )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if keras.backend.backend() == "tensorflow":
            write_onnx(towers, list(sides), work)
        else:
            _export_in_child(trained, list(sides), work)
        models = {side: (work / f"{side}.onnx").read_bytes() for side in sides}
    return models["query"], models.get("label")


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
        with in_float32(tower), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Keras' exporter asks NumPy for a name it has dropped
            tower.export(str(folder / f"{side}.onnx"), format="onnx", verbose=False)


def _export_in_child(trained: Trained, sides: list[str], folder: Path) -> None:
    towers = trained.model.towers
    job = {
        "recipe": trained.recipe.model_dump(mode="json"),
        "vocabulary_rows": trained.encoding.vocabulary_rows,
        "numbers": trained.encoding.numbers,
        "sides": sides,
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    for at, weight in enumerate([*towers.query.weights, *towers.label.weights]):
        np.save(folder / f"{at}.npy", ops.convert_to_numpy(weight), allow_pickle=False)
    child = subprocess.run(
        [sys.executable, "-c", f"from longtail.trainer.export.bundle import export_job; export_job({str(folder)!r})"],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise ExportError(
            f"export on the TensorFlow backend: expected exit 0, found {child.returncode}: {child.stderr[-2000:]}"
        )


def export_job(folder: str) -> None:
    """What the child process runs: rebuild the towers, load their weights, write ONNX."""
    work = Path(folder)
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    towers = build_towers(Recipe.model_validate(job["recipe"]), job["vocabulary_rows"], job["numbers"])
    for at, weight in enumerate([*towers.query.weights, *towers.label.weights]):
        weight.assign(np.load(work / f"{at}.npy", allow_pickle=False))
    write_onnx(towers, job["sides"], work)
