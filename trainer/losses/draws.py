"""How many labels of the catalogue a draw stands for, so that sums over draws are those over all labels on average.

Legend: `B` rows, `M` draws.
"""

from __future__ import annotations

from longtail.trainer.backend import Tensor, ops


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
    stands_BM: Tensor = ops.where(left_out_BM, 0.0, ops.exp(log_stands_BM) / m)
    return stands_BM
