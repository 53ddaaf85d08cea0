"""Principal components of the query tower's inputs: `z = PCA_k(x)`, the input of the tree p_n(y|x) [BM20 §3].

Legend: `n` rows of the design matrix, `C` columns of the design matrix (one per row of every feature's table), `B`
queries, `K` components, `W` directions of the iteration.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy import sparse  # type: ignore[import-untyped]

from longtail.bundle import Inputs
from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.trainer.errors import DataError


class QueryFeature(Protocol):
    """Define the properties of a query feature that the tree reads, such as a `config.FeatureConfig`."""

    @property
    def name(self) -> str:
        """Return the feature's name among the tower's inputs."""

    @property
    def kind(self) -> str:
        """Return the kind: `id`, `history`, `bag`, `text` or `number`."""

    @property
    def table_name(self) -> str:
        """Return the name of the feature's vocabulary."""

    @property
    def hash_rows(self) -> int:
        """Return the number of rows of a `text` feature's table."""


_NO_VARIANCE = 1e-6
"""Components with less than this share of the first component's variance are noise, and become 0."""
_SPARE, _POWERS = 16, 10
"""Oversampling and number of power iterations of the randomised eigensolver."""


def fit_projection(
    features: Sequence[QueryFeature], blocks: Iterable[Inputs], rows: Mapping[str, int], dims: int
) -> tuple[dict[str, Float32], Float32]:
    """Fit the first principal components of encoded queries, in the form of `bundle.Proposal`.

    A query is one row of a sparse matrix: 1 at its id, the sum of weights at each entry of a bag, history or text, and
    a number in units of its standard deviation. All components are divided by the standard deviation of the first
    component, which then has variance 1; ratios of variances do not change. The largest entry of a component is
    positive. If the data have fewer than K directions, the remaining components are 0.

    Args:
        rows: number of rows of each feature's table, by feature name; numbers need none.

    Returns:
        projection float32 [rows, K] by feature name ([1, K] for a number, to multiply the raw value), and
        offset float32 [K].
    """
    if not features:
        raise DataError("adversarial sampler: expected a query feature to project, found none")
    widths = [1 if feature.kind == "number" else rows[feature.name] for feature in features]
    starts = np.cumsum([0, *widths])
    parts = [
        sparse.hstack([_columns(feature, inputs, width) for feature, width in zip(features, widths, strict=True)])
        for inputs in blocks
    ]
    if not parts:
        raise DataError("adversarial sampler: expected training pairs, found none")
    matrix = sparse.vstack(parts, format="csc", dtype=np.float64)
    shift_C, scale_C = np.zeros(matrix.shape[1]), np.ones(matrix.shape[1])
    for feature, start in zip(features, starts, strict=False):
        if feature.kind == "number":
            # Zeros of numbers are stored, so these are the values of all queries.
            values = matrix.data[matrix.indptr[start] : matrix.indptr[start + 1]]
            shift_C[start], scale_C[start] = values.mean(), values.std() or 1.0
            values -= shift_C[start]
            values /= scale_C[start]
    mean_C = np.asarray(matrix.mean(axis=0)).ravel()
    components_CK = _components(matrix.tocsr(), mean_C, dims)
    projection_CK = components_CK / scale_C[:, None]
    offset_K = -(mean_C @ components_CK) - shift_C @ projection_CK
    return {
        feature.name: projection_CK[start : start + width].astype(np.float32)
        for feature, start, width in zip(features, starts, widths, strict=False)
    }, offset_K.astype(np.float32)


def _columns(feature: QueryFeature, inputs: Inputs, width: int) -> Any:
    """Build one feature's part of the design matrix, sparse [B, width]; numbers are stored even if 0."""
    values = inputs[feature.name]
    queries = np.arange(len(values))
    if feature.kind == "number":
        return _sparse(feature, values, queries, np.zeros(len(values), np.int64), (len(values), 1))
    if feature.kind == "id":
        return _sparse(feature, np.ones(len(values)), queries, values, (len(values), width))
    weights = inputs[f"{feature.name}__weight"]
    inside = weights != 0
    queries = np.broadcast_to(queries[:, None], values.shape)[inside]
    return _sparse(feature, weights[inside], queries, values[inside], (len(values), width))


def _sparse(
    feature: QueryFeature,
    values: npt.NDArray[Any],
    queries: Int64,
    columns: npt.NDArray[Any],
    shape: tuple[int, int],
) -> Any:
    finite = np.isfinite(values)
    if not finite.all():
        raise DataError(
            f"adversarial sampler: feature {feature.name!r} ({feature.kind}): expected finite values, "
            f"found {values[~finite][0]}"
        )
    return sparse.csr_array((values.astype(np.float64), (queries, columns)), shape=shape)


def _components(matrix: Any, mean_C: Float64, dims: int) -> Float64:
    """Compute principal directions, divided by the first standard deviation, float64 [C, dims]."""
    queries, columns = matrix.shape
    components_CK = np.zeros((columns, dims))
    # Equal queries have no direction, and rounding errors would pass for some.
    if matrix.power(2).sum() / queries - mean_C @ mean_C <= _NO_VARIANCE * (mean_C @ mean_C):
        return components_CK
    # Randomised subspace iteration: the sparse matrix is never centred, the mean is subtracted from products instead.
    basis_CW = np.random.default_rng(0).standard_normal((columns, min(dims + _SPARE, queries, columns)))
    for _ in range(_POWERS):
        seen_nW = matrix @ basis_CW - mean_C @ basis_CW
        basis_CW, _ = np.linalg.qr(matrix.T @ seen_nW - np.outer(mean_C, seen_nW.sum(axis=0)))
    seen_nW = matrix @ basis_CW - mean_C @ basis_CW
    variance_W, turn_WW = np.linalg.eigh(seen_nW.T @ seen_nW / queries)
    best = np.argsort(-variance_W, kind="stable")[:dims]
    best = best[variance_W[best] > _NO_VARIANCE * variance_W[-1]]
    directions_CK = basis_CW @ turn_WW[:, best]
    largest_1K = np.take_along_axis(directions_CK, np.abs(directions_CK).argmax(axis=0)[None], axis=0)
    components_CK[:, : len(best)] = directions_CK * np.sign(largest_1K) / np.sqrt(variance_W[-1])
    return components_CK
