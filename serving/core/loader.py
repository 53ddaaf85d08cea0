"""Load a published release: create its retriever, answer a first query, and measure what it promises.

Legend: `B` calibration queries, `P` candidate labels of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longtail.bundle import Tower
from longtail.bundle.arrays import Array, Int64
from longtail.bundle.histories import NO_ENTRY
from longtail.index import Filter, Release, Releases
from longtail.index.search.eligible import Eligible
from longtail.index.search.faiss_index import NEARLY_WHOLE
from longtail.serving.core import lifetimes
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.queries import QueriesFor, RetrieveQuery
from longtail.serving.core.ranking import Batch, Boost, Ranker
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import serving_errors
from longtail.serving.monitoring import CalibrationCandidates, Promises, measure_baseline

_BASELINE_K = 20
_CANDIDATES, _CANDIDATES_EVERY = 50, 0.5
"""Best labels of a query at places of λ this far apart: among all of them are the best 20 at any λ between."""


def load_release(
    releases: Releases,
    name: str,
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    max_new_labels: int = 0,
    state: Path | None = None,
) -> Retriever:
    """Open and verify a release, try it, and measure its promises.

    Raises BundleError, UnservableReleaseError, OSError or LongtailIndexError if the release cannot be served.
    """
    release = releases.open(name, device=device, towers=False, state=state)
    bundle, filterable = release.bundle, release.manifest.filterable
    lifetimes_L2 = bundle.labels.lifetimes
    mask_L = None if lifetimes_L2 is None else lifetimes.available(lifetimes_L2, lifetimes.now())
    available = None if mask_L is None else Eligible.from_mask(mask_L)
    with serving_errors("queries"):
        promises = _measure_promises(release, available)
        retriever = _retriever(release, promises=promises, max_new_labels=max_new_labels, filterable=filterable)
        if release.queries is not None:
            retriever.query_index = _retriever(release.queries)
    retriever.catalogue.attributes.read_columns(filterable or ())
    # ONNX Runtime and FAISS allocate with their first call, which no client should wait for.
    _warm(retriever)
    retriever.overlay.load_tower()
    if retriever.engine is not None:
        retriever.engine.limit_time()
    return retriever


def _warm(retriever: Retriever) -> None:
    """Answer a query, so that lazy parts are loaded."""
    manifest, id_ = retriever.manifest, retriever.catalogue.get_id(0)
    k, maximum = min(10, manifest.labels), manifest.bias_removal.maximum
    retriever.retrieve(
        [
            RetrieveQuery(features=retriever.encoder.example(), k=k, exclude=[""]),
            RetrieveQuery(features={}, k=k, bias_removal=maximum, popularity=0.0, history=[id_]),
        ]
    )
    if retriever.query_index is not None:
        find_known_queries(retriever, [QueriesFor(id=id_)])


def _retriever(release: Release, **options: Any) -> Retriever:
    """Create the retriever of a release; that of an index of queries finds queries for vectors of labels."""
    bundle, manifest = release.bundle, release.bundle.manifest
    encoder = Tower(bundle.query_model, manifest.query_features, bundle.vocabularies, manifest.dim)
    return Retriever(
        name=release.name, created_at=release.manifest.created_at, bundle=bundle, searcher=release.searcher,
        encoder=encoder, **options,
    )  # fmt: skip


def _measure_promises(release: Release, available: Eligible | None) -> Promises | None:
    """Measure the answers to the calibration queries.

    Labels that are not available now are in no answer, here as in the service.
    None for a release with a tree p_n(y|x): calibration queries are embeddings, and the tree needs features.
    """
    bundle = release.bundle
    queries_BD = bundle.calibration_queries
    if bundle.proposal is not None or not len(queries_BD):
        return None
    manifest, queries = bundle.manifest, len(queries_BD)
    k, bias_removal, popularity = (
        min(_BASELINE_K, manifest.labels), manifest.bias_removal.default, manifest.popularity.default,
    )  # fmt: skip
    bias_removal_B, popularity_B = (np.full(queries, weight, np.float32) for weight in (bias_removal, popularity))
    priors_BP = np.tile(bundle.priors.defaults, (queries, 1))
    filters: list[Filter | None] = [None] * queries
    if (seen_N2 := bundle.calibration_seen) is not None:
        # Answers leave a query's history out, which moves scores and shares: the baseline must do the same.
        ends = np.searchsorted(seen_N2[:, 0], np.arange(1, queries))
        filters = [Filter(exclude=rows.astype(np.int64)) for rows in np.split(seen_N2[:, 1], ends)]
    boosts: list[Boost | None] = []
    if bundle.cooccurrence is not None and bundle.calibration_histories is not None:
        weight = np.float32(bundle.cooccurrence.settings.default)
        for history_R in bundle.calibration_histories if weight else ():
            term = bundle.cooccurrence.term(history_R[history_R >= 0])
            boosts.append(Boost(term.rows_C, weight * term.values_C) if term.rows_C.size else None)
    batch = Batch(queries_BD, {}, bias_removal_B, popularity_B, filters, k, priors_BP, boosts if any(boosts) else None)
    searcher = release.searcher if available is None else release.searcher.restrict(available)
    ranker, labels = Ranker(searcher, bundle.augmentation), bundle.labels
    scores_BK, rows_BK = ranker.rank(batch)
    default = measure_baseline(scores_BK, rows_BK, labels.buckets, labels.counts, bias_removal, k, popularity)
    if default is None:
        return None
    low, high = manifest.bias_removal.minimum, manifest.bias_removal.maximum
    dial_points = np.linspace(low, high, 1 + int(np.ceil((high - low) / _CANDIDATES_EVERY))) if high > low else [low]
    many = batch._replace(k=min(_CANDIDATES, manifest.labels))
    rows_of_points = [rows_BK, *(ranker.rank(_set_bias_removal(many, bias_removal))[1] for bias_removal in dial_points)]
    rows_B = [np.unique(rows[rows >= 0]) for rows in np.concatenate(rows_of_points, axis=1)]
    is_complete = available is None or available.share >= NEARLY_WHOLE
    candidates = _candidates(ranker, batch, rows_B, low, high)
    return Promises(default, candidates, labels.buckets, labels.counts, is_complete=is_complete)


def _set_bias_removal(batch: Batch, bias_removal: float) -> Batch:
    return batch._replace(bias_removal_B=np.full_like(batch.bias_removal_B, bias_removal))


def _candidates(
    ranker: Ranker, batch: Batch, rows_B: Sequence[Int64], low: float, high: float
) -> CalibrationCandidates:
    """Score the candidates at both ends of λ."""
    shape, lengths_B = (len(rows_B), max(map(len, rows_B))), list(map(len, rows_B))
    inside_BP = np.arange(shape[1]) < np.array(lengths_B)[:, None]

    def padded(values_B: Sequence[Array], filler: float) -> Array:
        values_N = np.concatenate(values_B)
        table_BP = np.full(shape, filler, values_N.dtype)
        table_BP[inside_BP] = values_N
        return table_BP

    at_low_BP, at_high_BP = (
        padded(ranker.scores(_set_bias_removal(batch, end), rows_B), -np.inf) for end in (low, high)
    )
    slopes_BP = np.zeros_like(at_low_BP)
    np.subtract(at_high_BP, at_low_BP, out=slopes_BP, where=inside_BP)
    for query, boost in enumerate(batch.boosts_B or ()):
        if boost is not None:
            at_low_BP[query, : lengths_B[query]] += boost.get_values(rows_B[query])
    slopes_BP /= np.float32(max(high - low, 1e-6))
    return CalibrationCandidates(low, high, padded(rows_B, NO_ENTRY), at_low_BP, slopes_BP)
