"""Supervised contrast with nearest neighbours in the training pairs (NESCL, Sun et al. 2023) [METHODS §10.3].

Legend: `Q` queries, `L` labels, `R` either, `N` training pairs, `B` batch, `D` dimensions, `K` neighbours of a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.trainer import backend
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.config.loss import NeighboursConfig
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.losses import MASKED, BatchCandidates, Embedded, LossTerm
from longtail.trainer.model.forward import OF_NEIGHBOUR


@dataclass(frozen=True)
class NeighbourLoss:
    """Contrast every query, or label, and one neighbour with the others of the batch."""

    temperature: float
    weight: float

    def __call__(
        self, anchors_BD: Tensor, neighbours_BD: Tensor, ids_B: Tensor, near_BK: Tensor, weight_B: Tensor
    ) -> Tensor:
        """Compute the term to add to a batch's mean loss, float32 scalar, nats.

        Args:
            anchors_BD: embeddings, of any norm, float32.
            neighbours_BD: embeddings of the neighbours drawn, one per anchor, float32.
            ids_B: rows of the anchors, int32. An anchor's negatives exclude equal anchors and its neighbours.
            near_BK: rows of all neighbours per anchor, int32, −1 after the last; an anchor without any has no term.
            weight_B: weights of the pairs, float32.
        """
        anchors_BD, neighbours_BD = _normalise(anchors_BD), _normalise(neighbours_BD)
        positive_B = ops.sum(anchors_BD * neighbours_BD, axis=1) / self.temperature
        others_BB = ops.matmul(anchors_BD, ops.transpose(anchors_BD)) / self.temperature
        masked_BB = ops.equal(ids_B[:, None], ids_B)
        for k in range(near_BK.shape[1]):  # a loop over K avoids a [B, B, K] tensor
            masked_BB = ops.logical_or(masked_BB, ops.equal(near_BK[:, k : k + 1], ids_B))
        gaps_BB = ops.where(masked_BB, MASKED, others_BB - positive_B[:, None])
        # −log softmax of the positive: log(e^0 + Σ e^(other − positive)).
        gaps = ops.concatenate([ops.zeros_like(gaps_BB[:, :1]), gaps_BB], axis=1)
        losses_B = weight_B * ops.logsumexp(gaps, axis=1)
        return self.weight * ops.mean(ops.where(near_BK[:, 0] >= 0, losses_B, 0.0))


class Neighbours(LossTerm):
    """Pull a row's query and label towards one of their neighbours each.

    `nearest` has the neighbours by side (`query`, `label`), nearest first, int32 [R, K]; −1 after the last.
    """

    stream = 2

    def __init__(self, config: NeighboursConfig, dataset: Dataset, of_queries: Callable[[Int32], Inputs]) -> None:
        train = dataset.train
        self._of_queries = of_queries
        self._loss = backend.compile_loss(NeighbourLoss(config.temperature, config.weight))
        self._rows = {"query": train.queries, "label": train.labels}
        sizes = {"query": len(dataset.query_ids), "label": len(dataset.label_ids)}
        self.nearest = {}
        for side, other_side in (("query", "label"), ("label", "query")):
            if side in config.sides:
                shape = sizes[side], sizes[other_side]
                self.nearest[side] = nearest_rows(self._rows[side], self._rows[other_side], shape=shape, k=config.k)

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Draw one neighbour for each row.

        On the label side, build `_near_label` int32 [B, K], the neighbours of the positives, and `_neighbour`
        int32 [B], the neighbour drawn. On the query side, build `_query` int32 [B], the rows' queries, `_near_query`
        int32 [B, K], and the query tower's inputs for the neighbours drawn, with prefix `OF_NEIGHBOUR`.
        """
        columns: Inputs = {}
        if "label" in self.nearest:
            labels_B = self._rows["label"][rows_B]
            columns["_near_label"] = self.nearest["label"][labels_B]
            columns["_neighbour"] = _draw_neighbours(columns["_near_label"], labels_B, rng)
        if "query" in self.nearest:
            columns["_query"] = self._rows["query"][rows_B]
            columns["_near_query"] = self.nearest["query"][columns["_query"]]
            inputs = self._of_queries(_draw_neighbours(columns["_near_query"], columns["_query"], rng))
            columns |= {OF_NEIGHBOUR + name: column for name, column in inputs.items()}
        return columns

    def extra_losses(
        self,
        embedded: Embedded,
        neighbours: Mapping[str, Tensor],
        candidates: BatchCandidates,
        batch: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Compute the term of each side."""
        positive_B, terms = candidates.positive_B, []
        for side, neighbours_BD in neighbours.items():
            anchors_BD = embedded.queries_BD if side == "query" else embedded.labels_CD[: positive_B.shape[0]]
            ids_B = ops.convert_to_tensor(batch["_query"]) if side == "query" else positive_B
            near_BK = ops.convert_to_tensor(batch[f"_near_{side}"])
            terms.append(self._loss(anchors_BD, neighbours_BD, ids_B, near_BK, candidates.weight_B))
        return terms


def nearest_rows(rows_N: Int32, columns_N: Int32, *, shape: tuple[int, int], k: int) -> Int32:
    """Find each row's nearest rows by cosine, int32 [R, K], in a sparse 0/1 matrix.

    Rows with cosine 0 are no neighbours, and −1 follows the last neighbour. The ones are at `rows_N, columns_N`, and
    repeats count once. The cost is Σ n² products over columns of n entries each.

    Example:
        >>> nearest_rows(np.int32([0, 0, 1, 1, 2]), np.int32([0, 1, 0, 1, 1]), shape=(4, 2), k=2)
        array([[ 1,  2],
               [ 0,  2],
               [ 0,  1],
               [-1, -1]], dtype=int32)
    """
    # Imported here because neither package is needed to check a recipe or to export a TFRS model.
    from implicit.nearest_neighbours import CosineRecommender
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    entries = csr_matrix((np.ones(len(rows_N), np.float32), (columns_N, rows_N)), shape=shape[::-1])
    entries.data[:] = 1  # csr_matrix has added up repeated entries
    knn = CosineRecommender(K=k + 1)  # each row is its own nearest neighbour
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `implicit` warns about a matrix that it builds itself
        knn.fit(entries, show_progress=False)
    similarity = knn.similarity.tocoo()
    others = (similarity.row != similarity.col) & (similarity.data > 0)
    row, col, cosine = similarity.row[others], similarity.col[others], similarity.data[others]
    order = np.lexsort((col, -cosine, row))
    row, col = row[order], col[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    nearest_RK = np.full((shape[0], k), -1, np.int32)
    nearest_RK[row[rank < k], rank[rank < k]] = col[rank < k]
    return nearest_RK


def _draw_neighbours(near_BK: Int32, own_B: Int32, rng: np.random.Generator) -> Int32:
    """Draw one of each row's neighbours uniformly, int32 [B]; a row without neighbours gets itself."""
    lengths_B = np.sum(near_BK >= 0, axis=1)
    # Rounded down, so a row without neighbours has entry 0, which the last line replaces.
    at_B = (rng.random(len(own_B)) * lengths_B).astype(np.int64)
    drawn_B = np.take_along_axis(near_BK, at_B[:, None], axis=1)[:, 0]
    return np.where(lengths_B > 0, drawn_B, own_B).astype(np.int32)


def _normalise(x_BD: Tensor) -> Tensor:
    """Divide rows by their norm, float32 [B, D]; a zero row stays zero."""
    # Norm 1 for zero rows: rsqrt(0) is infinite, and would make their gradient NaN.
    squares_B1 = ops.sum(ops.square(x_BD), axis=1, keepdims=True)
    return x_BD * ops.rsqrt(ops.where(squares_B1 > 0, squares_B1, 1.0))
