"""Make the bands of an index: which labels each holds, and a trained and filled FAISS index over their rows.

Legend: `L` labels, `N` labels of a band, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import faiss
import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.construct.recall import ROWS_AT_ONCE, Calibration
from longtail.index.construct.spec import CHOICES, IndexSpec
from longtail.index.errors import SpecError
from longtail.index.manifests import Device
from longtail.index.search.band import Band, pad
from longtail.index.search.cells import TOLD_CELLS, add_to_cells

_TRAINING_ROWS_PER_CELL = 64
"""k-means sample: enough for stable cells, and a million labels train in seconds."""
_COMPARED_EXACTLY = 4
"""Times as many centroids as cells are wanted that codes choose: of 3,994 cells the nearest was the nearest for 50,000
rows of 50,000, and of the nearest two 997 in a thousand were found."""


def by_reach(bundle: Bundle, rows_LE: Float32 | None, calibration: Calibration) -> Int64:
    """Label rows, those first that may be answered whatever the query, int64 [L].

    That is the most frequent ones, and with priors, in turn, those that each place on the dials lifts most.

    Args:
        bundle: whose labels are ordered.
        rows_LE: float32 [L, E], its augmented rows; None: read from it part by part.
        calibration: knows the places.
    """
    by_popularity_L = np.argsort(-bundle.labels.log_pi, kind="stable")
    if bundle.priors is None:
        return by_popularity_L
    ranks = [by_popularity_L]
    for place in calibration.places:
        added_E = bundle.augmentation.queries(np.zeros((1, bundle.manifest.dim), np.float32), *place)[0]
        lift_L = _products(bundle, rows_LE, added_E)
        if any(place[2]) and np.ptp(lift_L) > 0:
            ranks.append(np.argsort(-lift_L, kind="stable"))
    best_L = np.full(len(by_popularity_L), len(by_popularity_L))
    for order_L in ranks:
        best_L[order_L] = np.minimum(best_L[order_L], np.arange(len(order_L)))
    return np.argsort(best_L, kind="stable")


def _products(bundle: Bundle, rows_LE: Float32 | None, query_E: Float32) -> Float32:
    """The inner product of every row with a query, float32 [L]."""
    if rows_LE is not None:
        return rows_LE @ query_E
    labels = len(bundle.embeddings)
    parts = range(0, labels, ROWS_AT_ONCE)
    return np.concatenate(
        [bundle.rows(np.arange(start, min(start + ROWS_AT_ONCE, labels))) @ query_E for start in parts]
    )


@dataclass(frozen=True)
class KnownCells:
    """Cells that an inverted file over about the same rows has trained and filled.

    Attributes:
        centroids_CE: float32.
        of_labels_L: the cell of every label, int32; −1 of those of the head.
    """

    centroids_CE: Float32
    of_labels_L: Int32

    @classmethod
    def of(cls, bands: Sequence[Band], dim: int) -> Self | None:
        """Those of the last band, whose first `dim` coordinates are a row's; None of kinds without cells."""
        band = bands[-1]
        if not isinstance(band.index, faiss.IndexIVF):
            return None
        of_labels_L = np.full(sum(len(each.rows_N) for each in bands), -1, np.int32)
        of_labels_L[band.rows_N] = band.cells.of_ids
        return cls(band.index.quantizer.reconstruct_n(0, band.index.nlist)[:, :dim], of_labels_L)


