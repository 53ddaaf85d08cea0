"""Nearest neighbours of queries and of labels in the training pairs, and those that a batch is held to.

Legend: `Q` queries, `L` labels, `R` either, `N` training pairs, `B` batch, `K` neighbours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.trainer.config.nearest import NeighboursConfig
from longtail.trainer.data.pairs import Pairs

OF_NEIGHBOUR = "_neighbour "
"""Before the name of what the query tower reads of neighbours."""


@dataclass(frozen=True)
class Nearest:
    """The K nearest queries of every query, and labels of every label, nearest first; −1 where there are fewer.

    Attributes:
        queries_QK: query rows, int32; None if queries are held to none.
        labels_LK: label rows, int32; None if labels are held to none.
    """

    queries_QK: Int32 | None
    labels_LK: Int32 | None

    @classmethod
    def of(cls, config: NeighboursConfig, train: Pairs, *, queries: int, labels: int) -> Self:
        """Of the training pairs, each as often as once and whatever it weighs."""

        def found(side: str, rows: Int32, columns: Int32, shape: tuple[int, int]) -> Int32 | None:
            return nearest_rows(rows, columns, shape=shape, k=config.k) if side in config.sides else None

        return cls(
            found("query", train.queries, train.labels, (queries, labels)),
            found("label", train.labels, train.queries, (labels, queries)),
        )

    def columns(
        self, train: Pairs, rows_B: Int64, of_queries: Callable[[Int32], Inputs], rng: np.random.Generator
    ) -> Inputs:
        """Return what a step reads of the neighbours of a batch, one drawn for each row among those that there are.

        `_near_label` int32 [B, K], those of the positives, and `_neighbour` int32 [B], the label drawn of them;
        `_query` int32 [B], the rows' queries, `_near_query` int32 [B, K], and of the queries drawn the tower's inputs
        by `OF_NEIGHBOUR` and their names. Who has no neighbour stands in its place.

        Args:
            rows_B: rows of the batch among them, int64.
            of_queries: the tower's inputs of query rows, int32 [B], as they stand after all training pairs.
        """
        columns: Inputs = {}
        if self.labels_LK is not None:
            labels_B = train.labels[rows_B]
            columns["_near_label"] = self.labels_LK[labels_B]
            columns["_neighbour"] = _drawn(columns["_near_label"], labels_B, rng)
        if self.queries_QK is not None:
            columns["_query"] = train.queries[rows_B]
            columns["_near_query"] = self.queries_QK[columns["_query"]]
            inputs = of_queries(_drawn(columns["_near_query"], columns["_query"], rng))
            columns |= {OF_NEIGHBOUR + name: column for name, column in inputs.items()}
        return columns


def nearest_rows(rows_N: Int32, columns_N: Int32, *, shape: tuple[int, int], k: int) -> Int32:
    """Return the rows of a sparse matrix of ones with the highest cosines to each row, int32 [R, K]; −1 where these are
    0.

    Σ n² products over columns of n entries each, and memory of the entries and of what is found.

    Args:
        rows_N, columns_N: where the ones are; what comes twice is one.

    Example:
        >>> nearest_rows(np.int32([0, 0, 1, 1, 2]), np.int32([0, 1, 0, 1, 1]), shape=(4, 2), k=2)
        array([[ 1,  2],
               [ 0,  2],
               [ 0,  1],
               [-1, -1]], dtype=int32)
    """
    # Neither has to be there where a recipe is only checked, or a model of TFRS exported.
    from implicit.nearest_neighbours import CosineRecommender
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    entries = csr_matrix((np.ones(len(rows_N), np.float32), (columns_N, rows_N)), shape=shape[::-1])
    entries.data[:] = 1  # what came twice was added up
    knn = CosineRecommender(K=k + 1)  # a row is among its own nearest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice on what it hands itself
        knn.fit(entries, show_progress=False)
    found = knn.similarity.tocoo()
    kept = (found.row != found.col) & (found.data > 0)
    row, col, cosine = found.row[kept], found.col[kept], found.data[kept]
    order = np.lexsort((col, -cosine, row))
    row, col = row[order], col[order]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    nearest_RK = np.full((shape[0], k), -1, np.int32)
    inside = place < k
    nearest_RK[row[inside], place[inside]] = col[inside]
    return nearest_RK


def _drawn(near_BK: Int32, own_B: Int32, rng: np.random.Generator) -> Int32:
    """Return one of each row's neighbours, int32 [B], each alike often; its own row where it has none."""
    lengths_B = np.sum(near_BK >= 0, axis=1)
    at_B = (rng.random(len(own_B)) * lengths_B).astype(np.int64)
    drawn_B = np.take_along_axis(near_BK, at_B[:, None], axis=1)[:, 0]
    return np.where(lengths_B > 0, drawn_B, own_B).astype(np.int32)
