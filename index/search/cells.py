"""Which cells of an inverted file a search among some of its ids looks into.

A search of all ids visits the nearest few cells. Among some of them that would miss most of the best: where one label
in ten is eligible, the hundred best eligible ones lie among the thousand best, and where a filter and a query have
little to do with each other, the nearest cells hold no eligible label at all. So cells without one are passed over, and
of the others so many are visited that the eligible labels seen are as many as the depth of the answer asks for. That
depth is told, for each query, by the share of eligible labels in the cells nearest to it.

Legend: `N` labels of the band, `C` cells, `B` queries, `P` cells visited, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.manifests import Kind
from longtail.index.search.eligible import IdSet

MEASURED_DEPTH = 100
"""Results per query that recall is measured at; deeper searches look harder than the measured effort."""
PROBES_PER_DEPTH = 1.5
"""The k best of a share of the labels lie among about the k / share best of all, and those further out lie in ever more
cells: the second table of benchmarks/index_recall.py shows what the exponent buys."""

TOLD_CELLS: tuple[Kind, ...] = ("ivf_flat", "ivf_sq", "ivf_pq")
"""Kinds that FAISS (1.15) fills by cells it is told; the blocks of `ivf_fastscan` it assigns by itself alone."""


class Cells:
    """The cells of one inverted file. Thread-safe; what they hold is read when it is first asked for.

    Args:
        index: of FAISS, an `IndexIVF`.
        of_ids: the cell of every id, int32 [N]; None: read from the index.
    """

    def __init__(self, index: Any, of_ids: Int32 | None = None) -> None:
        self._index = index
        self._of_ids = of_ids

    @cached_property
    def _centroids(self) -> Float32:
        """float32 [C, E]."""
        centroids_CE: Float32 = self._index.quantizer.reconstruct_n(0, self._index.nlist)
        return centroids_CE

    @cached_property
    def of_ids(self) -> Int32:
        """The cell of every id, int32 [N]."""
        if self._of_ids is not None:
            return self._of_ids
        cells_N = np.empty(self._index.ntotal, np.int32)
        lists = self._index.invlists
        for cell in range(self._index.nlist):
            if lists.list_size(cell) == 0:
                continue
            cells_N[faiss.rev_swig_ptr(lists.get_ids(cell), lists.list_size(cell))] = cell
        return cells_N

    @cached_property
    def _sizes(self) -> Int64:
        """Labels of every cell, int64 [C]."""
        return np.bincount(self.of_ids, minlength=self._index.nlist)

    def nearest(self, queries_BE: Float32, k: int, probes: int, ids: IdSet, boost: float) -> tuple[Int64, Float32]:
        """The cells that each query visits, nearest first, int64 [B, P], and their products, float32 [B, P]; −1 beyond.

        Args:
            queries_BE: float32, as wide as the index.
            k: results wanted of each.
            probes: cells that a search of all ids for `MEASURED_DEPTH` results visits.
            ids: those that may be found.
            boost: how many times as many eligible labels to see as the depth asks for.
        """
        counts_C = ids.counted(self.of_ids, self._index.nlist)
        products_BC = queries_BE @ self._centroids.T
        order_BC = np.argsort(-products_BC, axis=1)
        counts_BC = counts_C[order_BC]
        eligible_BC = np.cumsum(counts_BC, axis=1)
        labels_BC = np.cumsum(self._sizes[order_BC], axis=1)
        seen = probes * self._index.ntotal / self._index.nlist
        share_B = _at(eligible_BC, eligible_BC, seen) / _at(labels_BC, eligible_BC, seen)
        # The few best of a selection are no easier to find than its hundred best.
        depth_B = max(k, MEASURED_DEPTH) / (MEASURED_DEPTH * share_B)
        wanted_B = boost * seen * share_B * depth_B**PROBES_PER_DEPTH
        # Up to the cell that completes what is wanted.
        visited_BC = (eligible_BC - counts_BC < wanted_B[:, None]) & (counts_BC > 0)
        places_BC = np.cumsum(visited_BC, axis=1) - 1
        at_B, at_C = np.nonzero(visited_BC)
        shape = len(queries_BE), int(places_BC[:, -1].max()) + 1
        cells_BP, near_BP = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        cells = order_BC[at_B, at_C]
        cells_BP[at_B, places_BC[at_B, at_C]] = cells
        near_BP[at_B, places_BC[at_B, at_C]] = products_BC[at_B, cells]
        return cells_BP, near_BP

    def search(self, queries_BE: Float32, fetch: int, near: tuple[Int64, Float32], ids: IdSet) -> tuple[Float32, Int64]:
        """The best in some cells: scores float32 [B, fetch], descending, and ids int64 [B, fetch]; −1 beyond.

        Args:
            queries_BE: float32, as wide as the index.
            fetch: results of each.
            near: the cells, as of `nearest`.
            ids: those that may be found.
        """
        return search_cells(self._index, np.ascontiguousarray(queries_BE), fetch, *near, ids)


def search_cells(
    index: Any, queries_BE: Float32, fetch: int, cells_BP: Int64, near_BP: Float32, ids: IdSet
) -> tuple[Float32, Int64]:
    """The best in some cells: scores float32 [B, fetch], descending, and ids int64 [B, fetch]; −1 beyond.

    Args:
        index: of FAISS, an `IndexIVF`.
        queries_BE: float32, as wide as the index, contiguous.
        fetch: results of each.
        cells_BP: int64, those that each query visits; −1: none.
        near_BP: float32, their products with the query.
        ids: those that may be found.
    """
    scores, found = np.empty((len(queries_BE), fetch), np.float32), np.empty((len(queries_BE), fetch), np.int64)
    # FAISS's Python method of this name takes no parameters, and so no selector.
    index.search_preassigned_c(
        len(queries_BE), faiss.swig_ptr(queries_BE), fetch, faiss.swig_ptr(cells_BP), faiss.swig_ptr(near_BP),
        faiss.swig_ptr(scores), faiss.swig_ptr(found), False,
        ids.parameters(faiss.SearchParametersIVF, nprobe=cells_BP.shape[1]),
    )  # fmt: skip
    return scores, found


def add_to_cells(index: Any, rows_NE: Float32, cells_N: Int32 | Int64, ids_N: Int64 | None = None) -> None:
    """Add rows to cells that are known, of an index whose kind is one of `TOLD_CELLS`.

    Args:
        index: of FAISS, an `IndexIVF`, trained.
        rows_NE: float32, as wide as the index, contiguous.
        cells_N: the cell of each.
        ids_N: of each, int64; None: 0 … N − 1.
    """
    ids_N = np.arange(len(rows_NE), dtype=np.int64) if ids_N is None else ids_N
    told_N = np.ascontiguousarray(cells_N, np.int64)
    index.add_core(len(rows_NE), faiss.swig_ptr(rows_NE), faiss.swig_ptr(ids_N), faiss.swig_ptr(told_N))


def _at(values_BC: Int64, eligible_BC: Int64, seen: float) -> Int64:
    """The value of each query at the first cell by which so many eligible labels are seen, or all; at least 1."""
    enough_BC = eligible_BC >= np.minimum(seen, eligible_BC[:, -1:])
    at_B: Int64 = values_BC[np.arange(len(values_BC)), enough_BC.argmax(axis=1)]
    return np.maximum(at_B, 1)
