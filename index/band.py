"""One popularity band: a FAISS index over some label rows, searched with or without a selection of them.

Legend: `N` labels of the band, `B` queries, `C` candidates, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from bundle.augment import Float32
from index.exact import NO_ROW, Int64
from index.manifest import Effort, Kind
from index.train import pad

MEASURED_DEPTH = 100
"""Results per query that recall is measured at; deeper searches look harder than the measured effort."""
_PROBES_PER_DEPTH = 1.5

_LOSSY: tuple[Kind, ...] = ("ivf_pq", "factory")


class Selection:
    """The labels of one band that a search may return.

    Args:
        eligible_N: bool [N], by index id.
    """

    def __init__(self, eligible_N: npt.NDArray[np.bool_]) -> None:
        self.eligible_N = eligible_N
        self.count = int(np.count_nonzero(eligible_N))
        self.share = self.count / len(eligible_N)

    @cached_property
    def selector(self) -> Any:
        """FAISS's bitmap of the same labels; read by any number of threads."""
        return faiss.IDSelectorBitmap(np.packbits(self.eligible_N, bitorder="little"))


@dataclass(frozen=True)
class Band:
    """Labels of similar popularity and the index that searches them.

    Attributes:
        name: `head`, `tail`, or `all`.
        kind: decides which knobs a search turns.
        factory: what FAISS built.
        index: the FAISS index; id i is label row `rows_N[i]`. CPU indexes are safe for concurrent searches.
        rows_N: int64 [N], ascending label rows.
    """

    name: str
    kind: Kind
    factory: str
    index: Any
    rows_N: Int64

    @property
    def lossy(self) -> bool:
        """Whether the index's scores are approximations, to be scored again exactly."""
        return self.kind in _LOSSY

    def prepare(self, effort: Effort) -> None:
        """Set the effort of a factory index, whose wrappers take no parameters per search."""
        if self.kind == "factory" and probes_name(self.index):
            faiss.ParameterSpace().set_index_parameter(self.index, probes_name(self.index), effort.probes)

    def search(self, queries_BE: Float32, k: int, effort: Effort, selection: Selection | None) -> tuple[Float32, Int64]:
        """The band's best candidates: scores float32 [B, C] and label rows int64 [B, C], C >= min(k, N).

        Missing candidates are −inf / −1. An approximate index may miss some of the best k.
        """
        share = 1.0 if selection is None else selection.share
        fetch = min(k * effort.refine, len(self.rows_N))
        if self.kind == "factory":
            fetch = min(math.ceil(fetch / share), len(self.rows_N))
        # The k best of a share of the labels lie among about the k / share best of all, and those further out
        # lie in ever more cells: the second table of benchmarks/index_recall.py shows what the exponent buys.
        depth = max(1.0, k / (MEASURED_DEPTH * share))
        probes = math.ceil(effort.probes * depth**_PROBES_PER_DEPTH)
        scores_BC, ids_BC = self.index.search(
            pad(queries_BE, self.index.d), fetch, params=self._parameters(probes, selection)
        )
        rows_BC = np.where(ids_BC == NO_ROW, NO_ROW, self.rows_N[ids_BC])
        if self.kind == "factory" and selection is not None:
            rows_BC[~selection.eligible_N[ids_BC]] = NO_ROW
        scores_BC[rows_BC == NO_ROW] = -np.inf
        return scores_BC, rows_BC

    def _parameters(self, probes: int, selection: Selection | None) -> Any:
        options: dict[str, Any] = {} if selection is None else {"sel": selection.selector}
        match self.kind:
            case "ivf_flat" | "ivf_pq":
                return faiss.SearchParametersIVF(nprobe=min(probes, self.index.nlist), **options)
            case "hnsw":
                return faiss.SearchParametersHNSW(efSearch=min(probes, len(self.rows_N)), **options)
            case "flat":
                return faiss.SearchParameters(**options) if options else None
            case "factory":
                return None


def probes_name(index: Any) -> str:
    """FAISS's name for the effort knob of an index, through its wrappers; empty when it has none."""
    if faiss.try_extract_index_ivf(index) is not None:
        return "nprobe"
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine | faiss.IndexIDMap):
        inner = index.base_index if isinstance(index, faiss.IndexRefine) else index.index
        index = faiss.downcast_index(inner)
    return "efSearch" if isinstance(index, faiss.IndexHNSW) else ""
