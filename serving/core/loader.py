"""Load a published release: create its retriever, answer a first query, and measure the baseline for drift."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from longtail.bundle import Tower
from longtail.index import Filter, Release, Releases
from longtail.serving.core.ranking import Batch, Boost, BoostingRanker, IndexRanker
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import serving_errors
from longtail.serving.monitoring import Baseline, measure_baseline

_BASELINE_K = 20


def load_release(
    releases: Releases,
    name: str,
    *,
    device: Literal["cpu", "gpu"] = "cpu",
    max_new_labels: int = 0,
    state: Path | None = None,
) -> Retriever:
    """Open and verify a release, answer a first query, and measure the baseline.

    Raises BundleError, UnservableReleaseError, OSError or LongtailIndexError if the release cannot be served.
    """
    release = releases.open(name, device=device, towers=False, state=state)
    bundle, manifest, filterable = release.bundle, release.bundle.manifest, release.manifest.filterable
    with release.searcher.patience():
        with serving_errors("queries"):
            encoder = Tower(bundle.query_model, manifest.query_features, bundle.vocabularies, manifest.dim)
        retriever = Retriever(
            name=release.name,
            created_at=release.manifest.created_at,
            bundle=bundle,
            searcher=release.searcher,
            encoder=encoder,
            baseline=_measure_baseline_of(release),
            max_new_labels=max_new_labels,
            filterable=filterable,
        )
        retriever.catalogue.attributes.read_columns(filterable or ())
        retriever.warm()
        retriever.overlay.load_tower()
        return retriever


def _measure_baseline_of(release: Release) -> Baseline | None:
    """Measure the baseline: answers to the calibration queries at the default λ, μ and ω.

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
    priors_BP = None if bundle.priors is None else np.tile(bundle.priors.defaults, (queries, 1))
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
    batch = Batch(queries_BD, {}, bias_removal_B, popularity_B, filters, k, priors_BP, boosts or None)
    scores_BK, rows_BK = BoostingRanker(IndexRanker(release.searcher, bundle.augmentation)).rank(batch)
    labels = bundle.labels
    return measure_baseline(scores_BK, rows_BK, labels.buckets, labels.counts, bias_removal, k, popularity)
