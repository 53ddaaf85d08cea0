"""Export a TFRS model as a bundle.

Legend: `L` labels, `C` calibration queries, `D` dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import tensorflow as tf
import tensorflow_recommenders as tfrs

from longtail.bundle import BiasRemoval, Bundle, Loss, log_frequencies
from longtail.bundle.arrays import Int64
from longtail.bundle.store import refuse_existing
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.dial import Dial, Noise
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.export.tables import write_with_tables
from longtail.trainer.losses import Objective
from longtail.trainer.losses.implied_noise import implied_noise, name_noise
from longtail.trainer.tfrs.catalogue import Candidates, TfrsCatalogue, label_counts
from longtail.trainer.tfrs.columns import Ids, RawColumns
from longtail.trainer.tfrs.measure import BY_THE_CALLER, Validation, measure_dial
from longtail.trainer.tfrs.retrieval import SampledRetrieval
from longtail.trainer.tfrs.tower import export_tower


@dataclass(frozen=True, kw_only=True)
class TfrsOptions:
    """Facts of an export that have defaults.

    Attributes:
        feature: what a request calls the feature of a query model of one tensor.
        label_feature: what an upsert calls the feature of a candidate model of one tensor, the id.
        similarity: `cosine` if both models end in an L2 normalisation.
        display: columns of the labels to show in answers (title, …), L rows in the order of `candidates`.
        label_tower: exports the candidate model as well, so that labels can be added while serving; it needs other
            features than the id. None exports it if possible, and warns if a model of named features cannot be
            exported.
        validation: pairs to measure the curve of λ and μ on; promises of releases need one.
        evaluation: what to measure of them and what to choose the default λ by: keys of a recipe's `[evaluation]`, such
            as `{"ks": [20], "metric": "recall@20", "floor": {"tail": 0.02}}`.
        bias_removal: λ of requests that name none. By default chosen on `validation`; without that 0, though what
            undoes the training in theory is 1 for weight `unit` [METHODS §9].
        sampling_probability: calls of a plain `Retrieval` gave `candidate_sampling_probability`, which it does not
            remember. That is weight `relative`, after which λ has nothing to add back; without, weight `unit`,
            after which λ = 1 adds log π back [METHODS §9].
    """

    feature: str = "user_id"
    label_feature: str = "label_id"
    similarity: Literal["dot", "cosine"] = "dot"
    display: pa.Table | None = None
    label_tower: bool | None = None
    validation: Validation | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    bias_removal: float | None = None
    sampling_probability: bool = False


def export_tfrs(
    query_model: tf.keras.Model,
    candidate_model: Callable[[Any], Any],
    *,
    task: tfrs.tasks.Retrieval,
    candidates: Candidates | tf.data.Dataset,
    counts: Mapping[Any, int] | Int64,
    queries: Ids | Mapping[str, Any],
    out: Path,
    options: TfrsOptions = TfrsOptions(),
) -> Bundle:
    """Write a bundle that ranks at λ = 0 exactly like `tfrs` brute force.

    The towers are traced: StringLookup, IntegerLookup and TextVectorization layers that read the columns become the
    bundle's vocabularies; numbers go straight into the graph, Normalization and Discretization with them. The example
    queries, read by the service's encoder, must give the model's own embeddings through ONNX.

    Args:
        query_model: a Keras model of one tensor or of a dict of them.
        candidate_model: candidate features, in batches, to embeddings [batch, D].
        task: what the model was trained with: its temperature, and the loss, for the manifest and for the noise that
            λ adds back. That noise does not include negatives beyond the batch's.
        candidates: the catalogue, distinct ids: an array of ids that `candidate_model` takes as they are, a pair (ids,
            columns by name), or a dataset of ids or of pairs (id, features), batched or not.
        counts: training pairs per label, by id (a label that is not named has 0) or [L] in the order of `candidates`.
        queries: example queries, on which the ONNX tower is checked and index builds measure their recall: columns by
            name, or one column. A few hundred that were not trained on are best. A number's mean over them stands for
            a missing one.
        out: path of the bundle, which must not exist; its last part is the bundle's name.

    Raises:
        ExportError: a model that a bundle cannot express, or that computes something else in ONNX; candidates, counts,
            queries or validation pairs that do not fit it.
        DataError: no validation pair is left to find, or a metric over more labels than there are.
        BundleInvariantError: label ids that are not distinct, embeddings that are not finite or not of unit length.
        BundleExistsError: `out` exists.
    """
    refuse_existing(out)
    query = export_tower(query_model, RawColumns.read(queries, options.feature, "queries"), "query tower")
    catalogue = TfrsCatalogue.embed(candidate_model, candidates, options.label_feature)
    embeddings_LD, queries_CD = catalogue.embeddings, query.embeddings
    if embeddings_LD.shape[1:] != queries_CD.shape[1:]:
        raise ExportError(
            f"candidate model: expected embeddings of shape {queries_CD.shape[1:]}, the query model's, "
            f"found {embeddings_LD.shape[1:]}"
        )
    label, own_id = catalogue.tower(candidate_model, options.label_tower)
    # TFRS has no public name for it.
    temperature = 1.0 if task._temperature is None else float(task._temperature)
    loss, objective = _loss(task, sampling_probability=options.sampling_probability)
    counts_L = label_counts(catalogue.ids, counts)
    log_pi_L = log_frequencies(counts_L)
    log_nu_L = implied_noise(objective, log_pi_L, log_pi_L)
    has_own_noise = not np.array_equal(log_nu_L, log_pi_L)
    noise = Noise(name_noise(log_nu_L, log_pi_L), constant=bool(np.ptp(log_nu_L) == 0), separate_prior=has_own_noise)
    config = EvaluationConfig.model_validate(options.evaluation)
    buckets = define_buckets(config, counts_L)
    side = LabelSide.build(
        embeddings_LD, None, counts_L, training_queries=int(counts_L.sum()), temperature=temperature,
        log_pn=log_nu_L.astype(np.float32), buckets=buckets,
        log_popularity=log_pi_L.astype(np.float32) if has_own_noise else None,
    )  # fmt: skip
    reports = dict[str, bytes]()
    if options.validation is None:
        why = f"{BY_THE_CALLER}; nothing was measured"
        dial = Dial(BiasRemoval(default=options.bias_removal or 0.0, noise=noise.name, chosen_by=why))
    else:
        dial, reports = measure_dial(
            options.validation, query, catalogue.ids, side, noise, config, bias_removal=options.bias_removal
        )
    about = {
        "name": out.name, "similarity": options.similarity, "temperature": temperature, "loss": loss,
        "buckets": buckets, "bias_removal": dial.bias_removal, "popularity": dial.popularity, "bonus": dict(dial.bonus),
        "training_data": {"pairs": int(counts_L.sum())},
        "software": {name: version(name) for name in ("tensorflow", "tf-keras", "tensorflow-recommenders")},
    }  # fmt: skip
    bundle = Bundle.assemble(
        side.labels(catalogue.ids, pa.table({}) if options.display is None else options.display),
        embeddings_LD,
        # All labels tie for a query of zeros, which says nothing of an index's recall.
        queries_CD[np.linalg.norm(queries_CD, axis=1) > 0],
        query.onnx_tower(),
        None if label is None else label.onnx_tower(own_id),
        about,
        reports=reports,
    )
    return write_with_tables(bundle, out)


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
