"""Build binary trees of labels, and walk down them, all rows' draws at once.

Nodes are numbered as in a heap: 1 is the root, n has the children 2n and 2n + 1. Leaves are numbered from 0, left to
right. Legend: `B` batch, `M` draws per row, `K` numbers per row, `N` nodes, `F` numbers per leaf, `L` labels, `D` model
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Float32, Int32
from longtail.trainer.backend import Tensor, keras, ops

if TYPE_CHECKING:
    from keras.random import SeedGenerator

RightLogOdds = Callable[[Tensor, Tensor], Tensor]
"""A function from numbers of the rows [B, K] and nodes [B, M] to the log-odds of turning right."""


def sample_leaves(
    right_log_odds: RightLogOdds, rows_BK: Tensor, depth: int, shape: tuple[int, int], seed: SeedGenerator
) -> Tensor:
    """Draw leaves by ancestral sampling, int32 of `shape`."""
    nodes_BM = ops.ones(shape, "int32")
    for _ in range(depth):
        # One number a level for all rows: the cost does not depend on how the rows' paths part.
        right_BM = keras.random.uniform(shape, seed=seed) < ops.sigmoid(right_log_odds(rows_BK, nodes_BM))
        nodes_BM = 2 * nodes_BM + ops.cast(right_BM, "int32")
    return nodes_BM - (1 << depth)


def log_path(right_log_odds: RightLogOdds, rows_BK: Tensor, depth: int, leaves: Tensor) -> Tensor:
    """Compute log-probabilities of leaves [B] or [B, M], in the same shape."""
    leaves_BM = leaves[:, None] if len(leaves.shape) == 1 else leaves
    total_BM = ops.zeros(leaves_BM.shape, "float32")
    for level in range(depth):
        # The bits of a leaf, highest first, are the turns of its path: 1 is right.
        nodes_BM = ops.right_shift(leaves_BM + (1 << depth), depth - level)
        right_BM = ops.bitwise_and(ops.right_shift(leaves_BM, depth - level - 1), 1)
        sign_BM = ops.cast(2 * right_BM - 1, "float32")
        total_BM = total_BM - ops.softplus(-sign_BM * right_log_odds(rows_BK, nodes_BM))
    return ops.reshape(total_BM, leaves.shape)


def subtree_sums(leaves: Float32) -> Float32:
    """Sum over every subtree, [2·leaves, F], in heap order; row 0 is unused."""
    size = len(leaves)
    sums = np.zeros((2 * size, leaves.shape[1]), np.float32)
    sums[size:] = leaves
    while size > 1:
        size //= 2
        sums[size : 2 * size] = sums[2 * size : 4 * size : 2] + sums[2 * size + 1 : 4 * size : 2]
    return sums


def assign_leaves(labels_LD: Float32) -> Int32:
    """Assign labels to leaves by a balanced k-d tree, int32 [L]: subtrees have similar labels.

    Every node's labels are cut in half along the principal component with their largest variance. Halves differ by at
    most one label, so only the right child of a leaf's parent can be padding. The cost is O(L·D·log L).
    """
    labels = len(labels_LD)
    centred_LD = labels_LD - labels_LD.mean(axis=0)
    # Principal axes of all labels stand in for those of every node, which would need an eigendecomposition per node.
    turned_LD = centred_LD @ np.linalg.eigh(centred_LD.T @ centred_LD)[1]
    rows_L, sizes_J = np.arange(labels), np.array([labels])
    for _ in range(max(labels - 1, 0).bit_length()):
        node_L, some_J = np.repeat(np.arange(len(sizes_J)), sizes_J), sizes_J > 0
        starts_J, counts_J1 = (np.cumsum(sizes_J) - sizes_J)[some_J], sizes_J[some_J, None]
        sorted_LD = turned_LD[rows_L]
        mean_JD = np.add.reduceat(sorted_LD, starts_J, axis=0) / counts_J1
        square_JD = np.add.reduceat(sorted_LD**2, starts_J, axis=0) / counts_J1
        axis_J = np.zeros(len(sizes_J), np.int64)
        axis_J[some_J] = (square_JD - mean_JD**2).argmax(axis=1)
        rows_L = rows_L[np.lexsort((rows_L, sorted_LD[np.arange(labels), axis_J[node_L]], node_L))]
        sizes_J = np.stack([sizes_J - sizes_J // 2, sizes_J // 2], axis=1).ravel()
    leaves_L = np.empty(labels, np.int32)
    leaves_L[rows_L] = np.flatnonzero(sizes_J == 1)
    return leaves_L
