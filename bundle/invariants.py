"""What holds in every bundle [FORMAT.md], beyond files that are there and intact.

Legend: `L` labels, `D` embedding dimensions, `C` calibration queries.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.bundle.arrays import Float32
from longtail.bundle.errors import BundleInvariantError, require
from longtail.bundle.labels import Labels
from longtail.bundle.manifest import Manifest
from longtail.bundle.proposal import Proposal
from longtail.bundle.vocabulary import Vocabulary

UNIT_NORM_TOLERANCE = 1e-3
"""Distance from 1 of an embedding's norm, at most, where the similarity is cosine."""
_LOGSUMEXP_TOLERANCE = 1e-4


def check_invariants(
    manifest: Manifest,
    labels: Labels,
    embeddings: Float32,
    calibration_queries: Float32,
    vocabularies: Mapping[str, Vocabulary],
    proposal: Proposal | None,
) -> None:
    """Compare the parts of a bundle with one another, as `Bundle` names them.

    Args:
        manifest: what the others are compared with.
        labels: L rows.
        embeddings: float32 [L, D].
        calibration_queries: float32 [C, D].
        vocabularies: by name.
        proposal: the tree, or None.

    Raises:
        BundleInvariantError: names the invariant, what it expects and what was found.
    """
    shape = (manifest.labels, manifest.dim)
    require(
        "embeddings.npy is float32 [labels, dim]",
        embeddings.dtype == np.float32 and embeddings.shape == shape,
        f"float32 {shape}",
        f"{embeddings.dtype} {embeddings.shape}",
    )
    require(
        "calibration_queries.npy is float32 [C >= 1, dim]",
        calibration_queries.dtype == np.float32
        and calibration_queries.ndim == 2
        and len(calibration_queries) > 0
        and calibration_queries.shape[1] == manifest.dim,
        f"float32 (C, {manifest.dim})",
        f"{calibration_queries.dtype} {calibration_queries.shape}",
    )
    for name, array in (("embeddings.npy", embeddings), ("calibration_queries.npy", calibration_queries)):
        _require_finite(name, array)
        if manifest.similarity == "cosine":
            norms = np.sqrt(np.einsum("ij,ij->i", array, array))
            worst = int(np.abs(norms - 1).argmax())
            require(
                f"{name} has unit rows when similarity is cosine",
                bool(abs(norms[worst] - 1) <= UNIT_NORM_TOLERANCE),
                f"norm 1 ± {UNIT_NORM_TOLERANCE}",
                f"norm {norms[worst]:.6g} in row {worst}",
            )
    _check_labels(manifest, labels)
    require(
        "own_id names an id among the label features",
        manifest.own_id is None
        or any(feature.name == manifest.own_id and feature.kind == "id" for feature in manifest.label_features),
        [feature.name for feature in manifest.label_features if feature.kind == "id"],
        manifest.own_id,
    )
    names = {
        feature.vocabulary for feature in (*manifest.query_features, *manifest.label_features) if feature.vocabulary
    }
    require(
        "every feature's vocabulary is in vocabularies/",
        names <= set(vocabularies),
        sorted(names),
        sorted(vocabularies),
    )
    if proposal is not None:
        _check_proposal(manifest, labels, proposal, vocabularies)
    require(
        "display names the user's columns of labels.arrow",
        manifest.display == labels.display.column_names,
        manifest.display,
        labels.display.column_names,
    )


def _check_proposal(
    manifest: Manifest, labels: Labels, proposal: Proposal, vocabularies: Mapping[str, Vocabulary]
) -> None:
    proposal.validate(manifest.labels)
    rows = {
        feature.name: vocabularies[feature.vocabulary].rows if feature.vocabulary else feature.hash_rows or 1
        for feature in manifest.query_features
    }
    found = {name: len(projection) for name, projection in proposal.projection.items()}
    require(
        "proposal.npz projects query features, a row for each row of their tables",
        found.items() <= rows.items(),
        f"some of {rows}",
        found,
    )
    require(
        "a tree's dial does not go below 0, where no search finds the best labels",
        manifest.bias_removal.minimum >= 0,
        "bias_removal.minimum >= 0",
        manifest.bias_removal.minimum,
    )
    require(
        "log_pn is log π beside a tree, which itself is the noise",
        labels.log_popularity is None,
        "no column log_popularity",
        "one",
    )


def _check_labels(manifest: Manifest, labels: Labels) -> None:
    count = manifest.labels
    require("labels.arrow has a row per label", len(labels.ids) == count, f"{count} rows", f"{len(labels.ids)} rows")
    distinct = labels.lookup.distinct
    require("label ids are distinct", distinct == count, f"{count} distinct", f"{distinct} distinct")
    require("counts are >= 0", bool((labels.counts >= 0).all()), ">= 0", labels.counts.min())
    _require_distribution("log_pn", labels.log_pn)
    has_popularity = labels.log_popularity is not None
    require(
        "labels.arrow has a log_popularity column when kappa_popularity is set",
        has_popularity == (manifest.kappa_popularity is not None),
        manifest.kappa_popularity is not None,
        has_popularity,
    )
    if labels.log_popularity is not None:
        _require_distribution("log_popularity", labels.log_popularity)
    assigned = manifest.buckets.assign(labels.counts)
    wrong = np.flatnonzero(assigned != labels.buckets)
    require(
        "buckets follow the manifest's thresholds",
        wrong.size == 0,
        "the thresholds' bucket in every row",
        f"{wrong.size} rows that differ, the first {wrong[:1].tolist()}",
    )
    has_bias = labels.bias is not None
    require(
        "labels.arrow has a bias column when label_bias is set",
        has_bias == manifest.label_bias,
        manifest.label_bias,
        has_bias,
    )
    if labels.bias is not None:
        _require_finite("labels.arrow column bias", labels.bias)


def _require_distribution(name: str, log_p_L: Float32) -> None:
    _require_finite(f"labels.arrow column {name}", log_p_L)
    total = float(np.logaddexp.reduce(log_p_L.astype(np.float64)))
    require(
        f"{name} is a distribution (natural log)",
        abs(total) <= _LOGSUMEXP_TOLERANCE,
        f"logsumexp 0 ± {_LOGSUMEXP_TOLERANCE}",
        f"{total:.6g}",
    )


def _require_finite(name: str, array: Float32) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise BundleInvariantError(f"{name} is finite", expected="finite values", found=f"{array[row]} in row {row}")
