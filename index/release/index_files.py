"""Write and read the files of index/: a FAISS index and priors.

Legend: `L` labels.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from longtail.bundle import Bundle, BundleCorruptError, Priors
from longtail.bundle.arrays import Array, Int32
from longtail.bundle.mapped_table import read_table
from longtail.index.errors import ReleaseCorruptError, SpecError
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.search.faiss_index import ON_GPU, FaissIndex
from longtail.index.search.gpu import GpuIndex

INDEX = "index"
PRIORS = f"{INDEX}/priors.npy"
FAISS_FILE, LISTS = f"{INDEX}/index.faiss", f"{INDEX}/lists.npy"

_DERIVED_BYTES = 1 << 31
"""FAISS's own bound on the tables that it computes from an index while reading it."""
_MAP: int = getattr(faiss, "IO_FLAG_MMAP_IFC", 0)
"""Flag that maps an index file: nearly every kind then stays in the page cache and searches as fast as a copy in
memory. `IO_FLAG_MMAP` maps only inverted lists, and searches them at a third of the speed. FAISS 1.15 reads the blocked
lists of `ivf_fastscan` into the process's memory with either flag. A FAISS without this flag reads a copy."""

# FAISS's deserialisation limits are globals of the process, so only one thread may read an index.
_reading = threading.Lock()


def write_index(root: Path, index: FaissIndex | None, priors: Priors) -> None:
    """Write `root/index/`; raises SpecError."""
    (root / INDEX).mkdir()
    if index is not None:
        try:
            # A Python file reports a full disk; FAISS's own writer ignores an error at close.
            with (root / FAISS_FILE).open("wb") as file:
                faiss.write_index(index.index, faiss.PyCallbackIOWriter(file.write))
        except RuntimeError as error:
            raise SpecError(f"{FAISS_FILE}: expected an index that FAISS can write to a file, found {error}") from error
        if index.has_lists:
            np.save(root / LISTS, index.lists, allow_pickle=False)
    np.save(root / PRIORS, priors.values_LP, allow_pickle=False)


def read_index(
    root: Path, manifest: ReleaseManifest, bundle: Bundle, *, device: Device = "cpu", mapped: bool = True
) -> FaissIndex:
    """Open the index of a release whose files were verified; `mapped`: share its pages with other processes.

    Deleted files stay readable while they are mapped; files must never be overwritten in place.
    """
    labels, dim = bundle.embeddings.shape[0], bundle.embeddings.shape[1] + bundle.augmentation.extra_dims
    # FAISS 1.15 copies the blocks of `ivf_fastscan` anyway, and page faults would read them from disk one by one.
    maps = mapped and manifest.kind != "ivf_fastscan"
    index = _read_faiss(root / FAISS_FILE, labels, mapped=maps)
    if index.ntotal != labels or index.d < dim or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ReleaseCorruptError(
            f"{root / FAISS_FILE}: expected {labels} rows of at least {dim} coordinates under the inner product, "
            f"found {index.ntotal} of {index.d} (metric {index.metric_type})"
        )
    return FaissIndex(
        manifest.kind,
        str(manifest.factory),
        index,
        _read_lists(root / LISTS, labels, index.nlist) if manifest.kind != "flat" else None,
        GpuIndex(index) if device == "gpu" and manifest.kind in ON_GPU else None,
        manifest.head_lists,
    )


def read_priors(root: Path, manifest: ReleaseManifest, *, verify: bool = True) -> Priors:
    """Map the priors of a release; `verify` checks every value. Raises ReleaseCorruptError."""
    if not manifest.priors:
        return Priors()
    # A plain array, because every operation on a `memmap` takes microseconds more.
    values_LP = np.asarray(_map_array(root / PRIORS))
    expected = (manifest.labels, len(manifest.priors))
    finite = not verify or bool(np.isfinite(values_LP).all())
    if values_LP.dtype != np.float32 or values_LP.shape != expected or not finite:
        raise ReleaseCorruptError(
            f"{root / PRIORS}: expected finite float32 {list(expected)}, "
            f"found {values_LP.dtype} {list(values_LP.shape)}"
        )
    return Priors(tuple(manifest.priors), values_LP)


def _read_faiss(path: Path, labels: int, *, mapped: bool) -> Any:
    """Read a FAISS index under memory limits that follow from its file size.

    So a crafted file cannot exhaust memory. FAISS's mapping reader (1.15) does not detect every truncated file, and may
    read beyond the end: map only files whose checksum was verified, and let the copying reader check a release before
    it is published.
    """
    with _reading:
        bounded = hasattr(faiss, "set_deserialization_vector_byte_limit")
        if bounded:
            before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
            # FAISS compares a vector's number of elements, not bytes, with a quarter of its byte limit.
            faiss.set_deserialization_vector_byte_limit(4 * (path.stat().st_size + 1) + _DERIVED_BYTES)
            faiss.set_deserialization_loop_limit(max(labels, 1 << 16))
        try:
            return faiss.read_index(str(path), _MAP if mapped else 0)
        except RuntimeError as error:
            raise ReleaseCorruptError(f"{path}: FAISS {faiss.__version__} cannot read this index: {error}") from error
        finally:
            if bounded:
                faiss.set_deserialization_vector_byte_limit(before[0])
                faiss.set_deserialization_loop_limit(before[1])


def _map_array(path: Path) -> Array:
    """Map a NumPy array; raises ReleaseCorruptError."""
    try:
        return read_table(path)
    except BundleCorruptError as error:
        raise ReleaseCorruptError(str(error)) from error


def _read_lists(path: Path, labels: int, lists: int) -> Int32:
    """Map the inverted list of every label, int32 [L]; raises ReleaseCorruptError."""
    lists_L: Int32 = np.asarray(_map_array(path))
    fits = lists_L.dtype == np.int32 and lists_L.shape == (labels,)
    if not fits or lists_L.min() < 0 or lists_L.max() >= lists:
        raise ReleaseCorruptError(
            f"{path}: expected int32 [{labels}] of 0..{lists - 1}, found {lists_L.dtype} {list(lists_L.shape)}"
        )
    return lists_L
