"""Vectors of labels that a bundle keeps, so that a query can give one by its label's id [FORMAT.md].

Legend: `L` labels.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.bundle.arrays import Float32
from longtail.bundle.errors import require
from longtail.bundle.manifest import Manifest

_ROWS_AT_ONCE = 1 << 14


def check_label_vectors(manifest: Manifest, vectors: Mapping[str, Float32]) -> None:
    """Compare the kept vectors with the features that read them.

    Args:
        manifest: whose query features name label features by `of_label`.
        vectors: float32 [L, dims] by label feature, NaN of a label without a vector.

    Raises:
        BundleInvariantError: names the invariant, what it expects and what was found.
    """
    of_labels = {feature.name: feature for feature in manifest.label_features if feature.kind == "vector"}
    readers = [feature for feature in manifest.query_features if feature.of_label is not None]
    for feature in readers:
        of_label = of_labels.get(str(feature.of_label))
        require(
            f"query feature {feature.name!r}: of_label names a vector among the label features, of as many dims",
            of_label is not None and of_label.dims == feature.dims,
            f"one of dims {feature.dims} of {sorted(of_labels) or 'none'}",
            str(feature.of_label) + ("" if of_label is None else f" of dims {of_label.dims}"),
        )
    twice = [feature.name for feature in manifest.label_features if feature.of_label is not None]
    require("of_label is of query features only", not twice, "query features", twice)
    names = {str(feature.of_label) for feature in readers}
    require(
        "label_vectors/ has a file for each label feature that of_label names, and no other",
        names == set(vectors),
        sorted(names),
        sorted(vectors),
    )
    for name in names:
        shape = manifest.labels, of_labels[name].dims
        require(
            f"label_vectors/{name}.npy is float32 [labels, dims]",
            vectors[name].dtype == np.float32 and vectors[name].shape == shape,
            f"float32 {shape}",
            f"{vectors[name].dtype} {vectors[name].shape}",
        )
        _check_rows(name, vectors[name])


def _check_rows(name: str, vectors_LD: Float32) -> None:
    for start in range(0, len(vectors_LD), _ROWS_AT_ONCE):
        part = vectors_LD[start : start + _ROWS_AT_ONCE]
        bad = ~np.isfinite(part).all(axis=1) & ~np.isnan(part).all(axis=1)
        require(
            f"label_vectors/{name}.npy is finite, or NaN in a whole row",
            not bad.any(),
            "finite values, or NaN",
            f"{part[bad.argmax()][:4]} in row {start + int(bad.argmax())}",
        )
