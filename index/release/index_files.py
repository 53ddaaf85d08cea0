"""The files of an index/: one FAISS index and one array of label rows per band, the bundle's tables, and manifest.json.

Legend: `N` labels of a band, `L` labels.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
from pydantic import BaseModel

from longtail.bundle import Bundle, FileRecord, MappedTables, Priors, sha256_of
from longtail.bundle.arrays import Array, Float32, Int32, Int64
from longtail.bundle.integrity import read_versioned_json
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.tuning import TunedIndex
from longtail.index.errors import ReleaseCorruptError, ReleaseVersionError, SpecError
from longtail.index.manifests import SCHEMA_VERSION, BandRecord, Device, IndexManifest
from longtail.index.search.band import ON_GPU, Band
from longtail.index.search.eligible import positions_of
from longtail.index.search.gpu import GpuIndex

INDEX = "index"
INDEX_MANIFEST = f"{INDEX}/manifest.json"
PRIORS = f"{INDEX}/priors.npy"
POSITIONS = f"{INDEX}/positions.npy"

_Manifest = TypeVar("_Manifest", bound=BaseModel)
_DERIVED_BYTES = 1 << 31
"""FAISS's own bound on the tables it computes from an index while reading it."""
_MAP: int = getattr(faiss, "IO_FLAG_MMAP_IFC", 0)
"""Nearly every kind of index then stays in the page cache, and searches as fast as a copy of it; `IO_FLAG_MMAP` maps
inverted lists alone, and searches them at a third of the speed. The lists of `ivf_fastscan`, which lie in blocks, are
read into memory of the process by either (1.15). A FAISS without the flag reads a copy."""

_reading = threading.Lock()


def write_index(
    root: Path,
    tuned: TunedIndex,
    *,
    spec: IndexSpec,
    bundle: Bundle,
    bundle_sha256: str,
    device: Device,
    filterable: Sequence[str] | None = None,
) -> tuple[IndexManifest, dict[str, FileRecord]]:
    """Write `root/index/`; returns its manifest and the record of every file, by path below `root`.

    Raises:
        SpecError: an index that a factory string can build but FAISS cannot write.
        OSError: the disk is full or not writable.
    """
    (root / INDEX).mkdir()
    files: dict[str, FileRecord] = {}
    bands = []
    for band in tuned.bands:
        record = BandRecord(
            name=band.name,
            kind=band.kind,
            factory=band.factory,
            labels=len(band.rows_N),
            index_file=f"{INDEX}/{band.name}.faiss",
            rows_file=f"{INDEX}/{band.name}.rows.npy",
            cells_file=f"{INDEX}/{band.name}.cells.npy" if band.has_cells else None,
            vectors_file=f"{INDEX}/{band.name}.vectors.npy" if band.kind == "flat" and len(tuned.bands) > 1 else None,
        )
        bands.append(record)
        files[record.index_file] = _write_faiss(root / record.index_file, band.index)
        files[record.rows_file] = _write_array(root / record.rows_file, band.rows_N)
        if record.cells_file is not None:
            files[record.cells_file] = _write_array(root / record.cells_file, band.cells.of_ids)
        if record.vectors_file is not None:
            files[record.vectors_file] = _write_array(root / record.vectors_file, band.vectors)
    if tuned.bands:
        files[POSITIONS] = _write_array(root / POSITIONS, positions_of([band.rows_N for band in tuned.bands]))
    priors = bundle.priors
    if priors is not None:
        files[PRIORS] = _write_array(root / PRIORS, priors.values_LP)
    for name in MappedTables.write(root / INDEX, bundle.labels, bundle.vocabularies).names:
        file = root / INDEX / name
        files[f"{INDEX}/{name}"] = FileRecord(sha256=sha256_of(file), bytes=file.stat().st_size)
    manifest = IndexManifest(
        bundle_sha256=bundle_sha256,
        spec=spec.text,
        kind=tuned.kind,
        labels=len(bundle.embeddings),
        dim=tuned.dim,
        priors=[] if priors is None else list(priors.settings),
        bands=bands,
        collection=tuned.collection,
        positions_file=POSITIONS if bands else None,
        effort=tuned.chosen.effort,
        efforts=tuned.efforts,
        recall_k=tuned.recall_k,
        recall_queries=tuned.recall_queries,
        recall_floor=spec.recall_floor,
        bytes_per_label=tuned.bytes_per_label,
        bytes_per_label_limit=spec.bytes_per_label,
        kinds=tuned.kinds,
        curve=tuned.curve,
        recall=tuned.recall,
        trials=tuned.trials,
        device=device,
        build_seconds=round(tuned.seconds, 2),
        faiss=faiss.__version__,
        filtered=tuned.filtered,
        partition=tuned.partition,
        filterable=None if filterable is None else list(filterable),
    )
    files[INDEX_MANIFEST] = write_file(root / INDEX_MANIFEST, manifest_bytes(manifest))
    return manifest, files


