"""Train and fill a FAISS index, id i = row i; order labels by highest score.

Legend: `L` labels, `C` inverted lists, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.augment import SPREAD
from longtail.index.errors import SpecError
from longtail.index.manifests import Device
from longtail.index.recall import ROWS_AT_ONCE, Calibration, derived_dial_points
from longtail.index.search.faiss_index import FaissIndex, pad
from longtail.index.spec import IndexSpec, choose_list_count, choose_quantizer

_TRAINING_ROWS_PER_LIST = 64
"""k-means rows per list: enough for stable lists, and a million labels train in seconds."""
_ITERATIONS = 10
_HEAD, _HEAD_SHARE = 1_000, 0.1
"""Number and largest share of the highest scored labels, which have lists of their own."""
ROWS_PER_HEAD_LIST = 100
_COMPARED_EXACTLY = 4
"""Centroids that the codes preselect for every list to find. Measured with 3,994 lists: the nearest list was right for
all of 50,000 rows, and of the nearest two 997 in a thousand were found."""


def order_by_max_score(bundle: Bundle, rows_LE: Float32 | None, calibration: Calibration) -> Int64:
    """Order label rows, int64 [L], by the highest score that the dials may add.

    The most frequent labels come first; with priors, a label's rank is its best one in the order by frequency and the
    orders by the score that each dial point adds. `rows_LE` are augmented rows, float32 [L, E]; None: read from the
    bundle in parts.
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


def make_index(
    spec: IndexSpec, bundle: Bundle, rows_LE: Float32, calibration: Calibration, *, like: FaissIndex | None = None
) -> FaissIndex:
    """Train and fill the index of a spec with augmented rows, float32 [L, E].

    The highest scored labels, the head, have lists of their own: log ν and log π lift them far above the centroids of
    lists with all kinds of labels, and with a large λ a query would not visit those.

    Args:
        like: an index whose centroids the new one takes over; None: centroids are trained.
    """
    (labels, dim), device = rows_LE.shape, spec.device
    kind = spec.kind(labels)
    if kind == "flat":
        return FaissIndex(kind, "Flat", train_index("Flat", dim, rows_LE, device))
    if like is None:
        # Lists are too few to split by direction and by the added coordinates, so k-means treats all coordinates alike.
        scales_E = np.ones(dim, np.float32)
        scales_E[dim - bundle.augmentation.extra_dims :] = SPREAD
        head_lists, head = 0, min(_HEAD, int(_HEAD_SHARE * labels))
        scaled_LE = rows_LE[order_by_max_score(bundle, rows_LE, calibration)] / scales_E
        centroids = [cluster(scaled_LE[head:], choose_list_count(labels - head), device)]
        if head:
            head_lists = max(1, head // ROWS_PER_HEAD_LIST)
            centroids.append(cluster(scaled_LE[:head], head_lists, device))
        centroids_CE = np.concatenate(centroids) * scales_E
    else:
        centroids_CE, head_lists = like.centroids[:, :dim], like.head_lists
    factory, width = spec.factory(labels, dim, len(centroids_CE))
    index = train_index(factory, width, rows_LE, device, centroids_CE=centroids_CE)
    return FaissIndex(kind, factory, index, head_lists=head_lists)


def cluster(rows_RE: Float32, lists: int, device: Device) -> Float32:
    """Find the centroids of lists, float32 [lists, E], by k-means over a sample of rows."""
    nearest = _quantizer(lists, rows_RE.shape[1], device)
    clustering = faiss.Clustering(rows_RE.shape[1], lists)
    # FAISS warns below the minimum, and small catalogues have few rows for each list.
    clustering.niter, clustering.min_points_per_centroid = _ITERATIONS, 1
    clustering.max_points_per_centroid = _TRAINING_ROWS_PER_LIST
    clustering.update_index = not nearest.is_trained  # codes follow the centroids
    clustering.train(rows_RE, nearest)
    centroids_CE: Float32 = faiss.vector_to_array(clustering.centroids).reshape(lists, -1)
    return centroids_CE


def train_index(
    factory: str, width: int, rows_LE: Float32, device: Device, *, centroids_CE: Float32 | None = None
) -> Any:
    """Train and fill an inner-product FAISS index, id i = row i of `rows_LE`; returns it on the CPU.

    A row goes to the list of the nearest centroid by distance: by inner product, as FAISS assigns rows, lists of long
    centroids would draw rows of every kind.

    Args:
        rows_LE: float32 [L, E], E <= width.
        centroids_CE: float32, centroids of an inverted file's lists; None: k-means finds them.
    """
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if not isinstance(index, faiss.IndexIVF):
            index.add(rows_LE)
            return index
        rows_LE = pad(rows_LE, width)
        if centroids_CE is None:
            centroids_CE = cluster(rows_LE, index.nlist, device)
        centroids_CE = pad(centroids_CE, width)
        lists, nearest = faiss.downcast_index(index.quantizer), _quantizer(index.nlist, width, device)
        if isinstance(lists, faiss.IndexRefine):
            lists.k_factor = _COMPARED_EXACTLY
        # A quantiser that already holds its centroids makes FAISS skip k-means.
        for quantizer in (lists, nearest):
            quantizer.train(centroids_CE)
            quantizer.add(centroids_CE)
        index.quantizer = nearest
        index.train(rows_LE)
        index.add(rows_LE)
        index.quantizer = lists
        nearest.this.own(True)  # the assignment gave FAISS's wrapper ownership, but FAISS does not free it
        return index
    except RuntimeError as error:
        raise SpecError(
            f"index {factory!r}: expected one that FAISS {faiss.__version__} builds on {device} for {len(rows_LE):,} "
            f"rows of {width} coordinates; it answered: {' '.join(str(error).split())}"
        ) from error


def _quantizer(lists: int, width: int, device: Device) -> Any:
    """Create an empty index of centroids by distance, on the build's device."""
    quantizer = faiss.index_factory(width, choose_quantizer(lists, width, device), faiss.METRIC_L2)
    if isinstance(quantizer, faiss.IndexRefine):
        quantizer.k_factor = _COMPARED_EXACTLY
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, quantizer) if device == "gpu" else quantizer


def bytes_per_label(index: FaissIndex) -> float:
    """Compute the size of an index's FAISS file, in bytes per label."""
    written = 0

    def count(block: bytes) -> int:
        nonlocal written
        written += len(block)
        return len(block)

    faiss.write_index(index.index, faiss.PyCallbackIOWriter(count))
    return round(written / index.labels, 2)
