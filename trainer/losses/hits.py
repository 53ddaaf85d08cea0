"""Accidental hits: candidates to mask [METHODS §2.1], and the number of labels that a draw represents.

Legend: `B` batch, `M` candidates.
"""

from typing import Literal

from longtail.trainer.backend import Tensor, ops

Hits = Literal["mask", "keep", "mask_known"]
"""Treatment of candidates that are a positive of their row. `mask` masks every draw of the row's positive. `mask_known`
also masks other training positives of the row's query. `keep` counts every draw, and masks only the row's own position
in the batch, which is no draw."""


def mask_hits(
    hits: Hits, candidates: Tensor, positive_B: Tensor, *, in_batch: bool, positions_B: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Mask accidental hits, bool [B, M].

    Args:
        candidates: label rows, int32 [M] shared by all rows, or [B, M].
        positive_B: label rows of the positives, int32.
        positions_B: positions of the rows in the batch, int32; None if the rows are the whole batch, in order.
    """
    if hits != "keep":
        return ops.equal(candidates, positive_B[:, None])
    # In batch, the first B candidates are the positives in the order of the rows, so row b's own position is b.
    positions_M = ops.arange(candidates.shape[-1])
    row_B = ops.arange(positive_B.shape[0]) if positions_B is None else positions_B
    return ops.logical_and(ops.equal(positions_M, row_B[:, None]), in_batch)


def multiplicity(log_q: Tensor, excluded_BM: Tensor, *, m: int, log_miss_B: Tensor | None = None) -> Tensor:
    """Compute how many labels each draw represents, 1/(m·q), float32 [B, M] [Horvitz & Thompson 1952].

    Args:
        log_q: log-probabilities of the drawn labels, float32 [M] or [B, M].
        excluded_BM: candidates that represent no label: positions without a draw, and labels outside of the sum; bool.
        log_miss_B: log(1 − q_y) if draws come from q/(1 − q_y), float32; None if they come from q.

    Example:
        >>> import numpy as np
        >>> multiplicity(np.log(np.float32([0.5, 0.25])), np.array([[False, False], [False, True]]), m=2).numpy()
        array([[1., 2.],
               [1., 0.]], dtype=float32)
    """
    log_multiplicity_BM = -log_q + ops.zeros_like(excluded_BM, dtype="float32")
    if log_miss_B is not None:  # draws from q/(1 − q_y) represent (1 − q_y)/(m·q) labels each
        log_multiplicity_BM = log_multiplicity_BM + log_miss_B[:, None]
    return ops.where(excluded_BM, 0.0, ops.exp(log_multiplicity_BM) / m)
