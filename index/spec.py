"""Define the kinds of index, and the FAISS factory string of each.

Every FAISS index holds augmented rows [METHODS §6] of all labels and searches by inner product. `milvus_flat` and
`milvus_ivf_flat` are collections of a Milvus server; `milvus` chooses between them by the number of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from longtail.index.errors import SpecError
from longtail.index.manifests import Device, Kind

_CHOICES = ("auto", "flat", "ivf_flat", "ivf_sq", "ivf_fastscan", "milvus", "milvus_flat", "milvus_ivf_flat")
FLAT_UP_TO = 50_000
"""Largest catalogue for which `auto` stays exact: scanning 50,000 rows of 64 floats takes about half a millisecond on
one core, and exact search needs no tuning and answers every filter exactly."""

_POINTS_PER_LIST = 39
"""FAISS warns below this number of training rows per k-means centroid."""
_LABELS_PER_LIST = 250
_CODED_LISTS = 1_000
"""Number of lists from which codes of four bits a coordinate preselect centroids, of which the best few are compared
exactly. With four thousand lists this finds the same lists in half the time, in queries and in the build."""
_FASTSCAN_CODES = 16
"""Values of a code of four bits: the centroids of each of its quantisers."""
_FASTSCAN_LEAST_LABELS = _POINTS_PER_LIST * _FASTSCAN_CODES
_FASTSCAN_DIMS = 2
"""Coordinates that share a code of four bits."""
_SQ_STEP = 16
"""FAISS decodes scalar codes in vector instructions only if the width is a multiple of this; otherwise the speed drops
to a sixth."""


@dataclass(frozen=True)
class IndexSpec:
    """Kind of index to build, and the recall that the index must reach; raises SpecError.

    Args:
        text: `auto`, `flat`, `ivf_flat`, `ivf_sq`, `ivf_fastscan`, `milvus`, `milvus_flat` or `milvus_ivf_flat`.
        recall_floor: least recall@100 against exact search at every measured λ and μ; a build below it fails.
        device: where FAISS trains.
        lists_of: release whose kind and lists the index takes over, so that nothing is clustered.
    """

    text: str = "auto"
    recall_floor: float = 0.95
    device: Device = "cpu"
    lists_of: str | None = None

    def __post_init__(self) -> None:
        if self.text not in _CHOICES:
            raise SpecError(f"index spec: expected {', '.join(_CHOICES)}, received {self.text!r}")
        if not 0 <= self.recall_floor <= 1:
            raise SpecError(f"recall floor: expected 0 <= floor <= 1, received {self.recall_floor}")

    def kind(self, labels: int) -> Kind:
        """Return the kind for a catalogue of `labels`; for `auto` the simplest kind that it compares."""
        if self.text == "auto":
            return "flat" if labels <= FLAT_UP_TO else "ivf_flat"
        if self.text == "milvus":
            return "milvus_flat" if labels <= FLAT_UP_TO else "milvus_ivf_flat"
        return cast("Kind", self.text)

    def candidates(self, labels: int) -> list[IndexSpec]:
        """List the specs to build and compare, simplest first; only `auto` on large catalogues has several."""
        if self.text != "auto" or labels <= FLAT_UP_TO:
            return [replace(self, text=self.kind(labels))]
        kinds: list[Kind] = ["ivf_flat"]
        # A GPU cannot search the kinds that store codes.
        if self.device == "cpu":
            kinds.append("ivf_sq")
            if labels >= _FASTSCAN_LEAST_LABELS:
                kinds.append("ivf_fastscan")
        return [replace(self, text=kind) for kind in kinds]

    def factory(self, labels: int, dim: int, list_count: int | None = None) -> tuple[str, int]:
        """Get the FAISS factory string for rows of `dim` coordinates, and the index's width.

        If the width is larger than `dim`, rows and queries are padded with zeros, which changes no score. The number of
        lists is `list_count`, or follows from the number of labels.
        """
        count = list_count or choose_list_count(labels)

        def lists(width: int) -> str:
            quantizer = choose_quantizer(count, width, self.device)
            return f"IVF{count}" + ("" if quantizer == "Flat" else f"({quantizer})")

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
                        f"ivf_fastscan: expected at least {_FASTSCAN_LEAST_LABELS:,} labels to train its codes, "
                        f"received {labels:,}; use --spec auto"
                    )
                codes = math.ceil(dim / _FASTSCAN_DIMS)
                # "r": the codes hold residuals, the difference between a row and the centroid of its list.
                width = codes * _FASTSCAN_DIMS
                return f"{lists(width)},PQ{codes}x4fsr", width
        raise SpecError(f"index spec {self.text!r}: expected one that FAISS builds, received one of Milvus")


def choose_quantizer(lists: int, width: int, device: Device) -> str:
    """Get the FAISS factory string of the index of centroids, which finds the nearest lists."""
    return f"PQ{width}x4fs,RFlat" if lists >= _CODED_LISTS and device == "cpu" else "Flat"


def choose_list_count(labels: int) -> int:
    """Choose the number of lists: 4 √N, and beyond a million labels N / 250, at most 8 √N, with labels for k-means."""
    # More than the usual 4 √N lists pay for large catalogues, because centroids are then found by codes.
    root = math.sqrt(labels)
    return max(1, min(round(min(max(4 * root, labels / _LABELS_PER_LIST), 8 * root)), labels // _POINTS_PER_LIST))
