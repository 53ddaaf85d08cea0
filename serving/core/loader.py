"""Load a published release: create its retriever, answer a first query, and measure what it promises.

Legend: `B` calibration queries, `K` labels of a ranking, `N` of all rankings, `P` distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from longtail.bundle import Tower
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.histories import NO_ENTRY
from longtail.index import Filter, Release, Releases
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.queries import QueriesFor, RetrieveQuery
from longtail.serving.core.ranking import Batch, Boost
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import serving_errors
from longtail.serving.monitoring import CalibrationCandidates, Promises, measure_baseline

_BASELINE_K = 20
_CANDIDATES, _CANDIDATES_EVERY = 50, 0.5
"""Best labels of a query at λ this far apart: among all of them are the best 20 at any λ between."""


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
    # ONNX Runtime reads a tower from its file, so that no copy of its bytes stays in memory.
    release = releases.open(name, device=device, towers=False, state=state)
    filterable = release.manifest.filterable
    with serving_errors("queries"):
        retriever = _create_retriever(release, max_new_labels=max_new_labels, filterable=filterable)
        if release.queries is not None:  # before the first view, which later requests share
            retriever.query_index = _create_retriever(release.queries)
        retriever.promises = _measure_promises(retriever.view_at())
    if filterable:  # declared columns will be filtered by; others may never be
        retriever.catalogue.attributes.read_columns(filterable)
    # ONNX Runtime and FAISS allocate with their first call, which no client should wait for.
    _warm(retriever)
    if release.bundle.label_model is not None:
        retriever.overlay.load_tower()
    if retriever.engine is not None:
        retriever.engine.limit_time()
    return retriever


def _warm(retriever: Retriever) -> None:
    """Answer a query, so that lazy parts are loaded."""
    manifest, id_ = retriever.manifest, str(retriever.bundle.labels.ids[0].as_py())
    k, maximum = min(10, manifest.labels), manifest.bias_removal.maximum
    retriever.catalogue.row_of.find_all([id_])  # reads the stored order of ids
    retriever.retrieve(
        [
            RetrieveQuery(features=retriever.encoder.example(), k=k),
            # Features of nothing, the largest λ and a history take the other branches of an answer.
            RetrieveQuery(features={}, k=k, bias_removal=maximum, popularity=0.0, history=[id_]),
        ]
    )
    if retriever.query_index is not None:
        find_known_queries(retriever, [QueriesFor(id=id_)])


def _create_retriever(release: Release, **options: Any) -> Retriever:
    """Create the retriever of a release; that of an index of queries finds queries for vectors of labels."""
    bundle, manifest = release.bundle, release.bundle.manifest
    encoder = Tower(bundle.query_model, manifest.query_features, bundle.vocabularies, manifest.dim)
    return Retriever(
        name=release.name, created_at=release.manifest.created_at, bundle=bundle, searcher=release.searcher,
        encoder=encoder, **options,
    )  # fmt: skip


def _measure_promises(retriever: Retriever) -> Promises | None:
    """Measure the answers to the calibration queries, from the labels that are available now.

    None for a release with a tree p_n(y|x): calibration queries are embeddings, and the tree needs features.
    """
    bundle = retriever.bundle
    queries_BD, labels = bundle.calibration_queries, bundle.labels
    if bundle.proposal is not None or not len(queries_BD):
        return None
    manifest, queries = bundle.manifest, len(queries_BD)
    dial, popularity, k = manifest.bias_removal, manifest.popularity.default, min(_BASELINE_K, manifest.labels)
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
    bias_removal_B, popularity_B = (np.full(queries, weight, np.float32) for weight in (dial.default, popularity))
    priors_BP = np.tile(bundle.priors.defaults, (queries, 1))
    batch = Batch(queries_BD, {}, bias_removal_B, popularity_B, filters, k, priors_BP, boosts if any(boosts) else None)
    scores_BK, rows_BK = retriever.label_ranker.rank(batch)
    default = measure_baseline(scores_BK, rows_BK, labels.buckets, labels.counts, dial.default, k, popularity)
    if default is None:
        return None
    low, span = dial.minimum, dial.maximum - dial.minimum
    points = np.linspace(low, dial.maximum, 1 + int(np.ceil(span / _CANDIDATES_EVERY))) if span > 0 else [low]
    hits = [(dial.default, scores_BK, rows_BK)]
    for point in points:
        bias_removal_B = np.full(queries, point, np.float32)
        many = batch._replace(bias_removal_B=bias_removal_B, k=min(_CANDIDATES, manifest.labels))
        hits.append((point, *retriever.label_ranker.rank(many)))
    candidates = _join_candidates(hits, labels.log_pn, low, dial.maximum)
    return Promises(default, candidates, labels.buckets, labels.counts, is_complete=retriever.serves_nearly_all)


def _join_candidates(
    hits: Sequence[tuple[float, Float32, Int64]], log_pn_L: Float32, low: float, high: float
) -> CalibrationCandidates:
    """Join the labels found at several λ, with their scores at the smallest.

    Args:
        hits: λ, scores [B, K] and rows [B, K].
    """
    rows_BN = np.concatenate([rows_BK for _, _, rows_BK in hits], axis=1)
    # Scores are linear in λ, and their slope is log ν.
    shifted = [scores_BK + np.float32(low - point) * log_pn_L[rows_BK] for point, scores_BK, rows_BK in hits]
    scores_BN = np.concatenate(shifted, axis=1)
    firsts_B = [np.unique(rows_N, return_index=True)[1] for rows_N in rows_BN]
    shape = len(rows_BN), max(map(len, firsts_B))
    rows_BP, scores_BP = np.full(shape, NO_ENTRY, np.int64), np.full(shape, -np.inf, np.float32)
    for query, first_N in enumerate(firsts_B):
        rows_BP[query, : len(first_N)] = rows_BN[query, first_N]
        scores_BP[query, : len(first_N)] = scores_BN[query, first_N]
    return CalibrationCandidates(low, high, rows_BP, scores_BP, np.where(rows_BP >= 0, log_pn_L[rows_BP], 0))
