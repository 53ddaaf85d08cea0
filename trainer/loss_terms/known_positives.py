"""Known positives: a row's negatives exclude all training positives of its query [METHODS §2.1].

Legend: `N` training pairs, `Q` owners, `B` rows of a batch, `M` candidates, `L` labels, `K` known positives of a
batch's queries, all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from longtail.bundle import Inputs
from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.sets import distinct
from longtail.trainer.backend import Tensor, Tensors, ops
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.losses import LossTerm, StepInputs

KNOWN_LIMIT = 1024
"""Largest number of known positives per query, a power of two. A longer list keeps its most frequent labels."""


@dataclass(frozen=True)
class KnownPositives(LossTerm):
    """Hold the distinct training labels of every query: `labels[offsets[q]:offsets[q + 1]]`, ascending.

    Queries are `Pairs.owner_keys`, one per query and objective: a label that a query clicked is not a known positive
    for the objective of purchases. `owners` has the key of every training pair, int64 [N]; `catalogue` is L.
    """

    labels: Int32
    offsets: Int64
    owners: Int64
    catalogue: int

    @classmethod
    def collect(cls, train: Pairs, catalogue: int | None = None, *, limit: int = KNOWN_LIMIT) -> KnownPositives:
        """Collect the known positives of the training pairs, at most `limit` per query.

        A query with more labels keeps the most frequent ones. The others may be drawn as its negatives, as with `mask`.
        They are the rarest of a long list, which all samplers except `uniform` and `full` draw least.
        """
        owners = train.owner_keys
        catalogue = int(train.labels.max()) + 1 if catalogue is None else catalogue
        # One integer per distinct pair of owner and label, sorted by owner and then by label.
        keys = distinct(owners * catalogue + train.labels)
        queries, labels = keys // catalogue, keys % catalogue
        by_frequency = np.lexsort((-np.bincount(train.labels)[labels], queries))
        rank = np.empty(len(keys), np.int64)
        # `searchsorted(queries, queries)` is the first pair of each pair's query, so ranks begin at 0 in every query.
        rank[by_frequency] = np.arange(len(keys)) - np.searchsorted(queries, queries)
        selected = rank < limit
        queries, labels = queries[selected], labels[selected]
        offsets = np.searchsorted(queries, np.arange(int(owners.max()) + 2)).astype(np.int64)
        return cls(labels.astype(np.int32), offsets, owners, catalogue)

    def columns(self, rows_B: Int64, batch: Inputs, rng: np.random.Generator) -> Inputs:  # noqa: ARG002
        """Build `_known` and `_known_rows`, int32 [K]: known positives of the batch and their rows."""
        return dict(zip(("_known", "_known_rows"), self.list_positives(self.owners[rows_B]), strict=True))

    def list_positives(self, queries_B: Int32 | Int64) -> tuple[Int32, Int32]:
        """Return the known positives of a batch's queries, and their rows, int32 [K].

        Repeats of the last one round K up to a power of two: a compiled step is compiled again for every new shape.
        """
        starts_B = self.offsets[queries_B]
        lengths_B = self.offsets[queries_B + 1] - starts_B
        rows_K = np.repeat(np.arange(len(queries_B), dtype=np.int32), lengths_B)
        # Positions in `labels`: the range of every row, one after another, without a loop over rows.
        at_K = np.arange(len(rows_K)) + np.repeat(starts_B - np.cumsum(lengths_B) + lengths_B, lengths_B)
        more = (0, (1 << (len(rows_K) - 1).bit_length()) - len(rows_K))
        return np.pad(self.labels[at_K], more, mode="edge"), np.pad(rows_K, more, mode="edge")

    def exclude_mask(self, labels: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Mask labels that are known positives of the rows' queries, bool [B, M]."""
        known_K, rows_K = (ops.convert_to_tensor(batch[name]) for name in ("_known", "_known_rows"))
        return mask_known_positives(labels, known_K, rows_K, batch=batch["_positive"].shape[0], labels=self.catalogue)

    def row_tensors(self, step: StepInputs) -> Tensors:
        """Mask candidates that are known positives of the rows' queries."""
        return {"known": self.exclude_mask(step.candidates, step.batch)}


def mask_known_positives(candidates: Tensor, known_K: Tensor, rows_K: Tensor, *, batch: int, labels: int) -> Tensor:
    """Mask candidates that are known positives of a row, bool [B, M]; on the device.

    Shared candidates cost O(L + K + B·M) memory moves, candidates per row O(B·M·log KNOWN_LIMIT) reads.

    Args:
        candidates: label rows, int32 [M] or [B, M].
        known_K: label rows of the known positives, int32, row by row, ascending within a row; repeats are allowed.
        rows_K: the row of the batch of each known positive, int32, non-decreasing.

    Example:
        >>> import numpy as np
        >>> positives_K, rows_K = np.int32([4, 7, 2]), np.int32([0, 0, 1])
        >>> mask_known_positives(np.int32([7, 2, 7]), positives_K, rows_K, batch=2, labels=9).numpy().astype(int)
        array([[1, 0, 1],
               [0, 1, 0]])
    """
    if len(candidates.shape) == 2:
        return _known_per_row(candidates, known_K, rows_K, batch=batch)
    drawn = candidates.shape[0]
    candidates = ops.convert_to_tensor(candidates)
    # A label that occurs several times among the candidates gets any one of its positions.
    positions_M = ops.arange(drawn, dtype="int32")
    position_L = ops.scatter_update(ops.zeros((labels,), "int32"), candidates[:, None], positions_M)
    position_K = ops.take(position_L, known_K)
    # Labels that are not candidates have position 0, so compare the label there.
    is_candidate_K = ops.equal(ops.take(candidates, position_K), known_K)
    # Row `drawn` collects the known positives that are not among the candidates.
    cells_K2 = ops.stack([ops.where(is_candidate_K, position_K, drawn), rows_K], axis=1)
    known_MB = ops.scatter_update(ops.zeros((drawn + 1, batch), "bool"), cells_K2, ops.ones_like(is_candidate_K))
    return ops.transpose(ops.take(known_MB, ops.take(position_L, candidates), axis=0))


def _known_per_row(candidates_BM: Tensor, known_K: Tensor, rows_K: Tensor, *, batch: int) -> Tensor:
    """Mask candidates per row, bool [B, M], by binary search in `known_K`'s rows."""
    rows_B = ops.arange(batch, dtype="int32")
    starts_B = ops.cast(ops.searchsorted(rows_K, rows_B, side="left"), "int32")
    ends_B = ops.cast(ops.searchsorted(rows_K, rows_B, side="right"), "int32")
    at_BM, last_B1 = ops.zeros_like(candidates_BM) + starts_B[:, None], ends_B[:, None] - 1
    step = KNOWN_LIMIT  # a row has at most this many; halving steps 1024, 512, …, 1 reach every position
    while step:
        ahead_BM = ops.minimum(at_BM + step, last_B1)
        at_BM = ops.where(ops.take(known_K, ahead_BM) <= candidates_BM, ahead_BM, at_BM)
        step //= 2
    return ops.equal(ops.take(known_K, at_BM), candidates_BM)
