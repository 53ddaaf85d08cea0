"""Search a FAISS index over all labels, whose ids are catalogue rows.

Legend: `L` labels, `B` queries, `C` candidates or inverted lists, `P` visited lists of a query, `V` of all queries, `E`
coordinates of an augmented row.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.manifests import Kind, SearchParams
from longtail.index.search.candidates import NO_ROW, has_blank, top_k
from longtail.index.search.eligible import Eligible
from longtail.index.search.gpu import GPU_MAX_RESULTS, GpuIndex

MEASURED_DEPTH = 100
"""Results per query at which recall is measured; deeper searches visit more lists than measured."""
_PROBES_PER_DEPTH = 1.5
"""Exponent by which the visited lists grow with depth. The k best of a share of the labels lie among about the
k / share best of all, and results further out spread over ever more lists: the second table of
benchmarks/index_recall.py shows the gain of the exponent."""
NEARLY_WHOLE = 0.98
"""Share of eligible labels from which a search counts as unfiltered; FAISS skips the few other labels."""
_MARGIN = 100
"""Extra results that the GPU fetches before ineligible ones are dropped: a few hidden labels are a negligible share of
the catalogue, but may all be the best of one query."""
_SPARE = 16
"""Extra results fetched where nearly all labels are eligible: a selector would cost every label that is scored."""
_CODED: tuple[Kind, ...] = ("ivf_sq", "ivf_fastscan")
"""Kinds that store rows as codes. Their short answers fetch the candidates of `MEASURED_DEPTH` results: codes confuse
the ten best with more labels than a multiple of ten covers."""
ON_GPU: tuple[Kind, ...] = ("flat", "ivf_flat")
"""Kinds that a GPU can search."""


class FaissIndex:
    """A FAISS index over all labels. Safe for concurrent searches.

    Args:
        index: the FAISS index; id i is label row i.
        stored_lists_L: int32, the inverted list of every row; None: read from the index when needed.
        gpu: copy of the index on a GPU, which answers the searches that a GPU can do.
        head_lists: number of lists of the head, the last ones.

    Attributes:
        labels: number of labels, L.
        width: coordinates of a row in the index, at least E.
        lossy: whether scores are approximations, to be computed again exactly.
        has_lists: whether the index is an inverted file.
        list_count: number of inverted lists; 1 without any.
    """

    def __init__(
        self, kind: Kind, factory: str, index: Any, stored_lists_L: Int32 | None = None, gpu: GpuIndex | None = None,
        head_lists: int = 0,
    ) -> None:  # fmt: skip
        self.kind, self.factory, self.index, self.gpu, self.head_lists = kind, factory, index, gpu, head_lists
        self._stored_lists_L = stored_lists_L
        self.labels, self.width = int(index.ntotal), int(index.d)
        self.lossy, self.has_lists = kind in _CODED, kind != "flat"
        self.list_count = int(index.nlist) if self.has_lists else 1

    @cached_property
    def lists(self) -> Int32:
        """Get the inverted list of every row, int32 [L]."""
        if self._stored_lists_L is not None:
            return self._stored_lists_L
        lists_L = np.empty(self.labels, np.int32)
        inverted = self.index.invlists
        for list_number in range(self.index.nlist):
            if size := inverted.list_size(list_number):
                lists_L[faiss.rev_swig_ptr(inverted.get_ids(list_number), size)] = list_number
        return lists_L

    @cached_property
    def columns(self) -> Float32:
        """Get a flat index's rows as columns, float32 [E, L]: products read them twice as fast."""
        # A view of FAISS's memory, so that only the transposed copy is new.
        stored_LE = faiss.rev_swig_ptr(self.index.get_xb(), self.labels * self.index.d).reshape(self.labels, -1)
        return np.ascontiguousarray(stored_LE.T)

    @cached_property
    def centroids(self) -> Float32:
        """Get the centroids of an inverted file, float32 [C, E]."""
        centroids_CE: Float32 = self.index.quantizer.reconstruct_n(0, self.index.nlist)
        return centroids_CE

    @cached_property
    def _sizes(self) -> Int64:
        return np.bincount(self.lists, minlength=self.index.nlist)

    def search(
        self, queries_BE: Float32, k: int, params: SearchParams, eligible: Eligible, boost: float = 1.0
    ) -> tuple[Float32, Int64]:
        """Find the index's best candidates: scores float32 [B, C] and label rows int64 [B, C].

        C >= min(k, L). Missing candidates are −inf / −1. An approximate index may miss some of the best k.
        """
        filtered = eligible.share < NEARLY_WHOLE
        fetch = k
        if self.lossy:
            fetch = max(k, MEASURED_DEPTH) * (math.ceil(params.k_factor * boost) if filtered else params.k_factor)
        fetch = min(fetch, self.labels)
        # Lists for filters were measured with 100 results; fewer results need the same lists.
        nprobe = scale_nprobe(params, max(k, MEASURED_DEPTH) if filtered else k, eligible.share)
        if queries_BE.shape[1] < self.width:
            queries_BE = pad(queries_BE, self.width)
        if self.gpu is not None and not params.head and self._overfetch(fetch, eligible) <= GPU_MAX_RESULTS:
            scores_BC, rows_BC = self._search_gpu(self.gpu, queries_BE, fetch, nprobe, eligible)
        elif self.has_lists and filtered:
            lists_BP, products_BP = self.nearest_lists(queries_BE, k, params.nprobe, eligible, boost)
            scores_BC, rows_BC = self._search_lists(queries_BE, fetch, lists_BP, products_BP, eligible)
        elif eligible.is_complete or filtered:
            scores_BC, rows_BC = self._search_cpu(queries_BE, fetch, nprobe, eligible, head=params.head)
        else:
            more = min(fetch + _SPARE + fetch // _SPARE, self.labels)
            scores_BC, rows_BC = self._search_cpu(queries_BE, more, nprobe, None, head=params.head)
            scores_BC, rows_BC = self._without_ineligible(queries_BE, scores_BC, rows_BC, fetch, nprobe, eligible)
        if has_blank(rows_BC):  # FAISS writes what is missing last
            scores_BC[rows_BC < 0] = -np.inf
        return scores_BC, rows_BC

    def nearest_lists(
        self, queries_BE: Float32, k: int, nprobe: int, eligible: Eligible, boost: float
    ) -> tuple[Int64, Float32]:
        """Choose the lists that each query visits under a filter, nearest first.

        Returns lists int64 and inner products with their centroids float32 [B, P]; −1 fills the rows of queries that
        visit fewer lists. Lists without an eligible label are skipped. Each query visits lists until it has seen as
        many eligible labels as the depth of its answer needs; that depth is estimated by the share of eligible labels
        in the lists nearest to the query.
        """
        counts_C = eligible.per_list(self.lists, self.list_count)
        products_BC = queries_BE @ self.centroids.T
        order_BC = np.argsort(-products_BC, axis=1)
        counts_BC = counts_C[order_BC]
        eligible_BC = np.cumsum(counts_BC, axis=1)
        labels_BC = np.cumsum(self._sizes[order_BC], axis=1)
        # Labels that an unfiltered search of `nprobe` lists sees.
        seen_B = labels_BC[:, min(nprobe, self.list_count) - 1]
        share_B = _pick_values(eligible_BC, eligible_BC, seen_B) / _pick_values(labels_BC, eligible_BC, seen_B)
        depth_B = max(k, MEASURED_DEPTH) / (MEASURED_DEPTH * share_B)
        required_B = boost * seen_B * share_B * depth_B**_PROBES_PER_DEPTH
        # A list is visited if the nearer lists hold fewer eligible labels than required.
        visited_BC = (eligible_BC - counts_BC < required_B[:, None]) & (counts_BC > 0)
        positions_BC = np.cumsum(visited_BC, axis=1) - 1
        query_V, rank_V = np.nonzero(visited_BC)
        shape = len(queries_BE), int(positions_BC[:, -1].max()) + 1
        lists_BP, products_BP = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        lists_V, positions_V = order_BC[query_V, rank_V], positions_BC[query_V, rank_V]
        lists_BP[query_V, positions_V], products_BP[query_V, positions_V] = lists_V, products_BC[query_V, lists_V]
        return lists_BP, products_BP

    def _search_lists(
        self, queries_BE: Float32, fetch: int, lists_BP: Int64, products_BP: Float32, eligible: Eligible | None
    ) -> tuple[Float32, Int64]:
        """Search some lists of every query for eligible labels; None: for all."""
        scores, rows = np.empty((len(queries_BE), fetch), np.float32), np.empty((len(queries_BE), fetch), np.int64)
        # FAISS's Python method `search_preassigned` accepts no search parameters, hence no selector.
        self.index.search_preassigned_c(
            len(queries_BE), faiss.swig_ptr(queries_BE), fetch, faiss.swig_ptr(lists_BP), faiss.swig_ptr(products_BP),
            faiss.swig_ptr(scores), faiss.swig_ptr(rows), False,
            self._parameters(lists_BP.shape[1], eligible),
        )  # fmt: skip
        return scores, rows

    def _parameters(self, nprobe: int, eligible: Eligible | None) -> Any:
        if eligible is None or eligible.is_complete:
            return _visiting(nprobe)
        return eligible.parameters(faiss.SearchParametersIVF, nprobe=nprobe)

    def _search_cpu(
        self, queries_BE: Float32, fetch: int, nprobe: int, eligible: Eligible | None, *, head: bool = False
    ) -> tuple[Float32, Int64]:
        """Search the CPU's index for eligible labels; None: for all."""
        if head and nprobe + self.head_lists < self.list_count:
            return self._search_with_head(queries_BE, fetch, nprobe, eligible)
        nprobe += self.head_lists * head  # all lists
        if self.has_lists:
            parameters = self._parameters(min(nprobe, self.list_count), eligible)
        else:
            parameters = (
                None if eligible is None or eligible.is_complete else eligible.parameters(faiss.SearchParameters)
            )
        scores, rows = np.empty((len(queries_BE), fetch), np.float32), np.empty((len(queries_BE), fetch), np.int64)
        # The checks in FAISS's Python method `search` take as long as scoring some 200 labels.
        queries_BE = np.ascontiguousarray(queries_BE)
        self.index.search_c(
            len(queries_BE), faiss.swig_ptr(queries_BE), fetch, faiss.swig_ptr(scores), faiss.swig_ptr(rows), parameters
        )
        return scores, rows

    def _search_with_head(
        self, queries_BE: Float32, fetch: int, nprobe: int, eligible: Eligible | None
    ) -> tuple[Float32, Int64]:
        """Search the nearest lists and those of the head."""
        first = self.list_count - self.head_lists
        lists_BP = np.empty((len(queries_BE), nprobe), np.int64)
        products_BP = np.empty(lists_BP.shape, np.float32)
        queries_BE = np.ascontiguousarray(queries_BE)
        self._quantizer.search_c(
            len(queries_BE), faiss.swig_ptr(queries_BE), nprobe, faiss.swig_ptr(products_BP), faiss.swig_ptr(lists_BP),
            None,
        )  # fmt: skip
        lists_BP[lists_BP >= first] = -1  # otherwise a label would be returned twice
        head_BP = np.arange(first, self.list_count)[None].repeat(len(queries_BE), axis=0)
        lists_BP = np.concatenate([lists_BP, head_BP], axis=1)
        products_BP = np.concatenate([products_BP, queries_BE @ self._head_centroids.T], axis=1)
        return self._search_lists(queries_BE, fetch, lists_BP, products_BP, eligible)

    @cached_property
    def _quantizer(self) -> Any:
        return faiss.downcast_index(self.index.quantizer)

    @cached_property
    def _head_centroids(self) -> Float32:
        return self.centroids[self.list_count - self.head_lists :]

    def _search_gpu(
        self, gpu: GpuIndex, queries_BE: Float32, fetch: int, nprobe: int, eligible: Eligible
    ) -> tuple[Float32, Int64]:
        """Fetch extra results from the GPU and drop ineligible ones; the CPU answers queries left short."""
        # GPU indexes ignore `IDSelector`, so the filter is applied afterwards.
        overfetch = self._overfetch(fetch, eligible)
        scores_BC, rows_BC = gpu.search(queries_BE, overfetch, min(nprobe, self.list_count, GPU_MAX_RESULTS))
        if eligible.is_complete:
            return scores_BC, rows_BC
        return self._without_ineligible(queries_BE, scores_BC, rows_BC, fetch, nprobe, eligible)

    def _without_ineligible(
        self, queries_BE: Float32, scores_BC: Float32, rows_BC: Int64, fetch: int, nprobe: int, eligible: Eligible
    ) -> tuple[Float32, Int64]:
        """Drop ineligible candidates; queries left with fewer than `fetch` are searched once more by the CPU."""
        is_eligible_BC = eligible.contains(rows_BC)
        if is_eligible_BC.all():
            return scores_BC[:, :fetch], rows_BC[:, :fetch]
        scores_BC[~is_eligible_BC], rows_BC[~is_eligible_BC] = -np.inf, NO_ROW
        short = np.flatnonzero(np.count_nonzero(is_eligible_BC, axis=1) < min(fetch, eligible.count))
        if short.size:
            scores_BC[short], rows_BC[short] = -np.inf, NO_ROW
            scores_BC[short, :fetch], rows_BC[short, :fetch] = self._search_cpu(
                queries_BE[short], fetch, nprobe, eligible
            )
        return top_k([scores_BC], [rows_BC], fetch)

    def _overfetch(self, fetch: int, eligible: Eligible) -> int:
        """Estimate how many results are likely to contain `fetch` eligible ones."""
        if eligible.is_complete:
            return fetch
        ruled_out = self.labels - eligible.count
        return min(math.ceil(fetch / eligible.share) + min(ruled_out, _MARGIN), self.labels)


def scale_nprobe(params: SearchParams, k: int, share: float) -> int:
    """Compute the lists to visit for k results if a share of labels is eligible."""
    depth = k / (MEASURED_DEPTH * share)
    return params.nprobe if depth <= 1 else math.ceil(params.nprobe * depth**_PROBES_PER_DEPTH)


@lru_cache(1_024)
def _visiting(nprobe: int) -> Any:
    """Create FAISS's parameters of searches among all labels, which cost as much as scoring 500; threads share them."""
    return faiss.SearchParametersIVF(nprobe=nprobe)


def pad(rows_LE: Float32, width: int) -> Float32:
    """Pad rows with zero coordinates to contiguous float32 [L, width]."""
    if rows_LE.shape[1] == width:
        return np.ascontiguousarray(rows_LE, np.float32)
    padded = np.zeros((len(rows_LE), width), np.float32)
    padded[:, : rows_LE.shape[1]] = rows_LE
    return padded


def _pick_values(values_BC: Int64, eligible_BC: Int64, seen_B: Int64) -> Int64:
    """Return each query's value at the list that completes `seen_B` eligible labels, or all.

    Values are at least 1, so that they can be divided by.
    """
    enough_BC = eligible_BC >= np.minimum(seen_B[:, None], eligible_BC[:, -1:])
    values_B: Int64 = values_BC[np.arange(len(values_BC)), enough_BC.argmax(axis=1)]
    return np.maximum(values_B, 1)
