"""Rank labels by inner products, with ω·c on top.

Legend: `B` queries in the batch, `b` some of them, `D` embedding dimensions, `E` augmented dimensions, `K` results, `R`
label rows, `C` labels with c > 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from longtail.bundle import Augmentation, Inputs
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.sets import is_in
from longtail.index import Filter
from longtail.index.search.candidates import best_columns, no_results, top_k
from longtail.index.search.eligible import Eligible

NO_ROWS = np.empty(0, np.int64)
"""Empty array of rows, int64 [0]."""
_NO_SCORES = np.empty(0, np.float32)
_LIKE_K_BITS = 7
"""Queries with k < 2^7 are ranked together, with the largest k of them; larger k are grouped by binary digits."""


class Boost(NamedTuple):
    """The term ω·c of one query.

    Attributes:
        rows_C: int64, label rows with c > 0, ascending.
        values_C: float32, ω·c in logits, >= 0.
        alone: whether only these labels may be answered, by ω·c alone.
    """

    rows_C: Int64
    values_C: Float32
    alone: bool = False

    def get_values(self, rows_R: Int64) -> Float32:
        """Return ω·c of label rows, float32 [R]; 0 for other labels than `rows_C`."""
        if not self.rows_C.size:
            return np.zeros(len(rows_R), np.float32)
        # Clipped, because a row beyond the last has no position; the comparison below discards it.
        positions_R = np.minimum(np.searchsorted(self.rows_C, rows_R), len(self.rows_C) - 1)
        return np.where(self.rows_C[positions_R] == rows_R, self.values_C[positions_R], np.float32(0))


class Batch(NamedTuple):
    """Embedded queries of one search, with dials and filters of each.

    Attributes:
        inputs: inputs of the query tower by name, [B] or [B, P]; empty for embeddings of labels.
        filters: filter of each query; None if all labels are eligible.
        priors_BP: float32, weights of the release's priors; None if the release has no priors, or all weights are 0.
        boosts_B: ω·c of each query, None for 0; None if no query has one.
        bias_B: float32, weight of the labels' bias b in each query, or one for all.
    """

    queries_BD: Float32
    inputs: Inputs
    bias_removal_B: Float32
    popularity_B: Float32
    filters: Sequence[Filter | None]
    k: int
    priors_BP: Float32 | None = None
    boosts_B: list[Boost | None] | None = None
    bias_B: Float32 | float = 1.0

    def subset(self, queries_b: Int64) -> Batch:
        """Select the queries at some positions, int64 [b]."""
        boosts_b = [self.boosts_B[query] for query in queries_b] if self.boosts_B is not None else []
        return Batch(
            self.queries_BD[queries_b],
            {name: values[queries_b] for name, values in self.inputs.items()},
            self.bias_removal_B[queries_b],
            self.popularity_B[queries_b],
            [self.filters[query] for query in queries_b],
            self.k,
            None if self.priors_BP is None else self.priors_BP[queries_b],
            boosts_b if any(boost is not None for boost in boosts_b) else None,
            self.bias_B if isinstance(self.bias_B, float) else self.bias_B[queries_b],
        )


class LabelSearcher(Protocol):
    """Finds the rows of largest inner product; `index.Searcher` does it with FAISS."""

    labels: int

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """Find inner products, descending, and label rows, both [B, k]; −inf and −1 fill missing results."""

    def scores(self, query_E: Float32, rows_R: Int64, filter_: Filter | None = None) -> Float32:
        """Compute inner products of some rows, ascending, with one query, [R]; −inf where not eligible."""

    def all_scores(self, queries_BE: Float32, filters: Sequence[Filter | None]) -> Float32 | None:
        """Compute inner products of all rows, [B, L]; −inf where not eligible. None: they are too many."""


class HidingSearcher(LabelSearcher, Protocol):
    """A searcher that can exclude labels for good; `index.Searcher` is one."""

    def without(self, rows_R: Int64) -> HidingSearcher:
        """Create a searcher that never finds some further rows, int64 [R]."""

    def restrict(self, eligible: Eligible) -> HidingSearcher:
        """Create a searcher that finds labels of a set alone."""


@runtime_checkable
class Engine(Protocol):
    """A searcher that depends on an external server; `MilvusSearcher` depends on Milvus."""

    @property
    def problem(self) -> str | None:
        """Why the server cannot answer now; None: the server answers."""

    def probe(self) -> None:
        """Check whether the server answers; raises LongtailIndexError."""

    def limit_time(self) -> None:
        """Limit searches to the time that clients wait; before, each may take a minute."""


class Ranker:
    """Rank by `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c` [METHODS §6, §11].

    One inner product per label includes all terms but ω·c, where ν, π and the priors are the same for every query. ω·c
    is added exactly: as c >= 0, a label of the k best is among the k best without ω·c, or has c > 0. Both are
    candidates, and c > 0 is scored exactly.

    Args:
        noise: description of ν in the bundle.

    Attributes:
        proposal: description of the noise whose logarithm λ multiplies.
    """

    def __init__(self, searcher: LabelSearcher, augmentation: Augmentation, noise: str = "π") -> None:
        self._searcher = searcher
        self._augmentation = augmentation
        self.proposal = "label frequencies" if noise == "π" else noise

    def rank_each(self, batch: Batch, k_B: Sequence[int]) -> tuple[list[Int64], list[Float32]]:
        """Rank every query with its own k; returns rows and scores of each, k or fewer.

        Queries with similar k are ranked together.
        """
        groups: dict[int, list[int]] = defaultdict(list)
        for query, k in enumerate(k_B):
            groups[max(_LIKE_K_BITS, k.bit_length())].append(query)
        rows_B: list[Int64] = [NO_ROWS] * len(k_B)
        scores_B: list[Float32] = [_NO_SCORES] * len(k_B)
        for queries in groups.values():
            part = batch if len(queries) == len(k_B) else batch.subset(np.array(queries))
            scores_bK, rows_bK = self.rank(part._replace(k=max([k_B[query] for query in queries])))
            is_full = rows_bK[:, -1].min() >= 0  # missing results are last
            for i, query in enumerate(queries):
                end = k_B[query] if is_full else min(k_B[query], int(np.count_nonzero(rows_bK[i] >= 0)))
                rows_B[query], scores_B[query] = rows_bK[i, :end], scores_bK[i, :end]
        return rows_B, scores_B

    def rank(self, batch: Batch) -> tuple[Float32, Int64]:
        """Rank labels: s in logits, descending, float32 [B, K], and label rows, int64 [B, K].

        −inf and −1 fill the end where too few labels are eligible.

        Raises:
            InvalidRequestError: the features of a query cannot be scored; the error names the query.
        """
        if batch.boosts_B is not None:
            return self._rank_boosted(batch, batch.boosts_B)
        # Without any filter, a searcher need not group the queries by filter.
        products_BK, rows_BK = self._searcher.search(
            self._augmentation.queries(
                batch.queries_BD, batch.bias_removal_B, batch.popularity_B, batch.priors_BP, batch.bias_B
            ),
            batch.k,
            None if batch.filters.count(None) == len(batch.filters) else batch.filters,
        )
        return products_BK / np.float32(self._augmentation.temperature), rows_BK

    def scores(self, batch: Batch, rows_B: Sequence[Int64]) -> list[Float32]:
        """Score each query's own label rows, int64 [R], ascending, without ω·c; −inf where not eligible.

        Raises InvalidRequestError like `rank`.
        """
        temperature = np.float32(self._augmentation.temperature)
        return [
            self._searcher.scores(query_E, rows_R, filter_) / temperature
            for query_E, rows_R, filter_ in zip(self._augmented(batch), rows_B, batch.filters, strict=True)
        ]

    def all_scores(self, batch: Batch) -> Float32 | None:
        """Score every label without ω·c, float32 [B, L]; −inf where not eligible. None: they are too many."""
        products_BL = self._searcher.all_scores(self._augmented(batch), batch.filters)
        return None if products_BL is None else products_BL / np.float32(self._augmentation.temperature)

    def _augmented(self, batch: Batch) -> Float32:
        return self._augmentation.queries(
            batch.queries_BD, batch.bias_removal_B, batch.popularity_B, batch.priors_BP, batch.bias_B
        )

    def _rank_boosted(self, batch: Batch, boosts_B: Sequence[Boost | None]) -> tuple[Float32, Int64]:
        """Rank with ω·c of at least one query."""
        batch = batch._replace(boosts_B=None)
        if (scores_BL := self.all_scores(batch)) is not None:
            for scores_L, boost in zip(scores_BL, boosts_B, strict=True):
                if boost is not None and boost.alone:
                    scores_C = np.where(scores_L[boost.rows_C] > -np.inf, boost.values_C, np.float32(-np.inf))
                    scores_L[:] = -np.inf
                    scores_L[boost.rows_C] = scores_C
                elif boost is not None:
                    scores_L[boost.rows_C] += boost.values_C
            return best_columns(scores_BL, batch.k)
        if all(boost is not None and boost.alone for boost in boosts_B):
            scores_BK, rows_BK = no_results(len(boosts_B), batch.k)
        else:
            scores_BK, rows_BK = self.rank(batch)
        boosts = {query: boost for query, boost in enumerate(boosts_B) if boost is not None}
        part = batch if len(boosts) == len(boosts_B) else batch.subset(np.array(list(boosts)))
        exact = self.scores(part, [boost.rows_C for boost in boosts.values()])
        for (query, boost), exact_C in zip(boosts.items(), exact, strict=True):
            scores_C = exact_C + boost.values_C
            if boost.alone:
                scores_BK[query] = -np.inf
                scores_C = np.where(exact_C > -np.inf, boost.values_C, np.float32(-np.inf))
            # A label of both sources that rounding puts below the k-th best keeps the index's score.
            better_C = np.flatnonzero(scores_C >= scores_BK[query, -1])
            scores_C, rows_C = scores_C[better_C], boost.rows_C[better_C]
            scores_BK[query, is_in(rows_BK[query], rows_C)] = -np.inf
            one_query = slice(query, query + 1)
            scores_BK[one_query], rows_BK[one_query] = top_k(
                [scores_BK[one_query], scores_C[None]], [rows_BK[one_query], rows_C[None]], scores_BK.shape[1]
            )
        return scores_BK, rows_BK
