"""Accidental hits: which of a row's candidates are no negatives [METHODS §2.1], and how many labels a draw stands for.

Legend: `B` batch, `M` candidates.
"""

from __future__ import annotations

from typing import Literal

from longtail.trainer.backend import Tensor, ops

Hits = Literal["mask", "keep", "mask_known"]
"""What happens to a candidate that is a positive of its row. `mask`: the row's positive is no negative, however often
it is drawn. `keep`: every draw counts; only the row's own place in the batch, which is no draw, is left out.
`mask_known`: nor are the other training positives of the row's query."""


def hits_of(
    hits: Hits, candidates: Tensor, positive_B: Tensor, *, in_batch: bool, places_B: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return candidates to mask, bool [B, M].

    Args:
        candidates: label rows, int32 [M] shared by all rows, or [B, M].
        positive_B: label rows of the positives, int32.
        places_B: the rows' own places among these, int32; None where they are the whole batch, in order.
    """
    if hits != "keep":
        return ops.equal(candidates, positive_B[:, None])
    places_M = ops.arange(candidates.shape[-1])
    own_B = ops.arange(positive_B.shape[0]) if places_B is None else places_B
    return ops.logical_and(ops.equal(places_M, own_B[:, None]), in_batch)


def stands_for(log_q: Tensor, left_out_BM: Tensor, *, m: int, log_miss_B: Tensor | None = None) -> Tensor:
    """Return labels that every draw stands for, 1/(m·q), float32 [B, M] [Horvitz and Thompson 1952].

    Args:
        log_q: log-probabilities of the drawn labels, float32 [M] or [B, M].
        left_out_BM: places that are no draws, or of labels that are not summed over, bool.
        log_miss_B: log(1 − q_y) where draws are of q/(1 − q_y), float32; None where they are of q.

    Example:
        >>> import numpy as np
        >>> stands_for(np.log(np.float32([0.5, 0.25])), np.array([[False, False], [False, True]]), m=2).numpy()
        array([[1., 2.],
               [1., 0.]], dtype=float32)
    """
    log_stands_BM = -log_q + ops.zeros_like(left_out_BM, dtype="float32")
    if log_miss_B is not None:
        log_stands_BM = log_stands_BM + log_miss_B[:, None]
    return ops.where(left_out_BM, 0.0, ops.exp(log_stands_BM) / m)
