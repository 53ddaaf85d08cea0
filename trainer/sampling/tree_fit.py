"""Greedy fit of the tree p_n(y|x) of adversarial negatives, from the root down [BM20 §3; METHODS §5].

A node's labels are split in two halves; the half with the larger Δ_y = Σ_{x∈D_y}(w·z + b) goes right. The split
alternates with Newton ascent of the node's penalised likelihood,

    Σ_{x,y} log σ(ζ_y(w·z + b)) − penalty · (‖w‖² + b²),      ζ_y = +1 right, −1 left,

until the split is stable. Neither step ever lowers the likelihood. Nodes of one depth are fitted together.

Legend: `N` pairs, `L` labels, `K` coordinates of z, `E` = K + 1 (z and a 1, so that b is the last weight),
`J` nodes, `G` blocks of `H` rows: a node's rows, cut into blocks of equal height and filled up with zeros, so that one
batched product computes all nodes, large and small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Float32, Float64, Int32, Int64
from longtail.bundle.proposal import PADDING, PADDING_BIAS
from longtail.trainer.threads import map_in_threads

_ROUNDS = 50
"""Largest number of splits of a node."""
_TOLERANCE = 1e-8
"""Newton ascent ends when the expected gain is below this share of the objective."""
_SHORTEST_STEP = 2.0**-30
_PAIRS_TOGETHER, _NODES_TOGETHER = 2**17, 2**12
"""Limits of the nodes that a thread fits together: about 100 MB per thread at K = 16."""
_TALLEST_BLOCK = 256


def fit_tree(z_NK: Float32, labels_N: Int32, *, labels: int, penalty: float = 0.1) -> tuple[Float32, Float32, Int32]:
    """Fit a balanced tree to training pairs; the same pairs in the same order give the same tree.

    The subtrees of a node differ by at most one label, so only the right child of a leaf's parent can be padding. Label
    rows break ties of Δ. Labels without a pair have Δ = 0. The root needs about 1 kB of memory per pair at K = 16.

    Args:
        z_NK, labels_N: projected queries of the pairs, and their label rows.
        penalty: λ_n > 0, nats.

    Returns:
        weights float32 [2**depth, K], biases float32 [2**depth], leaf_labels int32 [2**depth], as in `Proposal`.
    """
    depth, dims = max(labels - 1, 0).bit_length(), z_NK.shape[1]
    theta_JE = np.zeros((1 << depth, dims + 1))
    # Stable, so that sums are taken in one order and trees repeat.
    by_label_N = np.argsort(labels_N, kind="stable")
    counts_L = np.bincount(labels_N, minlength=labels)
    tree = _Pairs(z_NK[by_label_N], np.concatenate([[0], np.cumsum(counts_L)]))
    sums_LE = tree.sums()
    rows_L, sizes_J = np.arange(labels), np.array([labels])
    for level in range(depth):
        nodes_J = np.repeat(np.arange(len(sizes_J)), sizes_J)
        right_L = np.zeros(labels, bool)
        chunks = list(_chunks(sizes_J, counts_L[rows_L]))
        fit = partial(_fit_chunk, rows_L=rows_L, sizes_J=sizes_J, pairs=tree, sums_LE=sums_LE, penalty=penalty)
        for (nodes, label_slice), (theta, right) in zip(chunks, map_in_threads(fit, chunks), strict=True):
            theta_JE[(1 << level) + nodes.start : (1 << level) + nodes.stop] = theta
            right_L[label_slice] = right
        rows_L = rows_L[np.lexsort((rows_L, 2 * nodes_J + right_L))]
        sizes_J = np.stack([sizes_J - sizes_J // 2, sizes_J // 2], axis=1).ravel()
    leaf_labels = np.full(1 << depth, PADDING, np.int32)
    leaf_labels[sizes_J == 1] = rows_L
    return theta_JE[:, :dims].astype(np.float32), theta_JE[:, dims].astype(np.float32), leaf_labels


@dataclass(frozen=True)
class _Pairs:
    """Hold z of every pair, sorted by label: label y has rows `offsets[y]:offsets[y + 1]`."""

    z_NK: Float32
    offsets: Int64

    def extend(self, rows_S: Int64) -> tuple[Float64, Int64]:
        """Return some labels' pairs: extended z, float64 [n, E], and the index of each pair's label in `rows_S`."""
        starts_S, counts_S = self.offsets[rows_S], self.offsets[rows_S + 1] - self.offsets[rows_S]
        label_n = np.repeat(np.arange(len(rows_S)), counts_S)
        position_n = np.arange(len(label_n)) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        extended_nE = np.ones((len(label_n), self.z_NK.shape[1] + 1))
        extended_nE[:, :-1] = self.z_NK[starts_S[label_n] + position_n]
        return extended_nE, label_n

    def sums(self) -> Float64:
        """Sum extended z over each label's pairs, float64 [L, E]; the last column counts the pairs."""
        counts_L = np.diff(self.offsets)
        sums_LE = np.zeros((len(counts_L), self.z_NK.shape[1] + 1))
        paired = counts_L > 0
        if paired.any():
            sums_LE[paired, :-1] = np.add.reduceat(self.z_NK, self.offsets[:-1][paired], axis=0, dtype=np.float64)
        sums_LE[:, -1] = counts_L
        return sums_LE


