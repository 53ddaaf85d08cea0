"""Make one FAISS index: train on the rows, add the rows, on the CPU or on a GPU.

Legend: `L` rows, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32
from longtail.index.errors import DeviceError, SpecError
from longtail.index.manifest import Device

_TRAINING_ROWS_PER_CELL = 64
"""k-means sample: enough for stable cells, and a million labels train in seconds."""


def check_device(device: Device) -> None:
    """Refuse a device that this installation or machine lacks.

    Raises:
        DeviceError: names what is missing.
    """
    if device == "cpu":
        return
    if not hasattr(faiss, "StandardGpuResources"):
        raise DeviceError(
            f"device gpu: expected a GPU build of FAISS, found faiss {faiss.__version__} for CPUs; "
            "install the extra `gpu` in place of `index`"
        )
    if faiss.get_num_gpus() < 1:
        raise DeviceError("device gpu: expected at least one visible NVIDIA GPU, found none")


def train_index(factory: str, width: int, rows_LE: Float32, device: Device) -> Any:
    """A trained FAISS index on the CPU with id i = row i of `rows_LE`, metric inner product.

    Args:
        factory: FAISS factory string.
        width: coordinates the index takes; rows are padded with zeros up to it.
        rows_LE: float32 [L, E], E <= width.
        device: where to train and add; a GPU's index comes back to the CPU, which serves it.

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
        return _fill(index, pad(rows_LE, width), device)
    except RuntimeError as error:
        raise SpecError(
            f"index spec {factory!r}: expected auto, flat, ivf_flat, ivf_pq, hnsw or a factory string that FAISS "
            f"{faiss.__version__} builds on {device} for {len(rows_LE):,} rows of {width} coordinates; "
            f"it answered: {_reason(error)}"
        ) from error


def pad(rows_LE: Float32, width: int) -> Float32:
    """Contiguous float32 [L, width]: the rows, and zeros in the coordinates beyond them."""
    missing = width - rows_LE.shape[1]
    padded = np.pad(rows_LE, ((0, 0), (0, missing))) if missing else rows_LE
    return np.ascontiguousarray(padded, np.float32)


def _fill(index: Any, rows_LE: Float32, device: Device) -> Any:
    if device == "gpu":
        resources = faiss.StandardGpuResources()
        index = faiss.index_cpu_to_gpu(resources, 0, index)
    index.train(rows_LE)
    index.add(rows_LE)
    return faiss.index_gpu_to_cpu(index) if device == "gpu" else index


def _reason(error: RuntimeError) -> str:
    """FAISS's own sentence, without its C++ signature and source path."""
    return " ".join(str(error).split("Error: ", 1)[-1].split(" at /", 1)[-1].split())
