"""A bundle from any TFRS model.

Legend: `L` labels, `C` calibration queries, `D` dimensions.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
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
    BiasRemoval,
    Bundle,
    Feature,
    Labels,
    Loss,
    Manifest,
    Vocabulary,
    log_frequencies,
)
from longtail.bundle.arrays import Int64
from longtail.bundle.store import refuse_existing, working_directory
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.dial import Dial, Noise
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import buckets_for
from longtail.trainer.export.tables import without_large_tables
from longtail.trainer.losses import Objective
from longtail.trainer.losses.implied_noise import implied_noise, name_of_noise
from longtail.trainer.tfrs.catalogue import Candidates, Catalogue, counts_of
from longtail.trainer.tfrs.columns import Columns, Ids
from longtail.trainer.tfrs.measure import BY_THE_CALLER, Validation, measured
from longtail.trainer.tfrs.retrieval import SampledRetrieval
from longtail.trainer.tfrs.tower import ExportedTower, exported

_SOFTWARE = (
    "longtail", "tensorflow", "tf-keras", "tensorflow-recommenders", "numpy", "pyarrow", "onnxruntime",
)  # fmt: skip


def export_tfrs(
    query_model: tf.keras.Model,
    candidate_model: Callable[[Any], Any],
    *,
    task: tfrs.tasks.Retrieval,
    candidates: Candidates | tf.data.Dataset,
    counts: Mapping[Any, int] | Int64,
    queries: Ids | Mapping[str, Any],
    out: Path,
    feature: str = "user_id",
    label_feature: str = "label_id",
    similarity: Literal["dot", "cosine"] = "dot",
    display: pa.Table | None = None,
    label_tower: bool | None = None,
    validation: Validation | None = None,
    evaluation: Mapping[str, Any] | None = None,
    bias_removal: float | None = None,
    sampling_probability: bool = False,
) -> Bundle:
    """Write a bundle, to be indexed and served; its answers at λ = 0 are those of `tfrs` brute force.

    The towers are traced: columns go in as they are given, and StringLookup, IntegerLookup and TextVectorization layers
    that read them are taken over into the bundle's vocabularies; numbers go straight into the graph, Normalization and
    Discretization with them. What requests give for the examples, read by the service's encoder, must give the model's
    own embeddings through ONNX.

    Args:
        query_model: a Keras model of one tensor or of a dict of them.
        candidate_model: candidate features, in batches, to embeddings [batch, D].
        task: what the model was trained with: its temperature, and the loss, for the manifest and for the noise that
            λ removes. Negatives beyond the batch's are not known to it and not in that noise.
        candidates: the catalogue, distinct ids: an array of ids that `candidate_model` takes as they are, a pair (ids,
            columns by name), or a dataset of ids or of pairs (id, features), batched or not.
        counts: training pairs per label, by id (a label that is not named has 0) or [L] in the order of `candidates`.
        queries: example queries, on which the ONNX tower is checked and index builds measure their recall: columns by
            name, or one column. A few hundred that were not trained on are best. A number's mean over them stands for
            a missing one.
        out: the bundle's directory, not there yet; its name is the bundle's name.
        feature: what a request calls the feature of a query model of one tensor.
        label_feature: what an upsert calls the feature of a candidate model of one tensor, the id.
        similarity: `cosine` if both models end in an L2 normalisation.
        display: the labels' own columns (title, …) to show in answers, L rows in the order of `candidates`.
        label_tower: exports the candidate model as well, so that labels can be added while serving; it needs other
            features than the id. None exports it if possible, and warns if a model of named features cannot be
            exported.
        validation: pairs to measure the curve of λ and μ on; bucket floors need one.
        evaluation: what to measure of them and what to choose the default λ by: keys of a recipe's `[evaluation]`, such
            as `{"ks": [20], "metric": "recall@20", "floor": {"tail": 0.02}}`.
        bias_removal: λ of requests that name none. By default chosen on `validation`; without that 0, though what
            undoes the training in theory is 1 for weight `unit` [METHODS §9].
        sampling_probability: calls of a plain `Retrieval` gave `candidate_sampling_probability`, which it does not
            remember. That is weight `relative`, after which nothing is left for λ to remove; without, weight `unit`,
            after which λ = 1 removes log π [METHODS §9].

    Raises:
        ExportError: a model that a bundle cannot express, or that computes something else in ONNX; candidates, counts,
            queries or validation pairs that do not fit it.
        DataError: no validation pair is left to find, or a metric over more labels than there are.
        BundleInvariantError: label ids that are not distinct, embeddings that are not finite or not of unit length.
        BundleExistsError: `out` is there already.
    """
    refuse_existing(out)
    query = exported(query_model, Columns.of(queries, feature, "queries"), "query tower")
    catalogue = Catalogue.of(candidate_model, candidates, label_feature)
    ids, embeddings_LD = catalogue.ids, catalogue.embeddings
    queries_CD = query.embeddings
    if embeddings_LD.shape[1:] != queries_CD.shape[1:]:
        raise ExportError(
            f"candidate model: expected embeddings of shape {queries_CD.shape[1:]}, the query model's, "
            f"found {embeddings_LD.shape[1:]}"
        )
    label, own_id = catalogue.tower(candidate_model, label_tower)
    temperature = 1.0 if task._temperature is None else float(task._temperature)
    loss, objective = _loss(task, sampling_probability=sampling_probability)
    counts_L = counts_of(ids, counts)
    log_pi_L = log_frequencies(counts_L)
    log_nu_L = implied_noise(objective, log_pi_L, log_pi_L)
    apart = not np.array_equal(log_nu_L, log_pi_L)
    noise = Noise(name_of_noise(log_nu_L, log_pi_L), constant=bool(np.ptp(log_nu_L) == 0), apart=apart)
    config = EvaluationConfig.model_validate(evaluation or {})
    buckets = buckets_for(config, counts_L)
    side = LabelSide.of(
        embeddings_LD, None, counts_L, training_queries=int(counts_L.sum()), temperature=temperature,
        log_pn=log_nu_L.astype(np.float32), buckets=buckets,
        log_popularity=log_pi_L.astype(np.float32) if apart else None,
    )  # fmt: skip
    why, reports = f"{BY_THE_CALLER}; nothing was measured", {}
    dial = Dial(BiasRemoval(default=bias_removal or 0.0, noise=noise.name, chosen_by=why))
    if validation is not None:
        dial, reports["metrics.json"] = measured(validation, query, ids, side, noise, config, bias_removal=bias_removal)
    label_features, vocabularies_of_both = _merged(query, label)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=out.name,
        created_at=datetime.now(UTC),
        labels=len(ids),
        dim=embeddings_LD.shape[1],
        similarity=similarity,
        temperature=temperature,
        label_bias=False,
        kappa=side.augmentation.kappa,
        kappa_popularity=side.augmentation.kappa_popularity,
        loss=loss,
        query_features=query.tower.features,
        label_features=label_features,
        own_id=own_id,
        display=display.column_names if display is not None else [],
        buckets=buckets,
        bias_removal=dial.bias_removal,
        popularity=dial.popularity,
        bonus=dict(dial.bonus),
        training_data={"pairs": int(counts_L.sum())},
        software={name: version(name) for name in _SOFTWARE} | {"python": platform.python_version()},
    )
    models = {"query": query.onnx} | ({} if label is None else {"label": label.onnx})
    with working_directory(out) as folder:
        towers, tables = without_large_tables(models, folder)
        return Bundle(
            manifest=manifest,
            labels=Labels(
                ids=ids,
                counts=counts_L,
                log_pn=side.log_pn,
                log_popularity=side.log_popularity,
                buckets=side.buckets,
                bias=None,
                display=display if display is not None else pa.table({}),
            ),
            embeddings=embeddings_LD,
            calibration_queries=queries_CD[np.linalg.norm(queries_CD, axis=1) > 0],
            query_tower=towers["query"],
            label_tower=towers.get("label"),
            tables=tables,
            vocabularies=vocabularies_of_both,
            reports=reports,
        ).write(out)


def _merged(query: ExportedTower, label: ExportedTower | None) -> tuple[list[Feature], dict[str, Vocabulary]]:
    """Get features of labels and vocabularies of both towers; `label_NAME` where both have a NAME and it differs."""
    merged = dict(query.tower.vocabularies)
    features = []
    if label is None:
        return [], merged
    tower, own = label.tower, label.tower.vocabularies
    for feature in tower.features:
        name = feature.vocabulary
        if name is not None:
            vocabulary = own[name]
            if name in merged and not merged[name].ids.equals(vocabulary.ids):
                name = f"label_{name}"
            merged[name] = vocabulary
        features.append(feature.model_copy(update={"vocabulary": name}))
    return features, merged


def _loss(task: tfrs.tasks.Retrieval, *, sampling_probability: bool) -> tuple[Loss, Objective]:
    """Get what the task minimises, for the manifest and for the noise."""
    if isinstance(task, SampledRetrieval):
        if sampling_probability:
            raise ExportError(
                "sampling_probability: expected False with a SampledRetrieval, whose weight "
                f"{task.trained_with.weight!r} says it, received True"
            )
        return task.trained_with, task.objective
    weight = "relative" if sampling_probability else "unit"
    return Loss(family="softmax", sampler="in_batch", weight=weight), Objective("softmax", weight)