@dataclass(frozen=True)
class _Blocks:
    """Hold rows of consecutive nodes in `counts_J` blocks each: `values_GHE`, and labels of the rows, `labels_GH`."""

    values_GHE: Float64
    labels_GH: Int64
    counts_J: Int64

    @classmethod
    def cut(cls, rows_NE: Float64, labels_N: Int64, lengths_J: Int64) -> _Blocks:
        """Cut rows, sorted by node with `lengths_J` each, into blocks; a node without rows gets a block of zeros."""
        height = 1 << min(int(np.ceil(np.log2(max(lengths_J.mean(), 1)))), _TALLEST_BLOCK.bit_length() - 1)
        counts_J = np.maximum(-(-lengths_J // height), 1)
        blocks = int(counts_J.sum())
        shift_J = height * (np.cumsum(counts_J) - counts_J) - (np.cumsum(lengths_J) - lengths_J)
        position_N = np.arange(len(rows_NE)) + np.repeat(shift_J, lengths_J)
        values = np.zeros((blocks * height, rows_NE.shape[1]))
        values[position_N] = rows_NE
        labels = np.zeros(blocks * height, np.int64)
        labels[position_N] = labels_N
        return cls(values.reshape(blocks, height, -1), labels.reshape(blocks, height), counts_J)

    def select(self, chosen_J: Bools) -> _Blocks:
        """Return the blocks of some nodes."""
        if chosen_J.all():
            return self
        chosen_G = np.repeat(chosen_J, self.counts_J)
        return _Blocks(self.values_GHE[chosen_G], self.labels_GH[chosen_G], self.counts_J[chosen_J])

    def spread(self, by_node_J: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat a value per node for each block of the node, [G, …]."""
        return np.repeat(by_node_J, self.counts_J, axis=0)

    def total(self, by_block_G: Float64) -> Float64:
        """Sum over each node's blocks, [J, …]."""
        return np.add.reduceat(by_block_G, np.cumsum(self.counts_J) - self.counts_J, axis=0)


def _chunks(sizes_J: Int64, counts_S: Int64) -> Iterator[tuple[slice, slice]]:
    """Cut a level of the tree into runs of nodes to fit together: slices of its J nodes and of its S labels."""
    ends_J = np.cumsum(sizes_J)
    pairs_J = np.concatenate([[0], np.cumsum(counts_S)])[ends_J]
    start, start_label, pairs = 0, 0, 0
    while start < len(sizes_J):
        fitting = int(np.searchsorted(pairs_J, pairs + _PAIRS_TOGETHER, side="right"))
        stop = min(max(fitting, start + 1), start + _NODES_TOGETHER, len(sizes_J))
        yield slice(start, stop), slice(start_label, int(ends_J[stop - 1]))
        start, start_label, pairs = stop, int(ends_J[stop - 1]), int(pairs_J[stop - 1])


def _fit_chunk(
    chunk: tuple[slice, slice], *, rows_L: Int64, sizes_J: Int64, pairs: _Pairs, sums_LE: Float64, penalty: float
) -> tuple[Float64, Bools]:
    """Fit a few nodes: θ = (w, b), float64 [J, E], and the mask of labels that go right, bool [S]."""
    nodes, label_slice = chunk
    sizes_J, rows_S = sizes_J[nodes], rows_L[label_slice]
    extended_nE, labels_n = pairs.extend(rows_S)
    split = _Splits(sums_LE[rows_S], sizes_J)
    lengths_J = np.add.reduceat(split.sums_SE[:, -1], np.cumsum(sizes_J) - sizes_J).astype(np.int64)
    blocks = _Blocks.cut(extended_nE, labels_n, lengths_J)
    theta_JE = split.first_guess()
    right_S = split.right(theta_JE)
    active_J = sizes_J > 1
    for turn in range(_ROUNDS):
        part = blocks.select(active_J)
        theta_JE[active_J] = _ascend(theta_JE[active_J], part, np.where(right_S[part.labels_GH], 1.0, -1.0), penalty)
        if turn == _ROUNDS - 1:
            break
        better_S = split.right(theta_JE)
        active_J = np.logical_or.reduceat(better_S != right_S, np.cumsum(sizes_J) - sizes_J)
        right_S = better_S
        if not active_J.any():
            break
    theta_JE[sizes_J == 1] = 0
    theta_JE[sizes_J == 1, -1] = -PADDING_BIAS
    return theta_JE, right_S


@dataclass(frozen=True)
class _Splits:
    """Split labels of some nodes; `sums_SE` is sorted by node (`sizes_J` labels each) and then by label row."""

    sums_SE: Float64
    sizes_J: Int64

    def right(self, theta_JE: Float64) -> Bools:
        """Mask the half of nodes' labels with larger Δ_y = θ·Σ_{x∈D_y}(z, 1) [BM20 eq. 9], bool [S]."""
        node_S = np.repeat(np.arange(len(self.sizes_J)), self.sizes_J)
        gain_S = np.einsum("se,se->s", self.sums_SE, theta_JE[node_S])
        order_S = np.lexsort((-gain_S, node_S))
        rank_S = np.arange(len(node_S)) - np.repeat(np.cumsum(self.sizes_J) - self.sizes_J, self.sizes_J)
        right_S = np.zeros(len(node_S), bool)
        right_S[order_S] = rank_S < (self.sizes_J // 2)[node_S]
        return right_S

    def first_guess(self) -> Float64:
        """Start with b = 0 and w, the first eigenvector of the covariance of {Σ_{x∈D_y} z}_y.

        The largest entry of w is positive, so that the result does not depend on the eigensolver's signs.
        """
        starts_J, sums_SK = np.cumsum(self.sizes_J) - self.sizes_J, self.sums_SE[:, :-1]
        mean_JK = np.add.reduceat(sums_SK, starts_J, axis=0) / self.sizes_J[:, None]
        centred_SK = sums_SK - np.repeat(mean_JK, self.sizes_J, axis=0)
        blocks = _Blocks.cut(centred_SK, np.zeros(len(sums_SK), np.int64), self.sizes_J)
        _, vectors_JKK = np.linalg.eigh(blocks.total(blocks.values_GHE.transpose(0, 2, 1) @ blocks.values_GHE))
        leading_JK = vectors_JKK[:, :, -1]
        largest_J1 = np.take_along_axis(leading_JK, np.abs(leading_JK).argmax(axis=1)[:, None], axis=1)
        return np.pad(leading_JK * np.sign(largest_J1), ((0, 0), (0, 1)))


def _ascend(theta_JE: Float64, blocks: _Blocks, towards_GH: Float64, penalty: float) -> Float64:
    """Ascend every node's objective by Newton steps; halve a step that would lower the objective."""
    best_J, scale_J, direction_JE = np.full(len(theta_JE), -np.inf), np.ones(len(theta_JE)), np.zeros_like(theta_JE)
    pending_J = np.ones(len(theta_JE), bool)
    part, towards = blocks, towards_GH
    while pending_J.any():
        nodes = np.flatnonzero(pending_J)
        if len(part.counts_J) != len(nodes):
            part, towards = blocks.select(pending_J), towards_GH[blocks.spread(pending_J)]
        trial = theta_JE[nodes] + scale_J[nodes, None] * direction_JE[nodes]
        objective, gradient, curvature = _objective(trial, part, towards, penalty)
        # A first pass with a zero direction only evaluates the start, as every objective is above −∞.
        better = objective >= best_J[nodes]
        up, down = nodes[better], nodes[~better]
        theta_JE[up], best_J[up], scale_J[up] = trial[better], objective[better], 1.0
        direction_JE[up] = np.linalg.solve(curvature[better], gradient[better, :, None])[:, :, 0]
        gain = 0.5 * np.einsum("je,je->j", gradient[better], direction_JE[up])
        scale_J[down] *= 0.5
        # An objective is at most 0, so 1 minus it is a scale that is never 0.
        pending_J[up[gain <= _TOLERANCE * (1 - best_J[up])]] = False
        pending_J[down[scale_J[down] < _SHORTEST_STEP]] = False
    return theta_JE


def _objective(
    theta_JE: Float64, blocks: _Blocks, towards_GH: Float64, penalty: float
) -> tuple[Float64, Float64, Float64]:
    """Compute nodes' objectives [J], gradients [J, E] and negative Hessians [J, E, E].

    The objective is Σ log σ(ζ θ·(z, 1)) − penalty·‖θ‖².
    """
    values_GHE = blocks.values_GHE
    # exp of a non-positive number, so that neither σ nor its log overflows for a large |θ·z|.
    signed_GH = towards_GH * np.matmul(values_GHE, blocks.spread(theta_JE)[:, :, None])[:, :, 0]
    odds_GH = np.exp(-np.abs(signed_GH))
    log_p_GH = np.minimum(signed_GH, 0) - np.log1p(odds_GH)
    miss_GH = np.where(signed_GH >= 0, odds_GH, 1.0) / (1 + odds_GH)
    bend_GH = odds_GH / (1 + odds_GH) ** 2
    # The last column of values is 1 for rows and 0 for filling, which it so keeps out of the sum.
    objective_J = blocks.total(np.einsum("gh,gh->g", log_p_GH, values_GHE[:, :, -1]))
    gradient_JE = blocks.total(np.matmul((towards_GH * miss_GH)[:, None, :], values_GHE)[:, 0, :])
    curvature_JEE = blocks.total(values_GHE.transpose(0, 2, 1) @ (values_GHE * bend_GH[:, :, None]))
    curvature_JEE += 2 * penalty * np.eye(theta_JE.shape[1])
    return (
        objective_J - penalty * np.einsum("je,je->j", theta_JE, theta_JE),
        gradient_JE - 2 * penalty * theta_JE,
        curvature_JEE,
    )
