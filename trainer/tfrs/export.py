"""A bundle from any TFRS model.

Legend: `L` labels, `C` calibration queries, `D` dimensions.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import (
    SCHEMA_VERSION,
    Augmentation,
    BiasRemoval,
    Buckets,
    Bundle,
    Feature,
    Labels,
    Loss,
    Manifest,
    log_frequencies,
)
from longtail.bundle.arrays import Array, Float32, Int64
from longtail.trainer.errors import ExportError
from longtail.trainer.export.onnx import check_parity
from longtail.trainer.losses import Objective
from longtail.trainer.losses.implied_noise import implied_noise, name_of_noise
from longtail.trainer.tfrs.retrieval import SampledRetrieval
from longtail.trainer.tfrs.tower import QueryTower, split_lookup

Ids = Sequence[str] | Sequence[int] | Array

_BATCH = 1024
_SOFTWARE = (
    "longtail", "tensorflow", "tf-keras", "tensorflow-recommenders", "numpy", "pyarrow", "onnxruntime",
)  # fmt: skip


def export_tfrs(
    query_model: tf.keras.Model | QueryTower,
    candidate_model: Callable[[Any], Any],
    *,
    task: tfrs.tasks.Retrieval,
    candidates: Ids | tf.data.Dataset,
    counts: Mapping[Any, int] | Int64,
    queries: Ids | Mapping[str, Array],
    out: Path,
    feature: str = "user_id",
    similarity: Literal["dot", "cosine"] = "dot",
    display: pa.Table | None = None,
    bias_removal: float = 0.0,
    sampling_probability: bool = False,
) -> Bundle:
    """Write a bundle, to be indexed and served; its answers at λ = 0 are those of `tfrs` brute force.

    Args:
        query_model: a Sequential that begins with a StringLookup or IntegerLookup of the one feature `feature`, or,
            for every other model, a `QueryTower`.
        candidate_model: candidate features, in batches, to embeddings [batch, D].
        task: what the model was trained with: its temperature, and the loss, for the manifest and for the noise that
            λ removes. Negatives beyond the batch's are not known to it and not in that noise.
        candidates: the catalogue, distinct ids: an array of ids that `candidate_model` takes as they are, or a
            dataset of ids or of pairs (id, features), batched or not.
        counts: training pairs per label, by id (a label that is not named has 0) or [L] in the order of `candidates`.
        queries: example queries, on which the ONNX tower is checked and index builds measure their recall: ids of
            `feature`, or the inputs of a QueryTower by name. A few hundred that were not trained on are best.
        out: the bundle's directory, not there yet; its name is the bundle's name.
        feature: what a request calls the feature of a Sequential.
        similarity: `cosine` if both models end in an L2 normalisation; the bundle is refused if they do not.
        display: the labels' own columns (title, …) to show in answers, L rows in the order of `candidates`.
        bias_removal: λ of requests that name none.
        sampling_probability: calls of a plain `Retrieval` gave `candidate_sampling_probability`, which it does not
            remember. That is weight `relative`, after which nothing is left for λ to remove; without, weight `unit`,
            after which λ = 1 removes log π [METHODS §9].

    Returns:
        The bundle as written.

    Raises:
        ExportError: a query model that cannot be exported, or that computes something else in ONNX; candidates or
            queries that are not what was expected; `sampling_probability` with a `SampledRetrieval`, whose own weight
            says what calls gave.
        ValueError: a count below 0.
        BundleInvariantError: label ids that are not distinct, embeddings that are not finite or not of unit length.
        BundleExistsError: `out` is there already.
    """
    if isinstance(query_model, QueryTower):
        if not isinstance(queries, Mapping):
            raise ExportError(
                f"queries: expected the inputs of the QueryTower by name, received {type(queries).__name__}"
            )
        tower, inputs = query_model, queries
        queries_CD = _numpy(tower.function({name: tf.constant(column) for name, column in inputs.items()}))
    else:
        if isinstance(queries, Mapping):
            raise ExportError(f"queries: expected ids of {feature!r}, received a mapping with {sorted(queries)}")
        vocabulary, rest = split_lookup(query_model)
        tower = QueryTower(
            lambda named: rest(named[feature]),
            [Feature(name=feature, kind="id", vocabulary=feature)],
            {feature: vocabulary},
        )
        inputs = {feature: vocabulary.encode(_strings(queries))}
        queries_CD = _numpy(query_model(tf.constant(queries)))
    onnx = tower.to_onnx()
    check_parity("query tower", onnx, inputs, queries_CD)

    ids, embeddings_LD = _embedded(candidate_model, candidates)
    if embeddings_LD.shape[1:] != queries_CD.shape[1:]:
        raise ExportError(
            f"candidate model: expected embeddings of shape {queries_CD.shape[1:]}, the query model's, "
            f"found {embeddings_LD.shape[1:]}"
        )
    temperature, (loss, objective) = _temperature(task), _loss(task, sampling_probability=sampling_probability)
    counts_L = _counts_of(ids, counts)
    log_pi_L = log_frequencies(counts_L)
    log_nu_L = implied_noise(objective, log_pi_L, log_pi_L)
    log_pn_L = log_nu_L.astype(np.float32)
    log_popularity_L = None if np.array_equal(log_nu_L, log_pi_L) else log_pi_L.astype(np.float32)
    buckets = Buckets.by_quantile(counts_L)
    augmentation = Augmentation.fitted(temperature, embeddings_LD, log_pn_L, None, log_popularity_L)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=out.name,
        created_at=datetime.now(UTC),
        labels=len(ids),
        dim=embeddings_LD.shape[1],
        similarity=similarity,
        temperature=temperature,
        label_bias=False,
        kappa=augmentation.kappa,
        kappa_popularity=augmentation.kappa_popularity,
        loss=loss,
        query_features=list(tower.features),
        display=display.column_names if display is not None else [],
        buckets=buckets,
        bias_removal=BiasRemoval(
            default=bias_removal,
            noise=name_of_noise(log_nu_L, log_pi_L),
            chosen_by="the caller of export_tfrs; nothing was measured",
        ),
        training_data={"pairs": int(counts_L.sum())},
        software={name: version(name) for name in _SOFTWARE} | {"python": platform.python_version()},
    )
    return Bundle(
        manifest=manifest,
        labels=Labels(
            ids=ids,
            counts=counts_L,
            log_pn=log_pn_L,
            log_popularity=log_popularity_L,
            buckets=buckets.assign(counts_L),
            bias=None,
            display=display if display is not None else pa.table({}),
        ),
        embeddings=embeddings_LD,
        calibration_queries=queries_CD[np.linalg.norm(queries_CD, axis=1) > 0],
        query_tower=onnx,
        vocabularies=tower.vocabularies,
    ).write(out)


def _embedded(candidate_model: Callable[[Any], Any], candidates: Ids | tf.data.Dataset) -> tuple[pa.Array, Float32]:
    """Label ids, and their embeddings [L, D]."""
    dataset = candidates
    if not isinstance(dataset, tf.data.Dataset):
        dataset = tf.data.Dataset.from_tensor_slices(candidates)
    pairs = isinstance(dataset.element_spec, tuple)
    if (dataset.element_spec[0] if pairs else dataset.element_spec).shape.rank == 0:
        dataset = dataset.batch(_BATCH)
    ids, blocks = [], []
    for element in dataset:
        batch_ids, features = element if pairs else (element, element)
        ids.append(_strings(batch_ids.numpy()))
        blocks.append(_numpy(candidate_model(features)))
    if not blocks:
        raise ExportError("candidates: expected at least one, received none")
    return pa.concat_arrays(ids), np.concatenate(blocks)


def _counts_of(ids: pa.Array, counts: Mapping[Any, int] | Int64) -> Int64:
    """Training pairs of every label, int64 [L]."""
    if isinstance(counts, Mapping):
        by_id = dict(zip(_strings(list(counts)).to_pylist(), counts.values(), strict=True))
        counts_L = np.array([by_id.get(id_, 0) for id_ in ids.to_pylist()], np.int64)
        if by_id and not counts_L.any():
            raise ExportError(
                f"counts: expected ids of candidates, such as {ids[0].as_py()!r}, "
                f"received none of them but {next(iter(by_id))!r}"
            )
        return counts_L
    counts_L = np.asarray(counts, np.int64)
    if counts_L.shape != (len(ids),):
        raise ExportError(f"counts: expected one for each of {len(ids)} candidates, received shape {counts_L.shape}")
    return counts_L


def _temperature(task: tfrs.tasks.Retrieval) -> float:
    return 1.0 if task._temperature is None else float(task._temperature)


def _loss(task: tfrs.tasks.Retrieval, *, sampling_probability: bool) -> tuple[Loss, Objective]:
    """What the task minimises, for the manifest and for the noise."""
    if isinstance(task, SampledRetrieval):
        if sampling_probability:
            raise ExportError(
                "sampling_probability: expected False with a SampledRetrieval, whose weight "
                f"{task.trained_with.weight!r} says it, received True"
            )
        return task.trained_with, task.objective
    weight = "relative" if sampling_probability else "unit"
    return Loss(family="softmax", sampler="in_batch", weight=weight), Objective("softmax", weight)


def _numpy(embeddings: Any) -> Float32:
    return np.asarray(embeddings, dtype=np.float32)


def _strings(ids: Ids | list[Any]) -> pa.Array:
    """Ids as the bundle writes them: UTF-8 text, integers in decimal."""
    flat = np.asarray(ids).tolist()
    return pa.array([id_.decode() if isinstance(id_, bytes) else str(id_) for id_ in flat], pa.string())
