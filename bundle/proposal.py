"""Define the proposal p_n(y|x), a balanced binary tree [BM20 §3; METHODS §5].

A query is projected, `z = Σ_features Σ_p weight · projection[id] + offset`, and walks from the root to a
leaf; at node ν it steps right with probability `σ(w_ν·z + b_ν)`. The leaf is the label.

Nodes are in heap order: the root is node 1, the children of n are 2n (left) and 2n + 1 (right), and the
leaves are nodes 2**depth …, left to right. A subtree without labels (padding up to a power of two) is
reached with probability exactly 0: its parent has w = 0 and b = ±1e4, and exp(-1e4) is 0 in float32.

Legend: `B` queries, `P` positions of a padded bag, `K` coordinates of z, `L` labels, `M` labels or draws
per query, `W` beam width, `N` nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Float32, Int32, Int64
from longtail.bundle.errors import BundleCorruptError, require
from longtail.bundle.one_line import one_line

PADDING = -1
PADDING_BIAS = 1e4
"""|b| at the parent of a subtree without labels."""

_PROJECTION = "projection/"
_CHUNK = 2**22
"""Most numbers gathered at once (16 MiB)."""


@dataclass(frozen=True)
class Proposal:
    """The tree of p_n(y|x), with its projection of query inputs.

    Attributes:
        projection: by query feature, float32 [rows of its table, K]; [1, K] for a `number`, which multiplies
            the raw number.
        offset: float32 [K].
        weights: w of every inner node in heap order, float32 [2**depth, K]; row 0 is unused.
        biases: b of every inner node, float32 [2**depth].
        leaf_labels: label row of every leaf from left to right, int32 [2**depth]; -1 is padding.
    """

    projection: Mapping[str, Float32]
    offset: Float32
    weights: Float32
    biases: Float32
    leaf_labels: Int32

    __repr__ = one_line

    @property
    def depth(self) -> int:
        """Return the number of steps from the root to a leaf: ceil(log2 L)."""
        return len(self.leaf_labels).bit_length() - 1

    @cached_property
    def largest_step(self) -> float:
        """Bound |w·z| of a path to a leaf, per unit of the largest |z|."""
        return float(self.depth * self.weights.shape[1] * np.abs(self.weights).max())

    @property
    def labels(self) -> int:
        """Return the number of labels L."""
        return len(self.label_leaves)

    @cached_property
    def label_leaves(self) -> Int32:
        """Return every label's leaf, counted from the left, int32 [L]."""
        leaves = np.flatnonzero(self.leaf_labels != PADDING).astype(np.int32)
        label_leaves = np.empty_like(leaves)
        label_leaves[self.leaf_labels[leaves]] = leaves
        return label_leaves

    @cached_property
    def _inhabited(self) -> Bools:
        """Find nodes with labels below them, in heap order, bool [2 · 2**depth]."""
        leaves = len(self.leaf_labels)
        inhabited = np.zeros(2 * leaves, bool)
        inhabited[leaves:] = self.leaf_labels != PADDING
        first = leaves // 2
        while first:
            inhabited[first : 2 * first] = inhabited[2 * first : 4 * first].reshape(-1, 2).any(axis=1)
            first //= 2
        return inhabited

    def project(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Float32:
        """Compute z of encoded queries, float32 [B, K]; the query tower's other inputs are ignored."""
        return project(inputs, self.projection, self.offset)

    def log_probabilities(self, z_BK: Float32, labels_BM: npt.NDArray[np.integer[Any]]) -> Float32:
        """Compute log p_n(y|x) of given labels, nats, float32 [B, M]: the unclipped sum over each path."""
        log_p_BM = np.zeros(labels_BM.shape, np.float32)
        for rows in _chunks(len(z_BK), labels_BM.shape[1] * self.weights.shape[1]):
            heap_BM = self.label_leaves[labels_BM[rows]].astype(np.int64) + len(self.leaf_labels)
            for height in range(self.depth, 0, -1):
                right_BM = (heap_BM >> (height - 1) & 1).astype(bool)
                activation_BM = self._activations(z_BK[rows], heap_BM >> height)
                left_BM, right_steps_BM = _log_steps(activation_BM)
                log_p_BM[rows] += np.where(right_BM, right_steps_BM, left_BM)
        return log_p_BM

    def all_log_probabilities(self, z_BK: Float32) -> Float32:
        """Compute log p_n(y|x) of every label, nats, float32 [B, L]; needs 4 · 2**depth numbers per query."""
        log_p_BN = np.zeros((len(z_BK), 1), np.float32)
        for level in range(self.depth):
            nodes = slice(2**level, 2 ** (level + 1))
            activation_BN = z_BK @ self.weights[nodes].T + self.biases[nodes]
            children_BN2 = np.stack(_log_steps(activation_BN), axis=2)
            children_BN2 += log_p_BN[:, :, None]
            log_p_BN = children_BN2.reshape(len(z_BK), -1)
        return log_p_BN[:, self.label_leaves]

    def beam(self, z_BK: Float32, width: int) -> tuple[Int64, Float32]:
        """Find labels by a beam of W nodes on every level, best first; exact if `width` >= L.

        Returns label rows int64 [B, W] and log p_n float32 [B, W]; −1 and −inf where there are fewer.
        """
        heap_BN = np.ones((len(z_BK), 1), np.int64)
        log_p_BN = np.zeros((len(z_BK), 1), np.float32)
        for _ in range(self.depth):
            activation_BN = np.empty(heap_BN.shape, np.float32)
            for rows in _chunks(len(z_BK), heap_BN.shape[1] * self.weights.shape[1]):
                activation_BN[rows] = self._activations(z_BK[rows], heap_BN[rows])
            left_BN, right_BN = _log_steps(activation_BN)
            log_p_BN = np.concatenate([log_p_BN + left_BN, log_p_BN + right_BN], axis=1)
            heap_BN = np.concatenate([2 * heap_BN, 2 * heap_BN + 1], axis=1)
            # Pruned leaves keep their probability, so the beam would otherwise go on to them.
            log_p_BN[~self._inhabited[heap_BN]] = -np.inf
            if heap_BN.shape[1] > width:
                best_BW = np.argpartition(-log_p_BN, width - 1, axis=1)[:, :width]
                heap_BN = np.take_along_axis(heap_BN, best_BW, axis=1)
                log_p_BN = np.take_along_axis(log_p_BN, best_BW, axis=1)
        labels_BN = self.leaf_labels[heap_BN - len(self.leaf_labels)].astype(np.int64)
        labels_BN[np.isneginf(log_p_BN)] = PADDING
        order_BN = np.lexsort((labels_BN, -log_p_BN), axis=1)
        missing = ((0, 0), (0, width - order_BN.shape[1]))
        return (
            np.pad(np.take_along_axis(labels_BN, order_BN, axis=1), missing, constant_values=PADDING),
            np.pad(np.take_along_axis(log_p_BN, order_BN, axis=1), missing, constant_values=-np.inf),
        )

    def write(self, path: Path) -> None:
        """Write an uncompressed .npz: `offset`, `weights`, `biases`, `leaf_labels`, `projection/FEATURE`."""
        arrays: dict[str, Any] = {f"{_PROJECTION}{name}": rows for name, rows in self.projection.items()}
        arrays |= {name: getattr(self, name) for name in ("offset", "weights", "biases", "leaf_labels")}
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def read(cls, path: Path) -> Proposal:
        """Read a file of `write`; `validate` checks its content."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as members:
                arrays = dict(members)
            return cls(
                projection={
                    name.removeprefix(_PROJECTION): arrays.pop(name)
                    for name in sorted(arrays)
                    if name.startswith(_PROJECTION)
                },
                **arrays,
            )
        except (OSError, EOFError, ValueError, TypeError, BadZipFile, zlib.error) as error:
            raise BundleCorruptError(f"{path}: expected a proposal tree (.npz): {error}") from error

    def validate(self, labels: int) -> None:
        """Check the tree and the projection."""
        nodes, dims = 1 << max(labels - 1, 0).bit_length(), self.offset.size
        shapes: dict[str, tuple[npt.NDArray[Any], type, tuple[int, ...]]] = {
            "offset": (self.offset, np.float32, (dims,)),
            "weights": (self.weights, np.float32, (nodes, dims)),
            "biases": (self.biases, np.float32, (nodes,)),
            "leaf_labels": (self.leaf_labels, np.int32, (nodes,)),
        }
        for name, rows in self.projection.items():
            shapes[f"{_PROJECTION}{name}"] = (rows, np.float32, (len(rows) if rows.ndim else 0, dims))
        for name, (array, dtype, shape) in shapes.items():
            require(
                f"proposal.npz array {name} has its type and shape",
                array.dtype == dtype and array.shape == shape,
                f"{np.dtype(dtype)} {shape}",
                f"{array.dtype} {array.shape}",
            )
            finite = np.isfinite(array)
            require(
                f"proposal.npz array {name} is finite",
                bool(finite.all()),
                "finite values",
                f"{array.size - np.count_nonzero(finite)} others",
            )
        require("proposal.npz projects a feature", len(self.projection) > 0, ">= 1 projection", "none")
        labels_of_leaves = np.sort(self.leaf_labels[self.leaf_labels != PADDING])
        require(
            "every label has exactly one leaf of proposal.npz",
            np.array_equal(labels_of_leaves, np.arange(labels)),
            f"label rows 0 to {labels - 1} once each",
            f"{len(np.unique(labels_of_leaves))} distinct of {len(labels_of_leaves)}",
        )
        inhabited = self._inhabited
        inner = np.arange(1, nodes)
        one_sided = inner[inhabited[2 * inner] ^ inhabited[2 * inner + 1]]
        towards_labels = self.biases[one_sided] * np.where(inhabited[2 * one_sided + 1], 1, -1)
        wrong = one_sided[(towards_labels < PADDING_BIAS) | self.weights[one_sided].any(axis=1)]
        require(
            "padding of proposal.npz has probability 0",
            len(wrong) == 0,
            f"w = 0 and |b| >= {PADDING_BIAS:g} away from subtrees without labels",
            f"{len(wrong)} nodes that differ, the first {wrong[:1].tolist()}",
        )

    def _activations(self, z_BK: Float32, nodes_BM: Int64) -> Float32:
        """Compute w·z + b at each row's own nodes, float32 [B, M]."""
        products_BM: Float32 = np.matmul(self.weights[nodes_BM], z_BK[:, :, None])[:, :, 0]
        products_BM += self.biases[nodes_BM]
        return products_BM


def project(inputs: Mapping[str, npt.NDArray[Any]], projection: Mapping[str, Float32], offset: Float32) -> Float32:
    """Compute `Σ_features Σ_p weight · projection[id] + offset`, float32 [B, K]; arguments: see `Proposal`."""
    z_BK = offset[None]
    for name, rows_RK in projection.items():
        values = inputs[name]
        if values.ndim == 2:
            z_BK = z_BK + _weighted_sum(rows_RK, values, inputs[f"{name}__weight"])
        elif np.issubdtype(values.dtype, np.integer):
            z_BK = z_BK + rows_RK[values]
        else:
            z_BK = z_BK + values.astype(np.float32)[:, None] * rows_RK
    return z_BK


def _log_steps(activations: Float32) -> tuple[Float32, Float32]:
    """Compute log σ(-a) and log σ(a), the steps left and right, without overflow."""
    # The exponential of −|a| cannot overflow.
    softplus = np.log1p(np.exp(-np.abs(activations)))
    return -np.maximum(activations, 0) - softplus, np.minimum(activations, 0) - softplus


def _weighted_sum(rows_RK: Float32, ids_BP: npt.NDArray[Any], weights_BP: Float32) -> Float32:
    total_BK = np.empty((len(ids_BP), rows_RK.shape[1]), np.float32)
    for rows in _chunks(len(ids_BP), ids_BP.shape[1] * rows_RK.shape[1]):
        total_BK[rows] = np.matmul(weights_BP[rows][:, None, :], rows_RK[ids_BP[rows]])[:, 0, :]
    return total_BK


def _chunks(rows: int, numbers_each: int) -> Iterator[slice]:
    """Yield slices of rows with about `_CHUNK` numbers each."""
    step = max(1, _CHUNK // max(numbers_each, 1))
    return (slice(start, start + step) for start in range(0, rows, step))
