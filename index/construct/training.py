"""Train and fill a FAISS index over all labels, id i = row i, and rank the labels for its exact head.

Legend: `L` labels, `C` inverted lists, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.construct.recall import ROWS_AT_ONCE, Calibration, derived_dial_points
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import SpecError
from longtail.index.manifests import Device
from longtail.index.search.faiss_index import FaissIndex, Head, pad

_TRAINING_ROWS_PER_LIST = 64
"""k-means rows per list: enough for stable lists, and a million labels train in seconds."""
_COMPARED_EXACTLY = 4
"""Centroids that the codes preselect for every list wanted. Measured with 3,994 lists: the nearest list was right for
all of 50,000 rows, and of the nearest two 997 in a thousand were found."""


def by_reach(bundle: Bundle, rows_LE: Float32 | None, calibration: Calibration) -> Int64:
    """Sort label rows, int64 [L], by reach: labels that many queries may get come first.

    These are the most frequent labels; with priors, a label's rank is its best one among the order by frequency and the
    orders by the score that each dial point adds. `rows_LE` are augmented rows, float32 [L, E]; None: read from
    the bundle in parts.
    """
    by_popularity_L = np.argsort(-bundle.labels.log_pi, kind="stable")
    ranks = [by_popularity_L]
    # A bonus lifts a whole bucket alike, so it brings no label of the bucket nearer to the head.
    numbers = [number for number, prior in enumerate(bundle.priors.settings) if not prior.indicates]
    for point in dict.fromkeys([*calibration.dial_points, *derived_dial_points(bundle)]):
        if not any(point[2][number] for number in numbers):
            continue
        added_E = bundle.augmentation.queries(np.zeros((1, bundle.manifest.dim), np.float32), *point)[0]
        # A query with a zero vector scores only what the dials add, which is the same for every real query.
        lift_L = _products(bundle, rows_LE, added_E)
        if np.ptp(lift_L) > 0:
            ranks.append(np.argsort(-lift_L, kind="stable"))
    if len(ranks) == 1:
        return by_popularity_L
    best_L = np.full(len(by_popularity_L), len(by_popularity_L))
    for order_L in ranks:
        best_L[order_L] = np.minimum(best_L[order_L], np.arange(len(order_L)))
    return np.argsort(best_L, kind="stable")


def _products(bundle: Bundle, rows_LE: Float32 | None, query_E: Float32) -> Float32:
    if rows_LE is not None:
        return rows_LE @ query_E
    labels = len(bundle.embeddings)
    parts = range(0, labels, ROWS_AT_ONCE)
    return np.concatenate(
        [bundle.rows(np.arange(start, min(start + ROWS_AT_ONCE, labels))) @ query_E for start in parts]
    )


def head_of(rows_LE: Float32, rows_H: Int64) -> Head | None:
    """Create the exact head of label rows, int64 [H], keeping their order; None without rows."""
    return Head(rows_H, np.ascontiguousarray(rows_LE[rows_H])) if len(rows_H) else None


def make_index(
    spec: IndexSpec, rows_LE: Float32, device: Device, *, outside: Int64 | None = None, like: FaissIndex | None = None
) -> FaissIndex:
    """Train and fill the index of a spec with augmented rows, float32 [L, E]; without a head.

    Args:
        outside: rows to train with, int64: those outside the smallest head, whose log ν differs most; None: all.
        like: an index whose centroids the new one takes over; None: centroids are trained.
    """
    training_RE = rows_LE if outside is None else rows_LE[outside]
    centroids_CE = like.centroids[:, : rows_LE.shape[1]] if like is not None else None
    lists = None if centroids_CE is None else len(centroids_CE)
    factory, width = spec.factory(len(training_RE), rows_LE.shape[1], device, lists)
    index = train_index(factory, width, rows_LE, device, training_RE=training_RE, centroids_CE=centroids_CE)
    return FaissIndex(spec.kind(len(rows_LE)), factory, index)


def train_index(
    factory: str,
    width: int,
    rows_LE: Float32,
    device: Device,
    *,
    training_RE: Float32 | None = None,
    centroids_CE: Float32 | None = None,
) -> Any:
    """Train and fill a FAISS index, id i = row i of `rows_LE`, metric inner product; returns it on the CPU.

    Args:
        rows_LE: float32 [L, E], E <= width.
        training_RE: float32, rows to train with; None: all.
        centroids_CE: float32, centroids of an inverted file's lists; None: k-means finds them.
    """
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if isinstance(index, faiss.IndexIVF):
            index.cp.max_points_per_centroid = _TRAINING_ROWS_PER_LIST
            quantizer = faiss.downcast_index(index.quantizer)
            if isinstance(quantizer, faiss.IndexRefine):
                quantizer.k_factor = _COMPARED_EXACTLY
            # A quantiser that already holds its centroids makes FAISS skip k-means.
            if centroids_CE is not None:
                quantizer.train(pad(centroids_CE, width))
                quantizer.add(pad(centroids_CE, width))
        if device == "gpu":
            index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, index)
        rows_LE = pad(rows_LE, width)
        _train(index, rows_LE if training_RE is None else pad(training_RE, width))
        index.add(rows_LE)
        return faiss.index_gpu_to_cpu(index) if device == "gpu" else index
    except RuntimeError as error:
        raise SpecError(
            f"index {factory!r}: expected one that FAISS {faiss.__version__} builds on {device} for {len(rows_LE):,} "
            f"rows of {width} coordinates; it answered: {' '.join(str(error).split())}"
        ) from error


def bytes_per_label(index: FaissIndex) -> float:
    """Compute the size of an index's FAISS file, in bytes per label."""
    written = 0

    def count(block: bytes) -> int:
        nonlocal written
        written += len(block)
        return len(block)

    faiss.write_index(index.index, faiss.PyCallbackIOWriter(count))
    return round(written / index.labels, 2)


def _train(index: Any, rows_RE: Float32) -> None:
    """Train an index; where its centroids have codes, k-means also finds the nearest centroid by codes."""
    quantizer = faiss.downcast_index(index.quantizer) if isinstance(index, faiss.IndexIVF) else None
    if isinstance(quantizer, faiss.IndexRefine) and not quantizer.ntotal:
        nearest = faiss.clone_index(quantizer)
        index.clustering_index, index.cp.update_index = nearest, True
        index.train(rows_RE)
        index.clustering_index = None
        nearest.this.own(True)  # the assignment gave FAISS's wrapper ownership, but FAISS does not free it
    else:
        index.train(rows_RE)