def make_bands(
    spec: IndexSpec,
    rows_LE: Float32,
    by_reach_L: Int64,
    head: int,
    device: Device,
    known: KnownCells | None = None,
) -> list[Band]:
    """The exact head, if any, and the rest as the spec asks; label rows ascend within a band.

    Args:
        spec: kind of the rest.
        rows_LE: float32 [L, E], augmented rows.
        by_reach_L: int64 [L], label rows, those of the head first.
        head: how many they are.
        device: where FAISS trains.
        known: the cells of bands with a head that is not larger; None: they are trained.
    """
    labels = len(rows_LE)

    def band(name: str, spec: IndexSpec, rows_N: Int64, known: KnownCells | None = None) -> Band:
        cells = None if known is None else len(known.centroids_CE)
        factory, width = spec.factory(len(rows_N), rows_LE.shape[1], device, cells)
        kind = spec.kind(labels)
        centroids_CE = None if known is None else known.centroids_CE
        cells_N = known.of_labels_L[rows_N] if known is not None and kind in TOLD_CELLS else None
        index = train_index(factory, width, rows_LE[rows_N], device, centroids_CE, cells_N)
        return Band(name, kind, factory, index, rows_N)

    if not head:
        return [band("all", spec, np.arange(labels, dtype=np.int64))]
    # An approximate `auto` keeps its kind when its tail alone would be small enough for flat.
    tail_spec = IndexSpec(spec.kind(labels), spec.recall_floor)
    return [
        band("head", IndexSpec("flat"), np.sort(by_reach_L[:head])),
        band("tail", tail_spec, np.sort(by_reach_L[head:]), known),
    ]


def bytes_per_label(band: Band) -> float:
    """Bytes of the file that FAISS writes of a band's index, per label."""
    written = 0

    def count(block: bytes) -> int:
        nonlocal written
        written += len(block)
        return len(block)

    faiss.write_index(band.index, faiss.PyCallbackIOWriter(count))
    return round(written / len(band.rows_N), 2)


def train_index(
    factory: str,
    width: int,
    rows_LE: Float32,
    device: Device,
    centroids_CE: Float32 | None = None,
    cells_L: Int32 | None = None,
) -> Any:
    """A trained FAISS index on the CPU with id i = row i of `rows_LE`, metric inner product.

    Args:
        factory: FAISS factory string.
        width: coordinates the index takes; rows are padded with zeros up to it.
        rows_LE: float32 [L, E], E <= width.
        device: where to train and add; a GPU's index comes back to the CPU, which serves it.
        centroids_CE: float32, of an inverted file's cells; None: they are trained.
        cells_L: int32, the cell of every row, of kinds in `TOLD_CELLS`; None: the nearest.

    Raises:
        SpecError: FAISS refuses the string, the rows, or the device.
    """
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise SpecError(
                f"index spec {factory!r}: expected an index that searches by inner product, received another"
            )
        if isinstance(index, faiss.IndexIVF):
            index.cp.max_points_per_centroid = _TRAINING_ROWS_PER_CELL
            cells = faiss.downcast_index(index.quantizer)
            if isinstance(cells, faiss.IndexRefine):
                cells.k_factor = _COMPARED_EXACTLY
            if centroids_CE is not None:
                cells.train(pad(centroids_CE, width))
                cells.add(pad(centroids_CE, width))
        return _fill(index, pad(rows_LE, width), device, cells_L)
    except RuntimeError as error:
        raise SpecError(
            f"index spec {factory!r}: expected {CHOICES} that FAISS "
            f"{faiss.__version__} builds on {device} for {len(rows_LE):,} rows of {width} coordinates; "
            f"it answered: {_reason(error)}"
        ) from error


def _fill(index: Any, rows_LE: Float32, device: Device, cells_L: Int32 | None) -> Any:
    if device == "gpu":
        resources = faiss.StandardGpuResources()
        index = faiss.index_cpu_to_gpu(resources, 0, index)
    _train(index, rows_LE)
    if cells_L is None or device == "gpu":
        index.add(rows_LE)
    else:
        add_to_cells(index, rows_LE, cells_L)
    return faiss.index_gpu_to_cpu(index) if device == "gpu" else index


def _train(index: Any, rows_LE: Float32) -> None:
    """Train an index; where its centroids have codes, k-means looks for the nearest by codes too."""
    cells = faiss.downcast_index(index.quantizer) if isinstance(index, faiss.IndexIVF) else None
    if isinstance(cells, faiss.IndexRefine) and not cells.ntotal:
        nearest = faiss.clone_index(cells)
        index.clustering_index, index.cp.update_index = nearest, True
        index.train(rows_LE)
        index.clustering_index = None
        nearest.this.own(True)  # which FAISS had taken from Python, and would not free
    else:
        index.train(rows_LE)


def _reason(error: RuntimeError) -> str:
    """FAISS's own sentence, without its C++ signature and source path."""
    return " ".join(str(error).split("Error: ", 1)[-1].split(" at /", 1)[-1].split())
