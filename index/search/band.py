"""One popularity band: a FAISS index over some label rows, searched whole or for some of its ids only.

Legend: `N` labels of the band, `L` rows, `B` queries, `C` candidates, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.manifests import Effort, Kind
from longtail.index.search.candidates import NO_ROW, no_results
from longtail.index.search.cells import MEASURED_DEPTH, PROBES_PER_DEPTH, Cells
from longtail.index.search.eligible import IdSet
from longtail.index.search.gpu import GPU_MAX_RESULTS, GpuIndex

NEARLY_WHOLE = 0.98
"""Share of the ids from which on a search is one of all ids, and the few others, hidden labels above all, are passed
over."""
SCANNED_PER_CANDIDATE, _SCANNED_PER_LABEL = 133, 2_000
"""Of an HNSW graph: eligible rows, and ruled out ones, that are scanned in the time that it takes for a candidate."""
_MARGIN = 100
"""Results fetched beyond the share's, where what is ruled out is dropped afterwards: a few hidden labels are a
share of nothing, but may all be the best of one query."""

_SCORES_AT_ONCE = 1 << 20
"""Exact scores held at a time, at most: 4 MiB."""
_SCORED_WHOLE = 0.5
"""Share of an exact band's ids from which on all are scored: of fewer, FAISS passes over the others."""

_CELLS: tuple[Kind, ...] = ("ivf_flat", "ivf_sq", "ivf_fastscan", "ivf_pq")
"""Kinds that are an inverted file."""
CODED: tuple[Kind, ...] = ("ivf_sq", "ivf_fastscan")
"""Kinds whose short lists have as many candidates as lists of `MEASURED_DEPTH` results: codes confuse the ten best with
more others than the factor counts."""
_LOSSY: tuple[Kind, ...] = ("ivf_sq", "ivf_fastscan", "ivf_pq", "factory")
ON_GPU: tuple[Kind, ...] = ("flat", "ivf_flat", "ivf_pq")
"""Kinds that are searched on a GPU."""


