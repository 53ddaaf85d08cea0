"""Ranking labels for embedded queries: the protocol of rankers, and the ranker that uses the index alone.

Legend: `B` queries in the batch, `b` some of them, `D` embedding dimensions, `E` augmented dimensions, `K`
results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from longtail.bundle import Augmentation, Inputs
from longtail.bundle.arrays import Float32, Int64
from longtail.index import Filter

NO_ROWS = np.empty(0, np.int64)
"""Rows of no label, int64 [0]."""
_NO_SCORES = np.empty(0, np.float32)
_LIKE_K_BITS = 7
"""Queries of up to 127 labels are ranked together, at the largest k; of more, with those of as many binary digits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Queries of one search, embedded, and what each wants.

    Attributes:
        inputs: what the query tower made them from, by name, [B] or [B, P]; empty for embeddings of labels.
        filters: which labels are eligible for each; None if all are.
        priors_BP: float32, weights of the release's priors; None where it has none, or all are 0.
    """

    queries_BD: Float32
    inputs: Inputs
    bias_removal_B: Float32
    popularity_B: Float32
    filters: Sequence[Filter | None]
    k: int
    priors_BP: Float32 | None = None

    def subset(self, queries_b: Int64) -> Batch:
        """The batch of some of these queries, by their places, int64 [b]."""
        return Batch(
            self.queries_BD[queries_b],
            {name: values[queries_b] for name, values in self.inputs.items()},
            self.bias_removal_B[queries_b],
            self.popularity_B[queries_b],
            [self.filters[query] for query in queries_b],
            self.k,
            None if self.priors_BP is None else self.priors_BP[queries_b],
        )


class Ranker(Protocol):
    """Scores `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r` and finds the best labels."""

    @property
    def proposal(self) -> str:
        """Which noise λ multiplies the log of, as GET /v1/release has it."""

    def rank(self, batch: Batch) -> tuple[Float32, Int64]:
        """s in logits, descending, float32 [B, K], and label rows, int64 [B, K]; −inf and −1 where too few are
        eligible.

        Raises:
            InvalidRequestError: names the query whose features cannot be scored.
        """


class LabelSearcher(Protocol):
    """Finds the rows of largest inner product; `index.Searcher` does it with FAISS."""

    labels: int

    def search(
        self, queries_BE: Float32, k: int, filters: Sequence[Filter | None] | None = None
    ) -> tuple[Float32, Int64]:
        """Inner products, descending, and label rows, both [B, k]; −inf and −1 where too few are eligible."""


class HidingSearcher(LabelSearcher, Protocol):
    """A searcher that can be told to find all but some labels; `index.Searcher` is one."""

    def without(self, rows_R: Int64) -> LabelSearcher:
        """A searcher of the same labels and rows that never finds these, int64 [R]."""


@runtime_checkable
class Engine(Protocol):
    """A searcher that asks a server of its own; `index.CollectionSearcher` asks Milvus."""

    @property
    def problem(self) -> str | None:
        """Why the server does not answer now; None: it does."""

    def probe(self) -> None:
        """Ask it whether it does; raises LongtailIndexError."""


class IndexRanker:
    """Ranks by one inner product per label, all dials included: ν, π and priors are the same for every query
    [METHODS §6].

    Args:
        noise: ν in words, as the bundle has it.
    """

    def __init__(self, searcher: LabelSearcher, augmentation: Augmentation, noise: str = "π") -> None:
        self._searcher = searcher
        self._augmentation = augmentation
        self.proposal = "label frequencies" if noise == "π" else noise

    def rank(self, batch: Batch) -> tuple[Float32, Int64]:
        """As `Ranker.rank`; raises nothing of its own."""
        products_BK, rows_BK = self._searcher.search(
            self._augmentation.queries(batch.queries_BD, batch.bias_removal_B, batch.popularity_B, batch.priors_BP),
            batch.k,
            batch.filters if any(filter_ is not None for filter_ in batch.filters) else None,
        )
        return products_BK / np.float32(self._augmentation.temperature), rows_BK


def rank_each(ranker: Ranker, batch: Batch, k_B: Sequence[int]) -> tuple[list[Int64], list[Float32]]:
    """Rows and scores of every query, its own k of them or fewer. Queries of like k are ranked together."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, k in enumerate(k_B):
        groups[max(_LIKE_K_BITS, k.bit_length())].append(place)
    rows_B: list[Int64] = [NO_ROWS] * len(k_B)
    scores_B: list[Float32] = [_NO_SCORES] * len(k_B)
    for places in groups.values():
        part = batch if len(places) == len(k_B) else batch.subset(np.array(places))
        scores_BK, rows_BK = ranker.rank(replace(part, k=max(k_B[place] for place in places)))
        found_B = np.count_nonzero(rows_BK >= 0, axis=1).tolist()
        for at, (place, found) in enumerate(zip(places, found_B, strict=True)):
            end = min(k_B[place], found)
            rows_B[place], scores_B[place] = rows_BK[at, :end], scores_BK[at, :end]
    return rows_B, scores_B
