"""Search a FAISS index over all labels, whose ids are catalogue rows, together with an exact head.

An approximate index alone loses recall as λ and μ grow, because log ν and log π then decide the score. So the labels
of largest reach, the head, are multiplied with every query, and the index adds candidates from all labels.

Legend: `L` labels, `H` labels of the head, `B` queries, `C` candidates or inverted lists, `P` lists visited, `E`
coordinates of an augmented row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import faiss
import numpy as np

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.index.manifests import Effort, Kind
from longtail.index.search.candidates import NO_ROW, kth_best, no_results, top_k
from longtail.index.search.eligible import Eligible
from longtail.index.search.gpu import GPU_MAX_RESULTS, GpuIndex

MEASURED_DEPTH = 100
"""Results per query at which recall is measured; deeper searches use more than the measured effort."""
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
_SCORES_AT_ONCE = 1 << 20
"""Largest number of exact scores held at once: 4 MiB."""
_TOLERANCE = 1e-4
"""Bound on the difference between FAISS's and NumPy's score of the same label, relative to 1 + |score|."""

_CODED: tuple[Kind, ...] = ("ivf_sq", "ivf_fastscan")
"""Kinds that store rows as codes. Their short answers fetch the candidates of `MEASURED_DEPTH` results: codes confuse
the ten best with more labels than a multiple of ten covers."""
ON_GPU: tuple[Kind, ...] = ("flat", "ivf_flat")
"""Kinds that a GPU can search."""


class Head:
    """Labels that are scored for every query, largest reach first: rows int64 [H] and augmented rows float32 [H, E]."""

    def __init__(self, rows_H: Int64, vectors_HE: Float32) -> None:
        self.rows_H = rows_H
        self.vectors_HE = vectors_HE
        self._order_H = np.argsort(rows_H)
        self._ascending_H = rows_H[self._order_H]

    def __len__(self) -> int:
        return len(self.rows_H)

    def _places(self, rows: Int64) -> Int64:
        """Find the place of each row in the head; the head's length for other rows."""
        at = np.minimum(np.searchsorted(self._ascending_H, rows), len(self) - 1)
        places: Int64 = np.where(self._ascending_H[at] == rows, self._order_H[at], len(self))
        return places

    def count(self, eligible: Eligible) -> int:
        """Count the eligible labels of the head."""
        return len(self) - len(eligible.outside(self.rows_H, self._places))

    def _outside(self, eligible: Eligible, size: int) -> Int64:
        """Get the places among the first `size` whose labels are not eligible, int64."""
        outside_H = eligible.outside(self.rows_H, self._places)
        return outside_H if size == len(self) else outside_H[: np.searchsorted(outside_H, size)]

    def best(self, queries_BE: Float32, k: int, eligible: Eligible) -> tuple[Float32, Int64]:
        """Get the k best eligible labels of the head: float32 and int64 [B, k]; −inf and −1 beyond."""
        step = max(1, _SCORES_AT_ONCE // len(self))
        if len(queries_BE) > step:
            parts = [self.best(queries_BE[i : i + step], k, eligible) for i in range(0, len(queries_BE), step)]
            return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])
        scores_BH = queries_BE @ self.vectors_HE.T
        if not eligible.whole:
            scores_BH[:, self._outside(eligible, len(self))] = -np.inf
        return top_k([scores_BH], [np.broadcast_to(self.rows_H, scores_BH.shape)], k)

    def merge(
        self, queries_BE: Float32, k: int, size: int, eligible: Eligible, scores_BC: Float32, rows_BC: Int64
    ) -> tuple[Float32, Int64]:
        """Get the k best of an index's candidates and of the head: float32 and int64 [B, k]; −inf and −1 beyond.

        A label that both the index and the head find counts once. `scores_BC` is overwritten.
        """
        if len(queries_BE) == 1:
            return self._merge_one(queries_BE[0], k, size, eligible, scores_BC, rows_BC)
        # Head labels below the k-th candidate cannot be in the answer; the tolerance covers rounding.
        least_B = kth_best(scores_BC, k)
        least_B -= _TOLERANCE * (1 + np.abs(least_B))
        # The index holds the head's labels too: only their exact score from the head counts.
        scores_BC[self._places(rows_BC) < size] = -np.inf
        ruled_out = None if eligible.whole else self._outside(eligible, size)
        found_B, found_H, found = [], [], []
        step = max(1, _SCORES_AT_ONCE // max(1, size))
        for start in range(0, len(queries_BE), step):
            scores_bH = queries_BE[start : start + step] @ self.vectors_HE[:size].T
            if ruled_out is not None:
                scores_bH[:, ruled_out] = -np.inf
            least_b = least_B[start : start + step]
            # Where the index found fewer than k, the head's own k-th best bounds the answer.
            if np.isneginf(least_b).any():
                least_b = np.maximum(least_b, kth_best(scores_bH, k))
            at_b, at_H = np.nonzero(scores_bH >= least_b[:, None])
            found_B.append(at_b + start)
            found_H.append(at_H)
            found.append(scores_bH[at_b, at_H])
        at_B, at_H = np.concatenate(found_B), np.concatenate(found_H)
        counts_B = np.bincount(at_B, minlength=len(queries_BE))
        # `at_B` ascends: a hit's column is its position minus the position of its query's first hit.
        places = np.arange(len(at_B)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
        own_BC, own_rows_BC = no_results(len(queries_BE), int(counts_B.max()))
        own_BC[at_B, places], own_rows_BC[at_B, places] = np.concatenate(found), self.rows_H[at_H]
        return top_k([own_BC, scores_BC], [own_rows_BC, rows_BC], k)

    def _merge_one(
        self, query_E: Float32, k: int, size: int, eligible: Eligible, scores_1C: Float32, rows_1C: Int64
    ) -> tuple[Float32, Int64]:
        """Merge for one query, in a third of the time that the batched code takes."""
        scores_H = self.vectors_HE[:size] @ query_E
        if not eligible.whole:
            scores_H[self._outside(eligible, size)] = -np.inf
        rows_C, least = rows_1C[0], float(kth_best(scores_1C, k)[0])
        # Head labels that the index found already count once, with the index's score.
        places_C = self._places(rows_C)
        scores_H[places_C[places_C < size]] = -np.inf
        if least == -np.inf and size > k:
            least = float(np.partition(scores_H, -k)[-k])
        new = (scores_H >= least).nonzero()[0]
        if new.size:
            scores_1C = np.concatenate([scores_1C[0], scores_H[new]])[None]
            rows_1C = np.concatenate([rows_C, self.rows_H[new]])[None]
        return top_k([scores_1C], [rows_1C], k)


@dataclass(frozen=True)
class FaissIndex:
    """A FAISS index over all labels, with its exact head. Safe for concurrent searches.

    Attributes:
        index: the FAISS index; id i is label row i.
        head: labels scored for every query; None: the index alone answers.
        stored_lists_L: int32, the inverted list of every row; None: read from the index when needed.
        gpu: copy of the index on a GPU, which answers the searches that a GPU can do.
    """

    kind: Kind
    factory: str
    index: Any
    head: Head | None = None
    stored_lists_L: Int32 | None = None
    gpu: GpuIndex | None = None

    @cached_property
    def labels(self) -> int:
        """Number of labels L."""
        return int(self.index.ntotal)

    @cached_property
    def lossy(self) -> bool:
        """Whether the index's scores are approximations, to be scored again exactly."""
        return self.kind in _CODED

    @cached_property
    def has_lists(self) -> bool:
        """Whether the index is an inverted file."""
        return self.kind != "flat"

    @cached_property
    def lists(self) -> Int32:
        """Get the inverted list of every row, int32 [L]."""
        if self.stored_lists_L is not None:
            return self.stored_lists_L
        lists_L = np.empty(self.labels, np.int32)
        inverted = self.index.invlists
        for place in range(self.index.nlist):
            if size := inverted.list_size(place):
                lists_L[faiss.rev_swig_ptr(inverted.get_ids(place), size)] = place
        return lists_L

    @cached_property
    def columns(self) -> Float32:
        """Get the rows of a flat index as columns, float32 [E, L], which a product reads twice as fast."""
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
        self, queries_BE: Float32, k: int, effort: Effort, eligible: Eligible, boost: float = 1.0
    ) -> tuple[Float32, Int64]:
        """Find the index's best candidates: scores float32 [B, C] and label rows int64 [B, C].

        C >= min(k, L). Missing candidates are −inf / −1. An approximate index may miss some of the best k.
        """
        share = 1.0 if eligible.whole else self.share_outside_head(eligible)
        filtered = share < NEARLY_WHOLE
        refine = math.ceil(effort.refine * boost) if filtered and self.lossy else effort.refine
        wanted = max(k, MEASURED_DEPTH) if self.lossy else k
        fetch = min(wanted * refine, self.labels)
        probes = probes_for(effort, k, share)
        if queries_BE.shape[1] < self.index.d:
            queries_BE = pad(queries_BE, self.index.d)
        if self.gpu is not None and self._overfetch(fetch, eligible) <= GPU_MAX_RESULTS:
            scores_BC, rows_BC = self._search_gpu(self.gpu, queries_BE, fetch, probes, eligible)
        elif self.has_lists and filtered:
            lists_BP, products_BP = self.nearest_lists(queries_BE, k, effort.probes, eligible, boost)
            scores_BC, rows_BC = self._search_lists(queries_BE, fetch, lists_BP, products_BP, eligible)
        elif not eligible.whole and eligible.share >= NEARLY_WHOLE:
            more = min(fetch + _SPARE + fetch // _SPARE, self.labels)
            scores_BC, rows_BC = self._search_cpu(queries_BE, more, probes, None)
            scores_BC, rows_BC = self._without_ineligible(queries_BE, scores_BC, rows_BC, fetch, probes, eligible)
        else:
            scores_BC, rows_BC = self._search_cpu(queries_BE, fetch, probes, eligible)
        if rows_BC[:, -1].min() < 0:  # FAISS writes what is missing last
            scores_BC[rows_BC < 0] = -np.inf
        return scores_BC, rows_BC

    def share_outside_head(self, eligible: Eligible) -> float:
        """Compute which share of the labels outside the head is eligible; the index has to find those."""
        if self.head is None or eligible.whole:
            return eligible.share
        outside = eligible.count - self.head.count(eligible)
        return outside / max(1, self.labels - len(self.head))

    def nearest_lists(
        self, queries_BE: Float32, k: int, probes: int, eligible: Eligible, boost: float
    ) -> tuple[Int64, Float32]:
        """Choose the lists that each query visits under a filter, nearest first.

        Returns lists int64 and inner products with their centroids float32 [B, P]; −1 fills the rows of queries that
        visit fewer lists. Lists without an eligible label are skipped. Each query visits lists until it has seen as
        many eligible labels as the depth of its answer needs; that depth is estimated by the share of eligible labels
        in the lists nearest to the query.
        """
        counts_C = eligible.per_list(self.lists, self.index.nlist)
        products_BC = queries_BE @ self.centroids.T
        order_BC = np.argsort(-products_BC, axis=1)
        counts_BC = counts_C[order_BC]
        eligible_BC = np.cumsum(counts_BC, axis=1)
        labels_BC = np.cumsum(self._sizes[order_BC], axis=1)
        # Labels that an unfiltered search of `probes` lists sees on average.
        seen = probes * self.labels / self.index.nlist
        share_B = _at(eligible_BC, eligible_BC, seen) / _at(labels_BC, eligible_BC, seen)
        # The few best of a selection take as much effort to find as its hundred best.
        depth_B = max(k, MEASURED_DEPTH) / (MEASURED_DEPTH * share_B)
        wanted_B = boost * seen * share_B * depth_B**_PROBES_PER_DEPTH
        # A list is visited if the lists before it hold fewer eligible labels than wanted.
        visited_BC = (eligible_BC - counts_BC < wanted_B[:, None]) & (counts_BC > 0)
        places_BC = np.cumsum(visited_BC, axis=1) - 1
        at_B, at_C = np.nonzero(visited_BC)
        shape = len(queries_BE), int(places_BC[:, -1].max()) + 1
        lists_BP, products_BP = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
        lists, places = order_BC[at_B, at_C], places_BC[at_B, at_C]
        lists_BP[at_B, places], products_BP[at_B, places] = lists, products_BC[at_B, lists]
        return lists_BP, products_BP

    def _search_lists(
        self, queries_BE: Float32, fetch: int, lists_BP: Int64, products_BP: Float32, eligible: Eligible
    ) -> tuple[Float32, Int64]:
        scores, rows = np.empty((len(queries_BE), fetch), np.float32), np.empty((len(queries_BE), fetch), np.int64)
        # FAISS's Python method `search_preassigned` accepts no search parameters, hence no selector.
        self.index.search_preassigned_c(
            len(queries_BE), faiss.swig_ptr(queries_BE), fetch, faiss.swig_ptr(lists_BP), faiss.swig_ptr(products_BP),
            faiss.swig_ptr(scores), faiss.swig_ptr(rows), False,
            eligible.parameters(faiss.SearchParametersIVF, nprobe=lists_BP.shape[1]),
        )  # fmt: skip
        return scores, rows

    def _search_cpu(
        self, queries_BE: Float32, fetch: int, probes: int, eligible: Eligible | None
    ) -> tuple[Float32, Int64]:
        """Search the CPU's index for eligible labels; None: for all."""
        knobs = {"nprobe": min(probes, self.index.nlist)} if self.has_lists else {}
        kind = faiss.SearchParametersIVF if self.has_lists else faiss.SearchParameters
        parameters = kind(**knobs) if eligible is None else eligible.parameters(kind, **knobs)
        scores, rows = np.empty((len(queries_BE), fetch), np.float32), np.empty((len(queries_BE), fetch), np.int64)
        # The checks in FAISS's Python method `search` take as long as scoring some 200 labels.
        queries_BE = np.ascontiguousarray(queries_BE)
        self.index.search_c(
            len(queries_BE), faiss.swig_ptr(queries_BE), fetch, faiss.swig_ptr(scores), faiss.swig_ptr(rows), parameters
        )
        return scores, rows

    def _search_gpu(
        self, gpu: GpuIndex, queries_BE: Float32, fetch: int, probes: int, eligible: Eligible
    ) -> tuple[Float32, Int64]:
        """Fetch extra results from the GPU and drop ineligible ones; the CPU answers queries left short."""
        # GPU indexes ignore `IDSelector`, so the filter is applied afterwards.
        lists = getattr(self.index, "nlist", 1)
        overfetch = self._overfetch(fetch, eligible)
        scores_BC, rows_BC = gpu.search(queries_BE, overfetch, min(probes, lists, GPU_MAX_RESULTS))
        if eligible.whole:
            return scores_BC, rows_BC
        return self._without_ineligible(queries_BE, scores_BC, rows_BC, fetch, probes, eligible)

    def _without_ineligible(
        self, queries_BE: Float32, scores_BC: Float32, rows_BC: Int64, fetch: int, probes: int, eligible: Eligible
    ) -> tuple[Float32, Int64]:
        """Drop ineligible candidates; queries left with fewer than `fetch` are searched once more by the CPU."""
        kept_BC = eligible.contains(rows_BC)
        if kept_BC.all():
            return scores_BC[:, :fetch], rows_BC[:, :fetch]
        scores_BC[~kept_BC], rows_BC[~kept_BC] = -np.inf, NO_ROW
        short = np.flatnonzero(np.count_nonzero(kept_BC, axis=1) < min(fetch, eligible.count))
        if short.size:
            scores_BC[short], rows_BC[short] = -np.inf, NO_ROW
            scores_BC[short, :fetch], rows_BC[short, :fetch] = self._search_cpu(
                queries_BE[short], fetch, probes, eligible
            )
        return top_k([scores_BC], [rows_BC], fetch)

    def _overfetch(self, fetch: int, eligible: Eligible) -> int:
        """Estimate how many results are likely to contain `fetch` eligible ones."""
        if eligible.whole:
            return fetch
        ruled_out = self.labels - eligible.count
        return min(math.ceil(fetch / eligible.share) + min(ruled_out, _MARGIN), self.labels)


def probes_for(effort: Effort, k: int, share: float) -> int:
    """Compute the number of lists to visit for k results where a share of labels is eligible."""
    depth = max(1.0, k / (MEASURED_DEPTH * share))
    probes: int = math.ceil(effort.probes * depth**_PROBES_PER_DEPTH)
    return probes


def pad(rows_LE: Float32, width: int) -> Float32:
    """Pad rows with zero coordinates to contiguous float32 [L, width]."""
    if rows_LE.shape[1] == width:
        return np.ascontiguousarray(rows_LE, np.float32)
    padded = np.zeros((len(rows_LE), width), np.float32)
    padded[:, : rows_LE.shape[1]] = rows_LE
    return padded


def _at(values_BC: Int64, eligible_BC: Int64, seen: float) -> Int64:
    """Return each query's value at the list that completes `seen` eligible labels, or all.

    Values are at least 1, so that they can be divided by.
    """
    enough_BC = eligible_BC >= np.minimum(seen, eligible_BC[:, -1:])
    at_B: Int64 = values_BC[np.arange(len(values_BC)), enough_BC.argmax(axis=1)]
    return np.maximum(at_B, 1)