@dataclass(frozen=True)
class Band:
    """Labels of similar popularity and the index that searches them.

    Attributes:
        name: `head`, `tail`, or `all`.
        kind: decides which knobs a search turns.
        factory: what FAISS built.
        index: the FAISS index; id i is label row `rows_N[i]`. CPU indexes are safe for concurrent searches.
        rows_N: int64 [N], ascending label rows.
        gpu: a copy of the index that searches in its place wherever a GPU can.
    """

    name: str
    kind: Kind
    factory: str
    index: Any
    rows_N: Int64
    gpu: GpuIndex | None = None

    @property
    def lossy(self) -> bool:
        """Whether the index's scores are approximations, to be scored again exactly."""
        return self.kind in _LOSSY

    @property
    def ordered(self) -> bool:
        """Whether candidates come best first: of the others, scores change or some are dropped afterwards."""
        return not self.lossy and self.gpu is None

    def prepare(self, effort: Effort) -> None:
        """Set the effort of a factory index, whose wrappers take no parameters per search."""
        if self.kind == "factory" and probes_name(self.index):
            faiss.ParameterSpace().set_index_parameter(self.index, probes_name(self.index), effort.probes)

    @cached_property
    def cells(self) -> Cells:
        """Of an inverted file."""
        return Cells(self.index)

    def knowing(self, *, cells_N: Int32 | None = None, vectors_NE: Float32 | None = None) -> Band:
        """The same band, of whose index this is known; a copy of other rows asks its own.

        Args:
            cells_N: the cell of every id, int32.
            vectors_NE: what a flat index holds, float32.
        """
        band = replace(self)
        if cells_N is not None:
            vars(band)["cells"] = Cells(self.index, cells_N)
        if vectors_NE is not None:
            vars(band)["vectors"] = vectors_NE
        return band

    @property
    def has_cells(self) -> bool:
        """Whether it is an inverted file."""
        return self.kind in _CELLS

    def search(
        self, queries_BE: Float32, k: int, effort: Effort, ids: IdSet, boost: float = 1.0
    ) -> tuple[Float32, Int64]:
        """The band's best candidates: scores float32 [B, C] and label rows int64 [B, C], C >= min(k, N).

        Missing candidates are −inf / −1. An approximate index may miss some of the best k. Best first where `ordered`.

        Args:
            queries_BE: float32, augmented queries.
            k: results wanted of each.
            effort: how hard to look where all ids may be found.
            ids: those that may be found.
            boost: how many times as hard to look where they are not all.
        """
        filtered = ids.share < NEARLY_WHOLE
        refine = math.ceil(effort.refine * boost) if filtered and self.lossy else effort.refine
        wanted = max(k, MEASURED_DEPTH) if self.kind in CODED else k
        fetch = min(wanted * refine, len(self.rows_N))
        probes = probes_for(effort, k, ids.share)
        queries_BE = pad(queries_BE, self.index.d)
        if self.gpu is not None and self._overfetch(fetch, ids) <= GPU_MAX_RESULTS:
            scores_BC, ids_BC = self._search_gpu(self.gpu, queries_BE, fetch, probes, ids)
        elif self.kind == "factory" and not ids.whole:
            scores_BC, ids_BC = self.index.search(queries_BE, self._overfetch(fetch, ids))
            ids_BC[~ids.contains(ids_BC)] = NO_ROW
        elif self.kind in _CELLS and filtered:
            near = self.cells.nearest(queries_BE, k, effort.probes, ids, boost)
            scores_BC, ids_BC = self.cells.search(queries_BE, fetch, near, ids)
        elif self.kind == "hnsw" and filtered:
            depth = max(k, MEASURED_DEPTH) / (MEASURED_DEPTH * ids.share)
            candidates = math.ceil(boost * effort.probes * depth**PROBES_PER_DEPTH)
            scores_BC, ids_BC = self._search_graph(queries_BE, fetch, candidates, ids)
        else:
            scores_BC, ids_BC = self._search_cpu(queries_BE, fetch, probes, ids)
        rows_BC = self.rows_N[ids_BC]
        missing_BC = ids_BC < 0
        if missing_BC.any():
            rows_BC[missing_BC] = NO_ROW
            scores_BC[missing_BC] = -np.inf
        return scores_BC, rows_BC

    @cached_property
    def vectors(self) -> Float32:
        """What a flat index holds, float32 [N, E]: a view. A copy of a mapped one, which lies in its file at any byte:
        NumPy would copy it for every product, which takes eight times as long as the product."""
        vectors: Float32 = faiss.rev_swig_ptr(self.index.get_xb(), self.index.ntotal * self.index.d)
        return np.require(vectors, requirements="A").reshape(self.index.ntotal, self.index.d)

    def above(self, queries_BE: Float32, least_B: Float32, ids: IdSet) -> tuple[Float32, Int64]:
        """All of an exact band's labels that score as the others' k-th best or higher, C the most of a query.

        Takes half the time of a search for a hundred, most of which would fall to the others' candidates.

        Args:
            queries_BE: float32, augmented queries; few enough for every score to be held, `Band.few`.
            least_B: float32 [B], the others' k-th best score of each.
            ids: those that may be found.

        Returns:
            Scores float32 [B, C], in no order, and label rows int64 [B, C]; −inf and −1 where a query has fewer.
        """
        scores_BN = pad(queries_BE, self.index.d) @ self.vectors.T
        if len(queries_BE) == 1:
            at_C = np.flatnonzero(scores_BN[0] >= least_B[0])
            at_C = at_C if ids.whole else at_C[ids.contains(at_C)]
            return scores_BN[:, at_C], self.rows_N[at_C][None]
        at_B, at_N = np.nonzero(scores_BN >= least_B[:, None])
        if not ids.whole:
            kept = ids.contains(at_N)
            at_B, at_N = at_B[kept], at_N[kept]
        counts_B = np.bincount(at_B, minlength=len(queries_BE))
        places = np.arange(len(at_B)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        scores_BC, rows_BC = no_results(len(queries_BE), int(counts_B.max()))
        scores_BC[at_B, places], rows_BC[at_B, places] = scores_BN[at_B, at_N], self.rows_N[at_N]
        return scores_BC, rows_BC

    def few(self, queries: int, ids: IdSet) -> bool:
        """Whether an exact band is scored whole for so many queries: most of it may be found, all scores be held."""
        held = queries * len(self.rows_N) <= _SCORES_AT_ONCE and ids.share >= _SCORED_WHOLE
        return self.kind == "flat" and self.gpu is None and held

    def _search_cpu(self, queries_BE: Float32, fetch: int, probes: int, ids: IdSet) -> tuple[Float32, Int64]:
        parameters = None
        match self.kind:
            case "flat":
                parameters = ids.parameters(faiss.SearchParameters)
            case "hnsw":
                parameters = ids.parameters(faiss.SearchParametersHNSW, efSearch=min(probes, len(self.rows_N)))
            case kind if kind in _CELLS:
                parameters = ids.parameters(faiss.SearchParametersIVF, nprobe=min(probes, self.index.nlist))
        scores_BC, ids_BC = self.index.search(queries_BE, fetch, params=parameters)
        return scores_BC, ids_BC

    def _search_graph(self, queries_BE: Float32, fetch: int, candidates: int, ids: IdSet) -> tuple[Float32, Int64]:
        """By the graph, or row by row where that costs less."""
        scan = ids.count / SCANNED_PER_CANDIDATE + len(self.rows_N) / _SCANNED_PER_LABEL
        if candidates < scan:
            return self._search_cpu(queries_BE, fetch, candidates, ids)
        rows = faiss.downcast_index(self.index.storage)
        scores_BC, ids_BC = rows.search(queries_BE, fetch, params=ids.parameters(faiss.SearchParameters))
        return scores_BC, ids_BC

    def _search_gpu(
        self, gpu: GpuIndex, queries_BE: Float32, fetch: int, probes: int, ids: IdSet
    ) -> tuple[Float32, Int64]:
        """More than `fetch` from the GPU, less what is ruled out; the CPU's index for queries that end up short."""
        cells = getattr(self.index, "nlist", 1)
        scores_BC, ids_BC = gpu.search(queries_BE, self._overfetch(fetch, ids), min(probes, cells, GPU_MAX_RESULTS))
        if ids.whole:
            return scores_BC, ids_BC
        kept_BC = ids.contains(ids_BC)
        ids_BC[~kept_BC] = NO_ROW
        short = np.flatnonzero(np.count_nonzero(kept_BC, axis=1) < min(fetch, ids.count))
        if short.size:
            ids_BC[short] = NO_ROW
            scores_BC[short, :fetch], ids_BC[short, :fetch] = self._search_cpu(queries_BE[short], fetch, probes, ids)
        return scores_BC, ids_BC

    def _overfetch(self, fetch: int, ids: IdSet) -> int:
        """Results among which `fetch` selected ones are likely to be."""
        if ids.whole:
            return fetch
        ruled_out = len(self.rows_N) - ids.count
        return min(math.ceil(fetch / ids.share) + min(ruled_out, _MARGIN), len(self.rows_N))


def probes_for(effort: Effort, k: int, share: float) -> int:
    """Cells, or candidates of a graph, that a search for k of a share of the labels visits."""
    depth = max(1.0, k / (MEASURED_DEPTH * share))
    probes: int = math.ceil(effort.probes * depth**PROBES_PER_DEPTH)
    return probes


def pad(rows_LE: Float32, width: int) -> Float32:
    """Contiguous float32 [L, width]: the rows, and zeros in the coordinates beyond them."""
    if rows_LE.shape[1] == width:
        return np.ascontiguousarray(rows_LE, np.float32)
    padded = np.zeros((len(rows_LE), width), np.float32)
    padded[:, : rows_LE.shape[1]] = rows_LE
    return padded


def probes_name(index: Any) -> str:
    """FAISS's name for the effort knob of an index, through its wrappers; empty when it has none."""
    if faiss.try_extract_index_ivf(index) is not None:
        return "nprobe"
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine | faiss.IndexIDMap):
        inner = index.base_index if isinstance(index, faiss.IndexRefine) else index.index
        index = faiss.downcast_index(inner)
    return "efSearch" if isinstance(index, faiss.IndexHNSW) else ""