def read_bands(
    root: Path, manifest: IndexManifest, bundle: Bundle, *, device: Device = "cpu", mapped: bool = True
) -> list[Band]:
    """The bands of an index whose files were verified.

    Args:
        root: the release.
        manifest: the manifest of the release's index.
        bundle: the bundle of the release.
        device: on `gpu` flat and IVF bands are copied to the GPU; HNSW and factory strings stay on the CPU.
        mapped: share the files' pages with every process that opens them so. Files that are deleted meanwhile stay
            readable; they must never be written again in place.

    Raises:
        ReleaseCorruptError: bands that do not cover the bundle's labels once each, or FAISS cannot read one.
        DeviceError: FAISS cannot move a band to the GPU.
    """
    dim = bundle.embeddings.shape[1] + bundle.augmentation.extra_dims
    bands = []
    seen_L = np.zeros(manifest.labels, np.bool_)
    for record in manifest.bands:
        rows_N = _read_rows(root / record.rows_file, manifest.labels)
        # FAISS (1.15) copies the blocks of `ivf_fastscan`: from mapped pages a disk gives them one by one.
        maps = mapped and record.kind != "ivf_fastscan"
        index = _read_faiss(root / record.index_file, manifest.labels, mapped=maps)
        if index.ntotal != len(rows_N) or index.d < dim or index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise ReleaseCorruptError(
                f"{root / record.index_file}: expected {len(rows_N)} rows of at least {dim} coordinates under the "
                f"inner product, found {index.ntotal} of {index.d} (metric {index.metric_type})"
            )
        if seen_L[rows_N].any():
            raise ReleaseCorruptError(f"{root / record.rows_file}: expected rows of no other band, found some")
        seen_L[rows_N] = True
        gpu = GpuIndex(index) if device == "gpu" and record.kind in ON_GPU else None
        band = Band(record.name, record.kind, record.factory, index, rows_N, gpu)
        if record.cells_file is not None:
            band = band.knowing(cells_N=_read_int32(root / record.cells_file, len(rows_N), index.nlist))
        if record.vectors_file is not None:
            band = band.knowing(vectors_NE=_read_vectors(root / record.vectors_file, len(rows_N), index.d))
        bands.append(band)
    if len(seen_L) != len(bundle.embeddings) or not seen_L.all():
        raise ReleaseCorruptError(
            f"{root / INDEX_MANIFEST}: expected bands that cover {len(bundle.embeddings)} labels, "
            f"found {int(seen_L.sum())}"
        )
    return bands


def read_positions(root: Path, manifest: IndexManifest) -> Int32 | None:
    """Every label's id among the bands of a release whose files were verified, int32 [L], memory-mapped; None of one
    that does not keep them.

    Raises:
        ReleaseCorruptError: values of another shape, type or range.
    """
    if manifest.positions_file is None:
        return None
    return _read_int32(root / manifest.positions_file, manifest.labels, manifest.labels)


def read_priors(root: Path, manifest: IndexManifest, *, verify: bool = True) -> Priors | None:
    """The priors of a release whose files were verified; their values stay on disk, memory-mapped.

    Args:
        root: the release.
        manifest: the manifest of the release's index.
        verify: whether to look at every value.

    Raises:
        ReleaseCorruptError: values of another shape or type than the manifest says, or not finite.
    """
    if not manifest.priors:
        return None
    values_LP = _read_array(root / PRIORS)
    expected = (manifest.labels, len(manifest.priors))
    finite = not verify or bool(np.isfinite(values_LP).all())
    if values_LP.dtype != np.float32 or values_LP.shape != expected or not finite:
        raise ReleaseCorruptError(
            f"{root / PRIORS}: expected finite float32 {list(expected)}, "
            f"found {values_LP.dtype} {list(values_LP.shape)}"
        )
    return Priors(tuple(manifest.priors), values_LP)


