"""What to build: the kinds of index, and the FAISS factory string each of them comes to.

Every index holds augmented rows [METHODS §6] of all labels under the inner product, beside an exact head; a factory
string is taken literally, without one. `milvus` is a collection of a Milvus server, exact or with a head as `auto`
decides it; `milvus_flat` and `milvus_ivf_flat` say which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from longtail.index.errors import SpecError
from longtail.index.manifests import Device, Kind

CHOICES = "auto, flat, ivf_flat, ivf_sq, ivf_fastscan, ivf_pq, hnsw, milvus or a FAISS factory string"
FLAT_UP_TO = 50_000
"""Catalogues for which `auto` stays exact: scanning 50,000 rows of 64 floats takes about half a
millisecond on one core, and exact search needs no tuning and answers every filter exactly."""

_POINTS_PER_LIST = 39
"""FAISS wants at least this many training rows per k-means centroid."""
_LABELS_PER_LIST = 250
_CODED_LISTS = 1_000
"""Lists from which on centroids are found by codes of four bits a coordinate, of which the best few are compared
exactly: the same lists in half the time of four thousand, for a query as for the row that a build assigns."""
_PQ_CODES = 256
_PQ_LEAST_LABELS = _POINTS_PER_LIST * _PQ_CODES
_PQ_DIMS_PER_BYTE = 4
_FASTSCAN_CODES = 16
_FASTSCAN_LEAST_LABELS = _POINTS_PER_LIST * _FASTSCAN_CODES
_FASTSCAN_DIMS = 2
"""Coordinates that share a code of four bits."""
_SQ_STEP = 16
"""FAISS reads scalar codes several at a time only where they are a multiple of these; else at a sixth of the speed."""
_HNSW_LINKS = 32
_ID_BYTES = 8
"""Of a label in an inverted file."""


@dataclass(frozen=True)
class IndexSpec:
    """What index to build, and the recall that it must reach; raises SpecError.

    Args:
        text: `auto`, `flat`, `ivf_flat`, `ivf_sq`, `ivf_fastscan`, `ivf_pq`, `hnsw`, `milvus`, `milvus_flat`,
            `milvus_ivf_flat`, or any FAISS factory string.
        recall_floor: least recall@100 against exact search at every measured λ and μ; a build below it fails.
        bytes_per_label: most bytes that the index file may take for each label; None: any. What is searched exactly
            again, the embeddings, is a file of its own.
    """

    text: str = "auto"
    recall_floor: float = 0.95
    bytes_per_label: float | None = None

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise SpecError(f"index spec: expected {CHOICES}, received {self.text!r}")
        if not 0 <= self.recall_floor <= 1:
            raise SpecError(f"recall floor: expected 0 <= floor <= 1, received {self.recall_floor}")
        if self.bytes_per_label is not None and self.milvus:
            raise SpecError("bytes per label: expected an index that FAISS holds, received one of Milvus")
        if self.bytes_per_label is not None and not self.bytes_per_label > 0:
            raise SpecError(f"bytes per label: expected more than 0, received {self.bytes_per_label:g}")

    @property
    def milvus(self) -> bool:
        """Whether Milvus holds the rows."""
        return self.text in ("milvus", "milvus_flat", "milvus_ivf_flat")

    def kind(self, labels: int) -> Kind:
        """The kind that this spec comes to for a catalogue of `labels`, the plainest of those that `auto` measures."""
        if self.text == "auto":
            return "flat" if labels <= FLAT_UP_TO else "ivf_flat"
        if self.text == "milvus":
            return "milvus_flat" if labels <= FLAT_UP_TO else "milvus_ivf_flat"
        for kind in get_args(Kind):
            if self.text == kind and kind != "factory":
                return kind  # type: ignore[no-any-return]
        return "factory"

    def candidates(self, labels: int, device: Device) -> list[IndexSpec]:
        """What may be built: for an `auto` that has a choice the kinds that it measures, the plainest first."""
        if self.text != "auto":
            return [self]
        kinds: list[Kind] = ["ivf_flat"]
        if device == "cpu":
            kinds.append("ivf_sq")
            if labels >= 2 * _FASTSCAN_LEAST_LABELS:
                kinds.append("ivf_fastscan")
        if labels <= FLAT_UP_TO:
            kinds = ["flat"] if self.bytes_per_label is None else ["flat", *kinds]
        return [replace(self, text=kind) for kind in kinds]

    def least_bytes(self, labels: int, dim: int) -> int:
        """Bytes of a label's code, links and id, without those that all labels share; 0 of a factory string, and of
        what Milvus holds."""
        match self.kind(labels):
            case "flat":
                return 4 * dim
            case "ivf_flat":
                return 4 * dim + _ID_BYTES
            case "hnsw":
                return 4 * (dim + 2 * _HNSW_LINKS)
            case "ivf_sq":
                return _SQ_STEP * math.ceil(dim / _SQ_STEP) + _ID_BYTES
            case "ivf_fastscan":
                return math.ceil(dim / (2 * _FASTSCAN_DIMS)) + _ID_BYTES
            case "ivf_pq":
                return _pq_bytes(dim) + _ID_BYTES
            case "factory" | "milvus_flat" | "milvus_ivf_flat":
                return 0

    def least_labels(self) -> int:
        """Labels outside the head that its codes are trained with, at the least."""
        return {"ivf_fastscan": _FASTSCAN_LEAST_LABELS, "ivf_pq": _PQ_LEAST_LABELS}.get(self.text, 1)

    def factory(self, labels: int, dim: int, device: Device = "cpu", lists_known: int | None = None) -> tuple[str, int]:
        """Get the FAISS factory string for so many rows of `dim` coordinates, and the width that it takes.

        A width beyond `dim` means rows and queries are padded with zeros, which changes no score. The number of lists
        is `lists_known`, or befits the labels.
        """
        count = lists_known or max(1, min(_lists(labels), labels // _POINTS_PER_LIST))

        def lists(width: int) -> str:
            return f"IVF{count}" + (f"(PQ{width}x4fs,RFlat)" if count >= _CODED_LISTS and device == "cpu" else "")

        match self.kind(labels):
            case "flat":
                return "Flat", dim
            case "ivf_flat":
                return f"{lists(dim)},Flat", dim
            case "hnsw":
                return f"HNSW{_HNSW_LINKS},Flat", dim
            case "ivf_sq":
                width = _SQ_STEP * math.ceil(dim / _SQ_STEP)
                return f"{lists(width)},SQ8", width
            case "ivf_fastscan":
                _check_labels("ivf_fastscan", labels, self.least_labels())
                codes = math.ceil(dim / _FASTSCAN_DIMS)
                # "r": codes are of what a row adds to the centroid of its list.
                width = codes * _FASTSCAN_DIMS
                return f"{lists(width)},PQ{codes}x4fsr", width
            case "ivf_pq":
                _check_labels("ivf_pq", labels, self.least_labels())
                code_bytes = _pq_bytes(dim)
                # "np" skips polysemous training, which takes minutes and which no search here makes use of.
                width = code_bytes * _PQ_DIMS_PER_BYTE
                return f"{lists(width)},PQ{code_bytes}np", width
            case "factory":
                return self.text, dim
            case "milvus_flat" | "milvus_ivf_flat":
                raise SpecError(f"index spec {self.text!r}: expected one that FAISS builds, received one of Milvus")


def _lists(labels: int) -> int:
    """Four times √N; beyond a million labels one for 250, up to eight times √N: codes of centroids are quickly read."""
    root = math.sqrt(labels)
    return round(min(max(4 * root, labels / _LABELS_PER_LIST), 8 * root))


def _pq_bytes(dim: int) -> int:
    """GPUs take code sizes that are multiples of four bytes."""
    return 4 * math.ceil(dim / (4 * _PQ_DIMS_PER_BYTE))


def _check_labels(kind: Kind, labels: int, least: int) -> None:
    if labels < least:
        raise SpecError(
            f"{kind}: expected at least {least:,} labels outside the head to train its codes, received {labels:,}; "
            "use --spec auto"
        )
