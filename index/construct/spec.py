"""What to build: the kinds of index, and the FAISS factory string each of them comes to.

Every FAISS index has augmented rows [METHODS §6] of all labels and searches by inner product; an exact head is searched
as well. `milvus_flat` and `milvus_ivf_flat` are collections of a Milvus server; `milvus` chooses one of them by size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from longtail.index.errors import SpecError
from longtail.index.manifests import Device, Kind

_CHOICES = ("auto", "flat", "ivf_flat", "ivf_sq", "ivf_fastscan", "milvus", "milvus_flat", "milvus_ivf_flat")
FLAT_UP_TO = 50_000
"""Catalogues for which `auto` stays exact: scanning 50,000 rows of 64 floats takes about half a
millisecond on one core, and exact search needs no tuning and answers every filter exactly."""

_POINTS_PER_LIST = 39
"""FAISS wants at least this many training rows per k-means centroid."""
_LABELS_PER_LIST = 250
_CODED_LISTS = 1_000
"""Lists from which on centroids are found by codes of four bits a coordinate, of which the best few are compared
exactly: the same lists in half the time of four thousand, for a query as for the row that a build assigns."""
_FASTSCAN_CODES = 16
_FASTSCAN_LEAST_LABELS = _POINTS_PER_LIST * _FASTSCAN_CODES
_FASTSCAN_DIMS = 2
"""Coordinates that share a code of four bits."""
_SQ_STEP = 16
"""FAISS reads scalar codes several at a time only where they are a multiple of these; else at a sixth of the speed."""


@dataclass(frozen=True)
class IndexSpec:
    """What index to build, and the recall that it must reach; raises SpecError.

    Args:
        text: `auto`, `flat`, `ivf_flat`, `ivf_sq`, `ivf_fastscan`, `milvus`, `milvus_flat` or `milvus_ivf_flat`.
        recall_floor: least recall@100 against exact search at every measured λ and μ; a build below it fails.
    """

    text: str = "auto"
    recall_floor: float = 0.95

    def __post_init__(self) -> None:
        if self.text not in _CHOICES:
            raise SpecError(f"index spec: expected {', '.join(_CHOICES)}, received {self.text!r}")
        if not 0 <= self.recall_floor <= 1:
            raise SpecError(f"recall floor: expected 0 <= floor <= 1, received {self.recall_floor}")

    @property
    def milvus(self) -> bool:
        """Whether Milvus holds the rows."""
        return self.text.startswith("milvus")

    def kind(self, labels: int) -> Kind:
        """The kind that this spec comes to for a catalogue of `labels`, the plainest of those that `auto` measures."""
        if self.text == "auto":
            return "flat" if labels <= FLAT_UP_TO else "ivf_flat"
        if self.text == "milvus":
            return "milvus_flat" if labels <= FLAT_UP_TO else "milvus_ivf_flat"
        return cast("Kind", self.text)

    def candidates(self, labels: int, device: Device) -> list[IndexSpec]:
        """What may be built: for an `auto` that has a choice the kinds that it measures, the plainest first."""
        if self.text != "auto" or labels <= FLAT_UP_TO:
            return [replace(self, text=self.kind(labels))]
        kinds: list[Kind] = ["ivf_flat"]
        if device == "cpu":
            kinds.append("ivf_sq")
            if labels >= 2 * _FASTSCAN_LEAST_LABELS:
                kinds.append("ivf_fastscan")
        return [replace(self, text=kind) for kind in kinds]

    def least_labels(self) -> int:
        """Labels outside the head that its codes are trained with, at the least."""
        return _FASTSCAN_LEAST_LABELS if self.text == "ivf_fastscan" else 1

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
            case "ivf_sq":
                width = _SQ_STEP * math.ceil(dim / _SQ_STEP)
                return f"{lists(width)},SQ8", width
            case "ivf_fastscan":
                if labels < _FASTSCAN_LEAST_LABELS:
                    raise SpecError(
                        f"ivf_fastscan: expected at least {_FASTSCAN_LEAST_LABELS:,} labels outside the head to train "
                        f"its codes, received {labels:,}; use --spec auto"
                    )
                codes = math.ceil(dim / _FASTSCAN_DIMS)
                # "r": codes are of what a row adds to the centroid of its list.
                width = codes * _FASTSCAN_DIMS
                return f"{lists(width)},PQ{codes}x4fsr", width
        raise SpecError(f"index spec {self.text!r}: expected one that FAISS builds, received one of Milvus")


def _lists(labels: int) -> int:
    """Four times √N; beyond a million labels one for 250, up to eight times √N: codes of centroids are quickly read."""
    root = math.sqrt(labels)
    return round(min(max(4 * root, labels / _LABELS_PER_LIST), 8 * root))
