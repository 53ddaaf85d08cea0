"""An exact head and the inverted file of the rest, searched in one call: the head is one more cell.

FAISS scans the cells nearest to a query, and then the head, into one list of the best, so that nothing is merged
afterwards. Scores are those of the bands: the same products of the same rows.

Where the dials leave the head little to win, to score all of it for every query is most of a search. So an effort says
how many of the most frequent labels are scored whatever the query; the others of the head are spread over the cells of
the rest, and found in those that are visited. For every such size the head is held once more.

Legend: `N` labels of the head, `B` queries, `V` lists visited, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int64
from longtail.index.search.band import Band, pad
from longtail.index.search.candidates import NO_ROW
from longtail.index.search.cells import add_to_cells, search_cells
from longtail.index.search.eligible import IdSet

HEAD_UP_TO = 1 << 16
"""Labels of a head that is copied to be a cell, 17 MB of 65 coordinates for each size that is searched: of a larger one
the scan is the search."""


class JoinedBands:
    """Two bands as one inverted file, over the cells of the second. Thread-safe.

    Args:
        bands: that `fits`.
        by_popularity_N: the ids of the head, int64, its most frequent label first.
        heads: how many of those an effort may have scored whatever the query, besides all.
    """

    def __init__(self, bands: Sequence[Band], by_popularity_N: Int64, heads: Iterable[int] = ()) -> None:
        self._head, self._tail = bands
        index, labels = self._tail.index, len(by_popularity_N)
        self._cells, self._tail_lists = index.quantizer, index.nlist
        self._head_from = 8 * -(-len(self._tail.rows_N) // 8)  # as of IdSet.followed_by
        self._sizes = [*sorted({head for head in heads if head < labels}), labels]
        # Of every size a list of those that are scored whatever the query; but of the last, all, the others by cell.
        self._wholes, self._spreads = faiss.ArrayInvertedLists(len(self._sizes), index.code_size), []
        ids_N = by_popularity_N + self._head_from
        rows_NE = np.ascontiguousarray(pad(self._head.vectors, index.d)[by_popularity_N])
        cells_N = self._cells.search(rows_NE, 1)[1][:, 0] if len(self._sizes) > 1 else None
        for place, size in enumerate(self._sizes):
            codes = rows_NE[:size].view(np.uint8)
            self._wholes.add_entries(place, size, faiss.swig_ptr(ids_N), faiss.swig_ptr(codes))
            if cells_N is not None and size < labels:
                self._spreads.append(_spread(index, rows_NE[size:], cells_N[size:], ids_N[size:]))
        parts = faiss.InvertedListsPtrVector()
        for part in (index.invlists, self._wholes, *(spread.invlists for spread in self._spreads)):
            parts.push_back(part)
        self._lists = faiss.VStackInvertedLists(parts.size(), parts.data())
        self._index = faiss.IndexIVFFlat(self._cells, index.d, self._lists.nlist, faiss.METRIC_INNER_PRODUCT)
        self._index.replace_invlists(self._lists, False)
        self._index.is_trained = True

    @staticmethod
    def fits(bands: Sequence[Band]) -> bool:
        """Whether bands are a head and a rest whose cells hold the rows themselves, on a CPU."""
        return (
            [band.kind for band in bands] == ["flat", "ivf_flat"]
            and all(band.gpu is None for band in bands)
            and bands[0].index.d == bands[1].index.d
            and len(bands[0].rows_N) <= HEAD_UP_TO
        )

    def search(
        self, queries_BE: Float32, k: int, probes: int, ids: IdSet, head: int | None = None
    ) -> tuple[Float32, Int64]:
        """The k best of the head and some cells: scores float32 [B, k], descending, and label rows int64 [B, k].

        Args:
            queries_BE: float32, augmented queries.
            k: results of each.
            probes: cells to visit.
            ids: those of the rest that may be found, followed by those of the head.
            head: most frequent labels that are scored whatever the query, rounded up to a size that was given; None:
                the whole head.

        Returns:
            −inf and −1 where there are fewer.
        """
        queries_BE = pad(queries_BE, self._index.d)
        visited_BV = self._visited(queries_BE, min(probes, self._tail_lists), head)
        products_BV = np.zeros(visited_BV.shape, np.float32)  # of which scores of whole rows make no use
        scores_BK, ids_BK = search_cells(self._index, queries_BE, k, visited_BV, products_BV, ids)
        rows_BK = self._tail.rows_N.take(ids_BK, mode="clip")
        in_head = np.flatnonzero(ids_BK >= self._head_from)
        if in_head.size:
            rows_BK.put(in_head, self._head.rows_N[ids_BK.take(in_head) - self._head_from])
        if ids_BK[:, -1].min(initial=0) < 0:
            missing_BK = ids_BK < 0
            scores_BK[missing_BK], rows_BK[missing_BK] = -np.inf, NO_ROW
        return scores_BK, rows_BK

    def _visited(self, queries_BE: Float32, probes: int, head: int | None) -> Int64:
        """The lists that each query visits, int64 [B, V]: the nearest cells, the head's in them, the head's scored."""
        last = len(self._sizes) - 1
        place = last if head is None else min(bisect_left(self._sizes, head), last)
        visited_BV = np.empty((len(queries_BE), probes * (1 + (place < last)) + 1), np.int64)
        cells_BP = self._cells.search(queries_BE, probes)[1]
        visited_BV[:, :probes] = cells_BP
        if place < last:
            start = self._tail_lists * (1 + place) + len(self._sizes)
            # Codes find fewer cells for a query of zeros, which has no nearest: −1, which no search visits.
            visited_BV[:, probes:-1] = np.where(cells_BP < 0, -1, cells_BP + start)
        visited_BV[:, -1] = self._tail_lists + place
        return visited_BV


def _spread(index: Any, rows_NE: Float32, cells_N: Int64, ids_N: Int64) -> Any:
    """An inverted file of some rows over the cells of another."""
    spread = faiss.IndexIVFFlat(index.quantizer, index.d, index.nlist, faiss.METRIC_INNER_PRODUCT)
    spread.is_trained = True
    add_to_cells(spread, rows_NE, cells_N, ids_N)
    return spread
