"""Accidental hits: which of a row's candidates are no negatives [METHODS §2.1].

Legend: `B` batch, `M` candidates, `L` labels, `K` known positives of a batch's queries, all rows together.
"""

from __future__ import annotations

from typing import Literal

from longtail.trainer.backend import Tensor, ops

Hits = Literal["mask", "keep", "mask_known"]
"""What happens to a candidate that is a positive of its row. `mask`: the row's positive is no negative, however often
it is drawn. `keep`: every draw counts; only the row's own place in the batch, which is no draw, is left out.
`mask_known`: nor are the other training positives of the row's query."""

KNOWN_LIMIT = 1024
"""Known positives per query, at most; a power of two. The most frequent labels of a longer list are known."""


def hits_of(
    hits: Hits, candidates: Tensor, positive_B: Tensor, *, in_batch: bool, known_BM: Tensor | None,
    places_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return candidates to mask, bool [B, M].

    Args:
        candidates: label rows, int32 [M] shared by all rows, or [B, M].
        positive_B: label rows of the positives, int32.
        known_BM: of `known_among`, for `mask_known`; None otherwise.
        places_B: the rows' own places among these, int32; None where they are the whole batch, in order.
    """
    masked_BM: Tensor
    if hits == "keep":
        places_M = ops.arange(candidates.shape[-1])
        own_B = ops.arange(positive_B.shape[0]) if places_B is None else places_B
        masked_BM = ops.logical_and(ops.equal(places_M, own_B[:, None]), in_batch)
    else:
        masked_BM = ops.equal(candidates, positive_B[:, None])
    return masked_BM if known_BM is None else ops.logical_or(masked_BM, known_BM)


def known_among(candidates: Tensor, known_K: Tensor, rows_K: Tensor, *, batch: int, labels: int) -> Tensor:
    """Return which candidates are known positives of which rows, bool [B, M]; on the device.

    Shared candidates cost O(L + K + B·M) moves of bytes, candidates per row O(B·M·log KNOWN_LIMIT) reads.

    Args:
        candidates: label rows, int32 [M] or [B, M].
        known_K: label rows of the known positives, int32, row by row, rising within a row; repeats do no harm.
        rows_K: the row of the batch that each belongs to, int32, not falling.

    Example:
        >>> import numpy as np
        >>> known, rows = np.int32([4, 7, 2]), np.int32([0, 0, 1])
        >>> known_among(np.int32([7, 2, 7]), known, rows, batch=2, labels=9).numpy().astype(int)
        array([[1, 0, 1],
               [0, 1, 0]])
    """
    if len(candidates.shape) == 2:
        return _known_per_row(candidates, known_K, rows_K, batch=batch)
    drawn = candidates.shape[0]
    candidates = ops.convert_to_tensor(candidates)
    place_L = ops.scatter_update(
        ops.zeros((labels,), "int32"), candidates[:, None], ops.arange(drawn, dtype="int32")
    )  # one place of a label that stands in several
    place_K = ops.take(place_L, known_K)
    here_K = ops.equal(ops.take(candidates, place_K), known_K)
    cells_K2 = ops.stack([ops.where(here_K, place_K, drawn), rows_K], axis=1)
    known_MB = ops.scatter_update(ops.zeros((drawn + 1, batch), "bool"), cells_K2, ops.ones_like(here_K))
    return ops.transpose(ops.take(known_MB, ops.take(place_L, candidates), axis=0))


def _known_per_row(candidates_BM: Tensor, known_K: Tensor, rows_K: Tensor, *, batch: int) -> Tensor:
    """Return the same of candidates per row, bool [B, M]: a binary search in every row's part of `known_K`."""
    rows_B = ops.arange(batch, dtype="int32")
    starts_B = ops.cast(ops.searchsorted(rows_K, rows_B, side="left"), "int32")
    ends_B = ops.cast(ops.searchsorted(rows_K, rows_B, side="right"), "int32")
    at_BM, last_B1 = ops.zeros_like(candidates_BM) + starts_B[:, None], ends_B[:, None] - 1
    step = KNOWN_LIMIT
    while step:
        ahead_BM = ops.minimum(at_BM + step, last_B1)
        at_BM = ops.where(ops.take(known_K, ahead_BM) <= candidates_BM, ahead_BM, at_BM)
        step //= 2
    return ops.equal(ops.take(known_K, at_BM), candidates_BM)