def read_manifest_file(path: Path, model: type[_Manifest]) -> _Manifest:
    """A manifest of this room, its version checked before anything else.

    Raises:
        ReleaseCorruptError: missing, or not the JSON that it should be.
        ReleaseVersionError: another schema version than this installation writes.
    """
    return read_versioned_json(
        path,
        model,
        SCHEMA_VERSION,
        missing=f"{path}: expected a manifest, found none",
        remedy="build the release again",
        corrupt=ReleaseCorruptError,
        unread=ReleaseVersionError,
    )


def manifest_bytes(manifest: BaseModel) -> bytes:
    """A manifest as it is written: indented JSON, one final newline."""
    return (manifest.model_dump_json(indent=2) + "\n").encode()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a small file; returns its size and sha256."""
    path.write_bytes(content)
    return FileRecord(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def _write_faiss(path: Path, index: Any) -> FileRecord:
    """Through Python's own file, which reports a full disk; FAISS's writer drops an error at close."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:

        def write(block: bytes) -> int:
            nonlocal size
            digest.update(block)
            size += len(block)
            return file.write(block)

        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(write))
        except RuntimeError as error:
            raise SpecError(f"{path.name}: expected an index that FAISS can write to a file, found {error}") from error
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def _read_faiss(path: Path, labels: int, *, mapped: bool) -> Any:
    """Read with limits that a file of this size cannot exceed, so that a crafted one cannot ask for more.

    FAISS's mapping reader (1.15) does not notice every file that ends too early, and may read beyond its end: map
    what a checksum vouches for, and let the copying reader judge before a release is published.
    """
    try:
        with _reading, _deserialisation_limits(path.stat().st_size, labels):
            return faiss.read_index(str(path), _MAP if mapped else 0)
    except RuntimeError as error:
        raise ReleaseCorruptError(f"{path}: FAISS {faiss.__version__} cannot read this index: {error}") from error


@contextmanager
def _deserialisation_limits(file_bytes: int, labels: int) -> Iterator[None]:
    """Bound what reading may allocate; FAISS compares a vector's length with a quarter of its byte limit.

    The limits are FAISS's globals, hence the lock around this.
    """
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
    faiss.set_deserialization_vector_byte_limit(4 * (file_bytes + 1) + _DERIVED_BYTES)
    faiss.set_deserialization_loop_limit(max(labels, 1 << 16))
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before[0])
        faiss.set_deserialization_loop_limit(before[1])


def _read_rows(path: Path, labels: int) -> Int64:
    rows_N: Int64 = _read_array(path)
    if rows_N.dtype != np.int64 or rows_N.ndim != 1 or rows_N.size == 0:
        raise ReleaseCorruptError(f"{path}: expected int64 [N], found {rows_N.dtype} {list(rows_N.shape)}")
    if rows_N.min() < 0 or rows_N.max() >= labels:
        raise ReleaseCorruptError(f"{path}: expected label rows 0..{labels - 1}, found {rows_N.min()}..{rows_N.max()}")
    return rows_N


def _read_vectors(path: Path, length: int, width: int) -> Float32:
    vectors_NE: Float32 = _read_array(path)
    if vectors_NE.dtype != np.float32 or vectors_NE.shape != (length, width):
        raise ReleaseCorruptError(
            f"{path}: expected float32 [{length}, {width}], found {vectors_NE.dtype} {list(vectors_NE.shape)}"
        )
    return vectors_NE


def _read_int32(path: Path, length: int, limit: int) -> Int32:
    numbers: Int32 = _read_array(path)
    if numbers.dtype != np.int32 or numbers.shape != (length,) or numbers.min() < 0 or numbers.max() >= limit:
        raise ReleaseCorruptError(
            f"{path}: expected int32 [{length}] of 0..{limit - 1}, found {numbers.dtype} {list(numbers.shape)}"
        )
    return numbers


def _read_array(path: Path) -> Any:
    """An array file, memory-mapped."""
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as error:
        raise ReleaseCorruptError(f"{path}: expected a NumPy array file: {error}") from error


def _write_array(path: Path, array: Array) -> FileRecord:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    return write_file(path, content.getvalue())
