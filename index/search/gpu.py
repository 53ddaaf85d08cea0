"""Search an index on a GPU: one search at a time, no selectors, bounded depth.

FAISS's classic GPU backend is not safe for concurrent searches, not even of different indexes that share their
scratch memory; it ignores `IDSelector`; and it returns at most 2,048 results.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import faiss

from longtail.bundle.arrays import Float32, Int64
from longtail.index.errors import DeviceError

GPU_MAX_RESULTS = 2_048
"""Largest number of results, and of visited lists, of one search."""

# One lock for the process: GPU indexes share scratch memory, and `nprobe` is an attribute of the index.
_searching = threading.Lock()


def check_gpu() -> None:
    """Refuse an installation or a machine without a GPU for FAISS."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise DeviceError(
            f"device gpu: expected a GPU build of FAISS, found faiss {faiss.__version__} for CPUs; "
            "install the extra `gpu` in place of `index`"
        )
    if faiss.get_num_gpus() < 1:
        raise DeviceError("device gpu: expected at least one visible NVIDIA GPU, found none")


class GpuIndex:
    """Copy of a CPU index on the first visible GPU. Concurrent callers take turns."""

    def __init__(self, index: Any) -> None:
        try:
            with _searching, _plain_lists(index):
                self._index = faiss.index_cpu_to_gpu(_resources(), 0, index)
        except RuntimeError as error:
            raise DeviceError(
                f"device gpu: expected FAISS {faiss.__version__} to take an index of {index.ntotal:,} rows of "
                f"{index.d} coordinates, it answered: {' '.join(str(error).split())}"
            ) from error
        self._has_lists = hasattr(index, "nprobe")

    def search(self, queries_BE: Float32, fetch: int, nprobe: int) -> tuple[Float32, Int64]:
        """Get scores float32 [B, fetch], descending, and ids int64 [B, fetch]; −1 where there are fewer."""
        with _searching:
            if self._has_lists:
                self._index.nprobe = nprobe
            scores_BF, ids_BF = self._index.search(queries_BE, fetch)
        return scores_BF, ids_BF


@contextmanager
def _plain_lists(index: Any) -> Iterator[None]:
    """Replace the coded centroids of an inverted file by plain ones inside the block.

    FAISS cannot copy coded centroids to a GPU. The index must not be searched meanwhile.
    """
    lists = faiss.downcast_index(index.quantizer) if isinstance(index, faiss.IndexIVF) else None
    if not isinstance(lists, faiss.IndexRefine):
        yield
        return
    index.quantizer = lists.refine_index
    try:
        yield
    finally:
        index.quantizer = lists


@cache
def _resources() -> Any:
    """Create the process's scratch memory once; two releases share it while one replaces the other."""
    return faiss.StandardGpuResources()
