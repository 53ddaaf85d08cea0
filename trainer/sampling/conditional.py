"""Samplers that look at the query: the adversarial tree and the model itself, approximated [METHODS §2.1, §5].

Both walk a binary tree from its root, all draws of all rows at once: O(log L) small inner products a draw.
Nodes are numbered as a heap: 1 is the root, n has the children 2n and 2n + 1.

Legend: `B` batch, `M` draws per row, `L` labels, `K` projected and `D` model dimensions, `F` random features,
`N` nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle import Proposal
from longtail.bundle.arrays import Array, Float32
from longtail.bundle.proposal import PADDING_BIAS
from longtail.trainer import backend
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.sampling.base import DrawContext, Sampler, SamplerSetup

if TYPE_CHECKING:
    from keras.random import SeedGenerator

TREE_DIMS, TREE_PENALTY = 16, 0.1
"""K and λ_n of the adversarial tree's fit [BM20 §5]."""

RightLogOdds = Callable[[Tensor, Tensor], Tensor]
"""Log-odds of turning right at nodes [B, M], given what is known of the rows [B, K]."""


def adversarial(
    setup: SamplerSetup,
    *,
    negatives: int,
    dims: int = TREE_DIMS,  # noqa: ARG001
    penalty: float = TREE_PENALTY,  # noqa: ARG001
) -> Sampler:
    """Adversarial negatives: q = p_n(y'|x), a tree fitted to the training pairs beforehand [BM20 §3].

    Per-row draws by ancestral sampling, O(K log L) each. The bundle keeps the tree, and the service's dial removes
    log p_n(y|x) in place of log ν of the labels.

    Args:
        setup: holds the fitted tree.
        negatives: M of each row.
        dims: K of the fit, principal components of the query's features that the tree sees.
        penalty: λ_n of the fit, nats.

    Raises:
        ValueError: `setup` has no tree.

    Relations: with family `nce` and a regularizer, [BM20]'s own loss. `model` looks at the model instead of a tree
    that was fitted beforehand.
    """
    proposal = setup.proposal
    if proposal is None:
        raise ValueError("adversarial: expected a catalogue with a fitted proposal, received none")
    weights_NK = _constant(proposal.weights, "proposal_weights")
    biases_N = _constant(proposal.biases, "proposal_biases")
    labels_of = _constant(proposal.leaf_labels, "proposal_labels")
    leaves_L = _constant(proposal.label_leaves, "label_leaves")
    project, tables = _projection(proposal)

    def right_log_odds(z_BK: Tensor, nodes_BM: Tensor) -> Tensor:
        return ops.einsum("bmk,bk->bm", backend.gather(weights_NK, nodes_BM), z_BK) + backend.gather(biases_N, nodes_BM)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        shape = (setup.batch_size, negatives)
        return backend.gather(
            labels_of, _sample_leaves(right_log_odds, project(context.inputs), proposal.depth, shape, seed)
        )

    def log_q(context: DrawContext, labels: Tensor) -> Tensor:
        return _log_path(right_log_odds, project(context.inputs), proposal.depth, backend.gather(leaves_L, labels))

    return Sampler(
        None,
        in_batch=False,
        draw=draw,
        log_q=log_q,
        variables=(weights_NK, biases_N, labels_of, leaves_L, *tables),
    )


def model(setup: SamplerSetup, *, negatives: int, features: int = 128, bandwidth: float = 4.0) -> Sampler:
    """Negatives by the model itself: q ∝ exp(bandwidth·u·v) of the epoch's start, by random Fourier features.

    RF-softmax (Rawat et al. 2019): the Gaussian kernel of unit vectors is exp(−bandwidth·|u − v|²/2), its
    features' inner product with sums over subtrees gives the odds at every node (Blanc & Rendle 2018). A sum that
    the features estimate too low counts as one label in a thousand of the subtree, so q stays positive; it is the
    exact distribution of the draws, whatever the features' error. Per-row draws, O(F log L) each.

    Args:
        setup: L, B and D.
        negatives: M of each row.
        features: F, even; more of them follow the model more closely.
        bandwidth: of the kernel; higher is harder and needs more features, 1/T is the model itself.

    Relations: `uniform` as the bandwidth goes to 0. `adversarial` is fitted once instead of every epoch.
    """
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    half = features // 2
    scale = np.float32(1 / np.sqrt(half))
    omega = np.random.default_rng(0).normal(0, np.sqrt(bandwidth), (setup.dim, half)).astype(np.float32)
    sums_NF = keras.Variable(
        "zeros", shape=(2 << depth, 2 * half), dtype="float32", trainable=False, name="subtree_sums"
    )
    sizes_N = _constant(_subtree_sums((np.arange(1 << depth) < labels)[:, None].astype(np.float32))[:, 0], "sizes")

    def embed(x: Float32) -> Float32:
        angles = x @ omega
        embedded: Float32 = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return embedded * scale

    def refresh(labels_LD: Float32) -> None:
        leaves = np.zeros((1 << depth, 2 * half), np.float32)
        leaves[:labels] = embed(labels_LD)
        sums_NF.assign(_subtree_sums(leaves))

    def log_mass(features_BF: Tensor, nodes_BM: Tensor) -> Tensor:
        sizes_BM = backend.gather(sizes_N, nodes_BM)
        mass_BM = ops.einsum("bmf,bf->bm", backend.gather(sums_NF, nodes_BM), features_BF)
        log_mass_BM = ops.log(ops.maximum(mass_BM, 1e-3 * ops.maximum(sizes_BM, 1.0)))
        return ops.where(sizes_BM > 0, log_mass_BM, -PADDING_BIAS)

    def right_log_odds(features_BF: Tensor, nodes_BM: Tensor) -> Tensor:
        return log_mass(features_BF, 2 * nodes_BM + 1) - log_mass(features_BF, 2 * nodes_BM)

    def features_of(context: DrawContext) -> Tensor:
        angles = ops.matmul(context.queries_BD, omega)
        return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=1) * scale

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        return _sample_leaves(right_log_odds, features_of(context), depth, (setup.batch_size, negatives), seed)

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        return _log_path(right_log_odds, features_of(context), depth, labels_of)

    return Sampler(
        None,
        in_batch=False,
        draw=draw,
        log_q=log_q,
        sees_embeddings=True,
        refresh=refresh,
        variables=(sums_NF, sizes_N),
    )


def _sample_leaves(
    right_log_odds: RightLogOdds, rows_BK: Tensor, depth: int, shape: tuple[int, int], seed: SeedGenerator
) -> Tensor:
    """Leaves reached by ancestral sampling, int32 of `shape`, numbered from 0 left to right."""
    nodes_BM = ops.ones(shape, "int32")
    for _ in range(depth):
        right_BM = keras.random.uniform(shape, seed=seed) < ops.sigmoid(right_log_odds(rows_BK, nodes_BM))
        nodes_BM = 2 * nodes_BM + ops.cast(right_BM, "int32")
    return nodes_BM - (1 << depth)


def _log_path(right_log_odds: RightLogOdds, rows_BK: Tensor, depth: int, leaves: Tensor) -> Tensor:
    """Log-probability of leaves [B] or [B, M], of the same shape."""
    leaves_BM = leaves[:, None] if len(leaves.shape) == 1 else leaves
    total_BM = ops.zeros(leaves_BM.shape, "float32")
    for level in range(depth):
        nodes_BM = ops.right_shift(leaves_BM + (1 << depth), depth - level)
        right_BM = ops.bitwise_and(ops.right_shift(leaves_BM, depth - level - 1), 1)
        sign_BM = ops.cast(2 * right_BM - 1, "float32")
        total_BM = total_BM - ops.softplus(-sign_BM * right_log_odds(rows_BK, nodes_BM))
    return ops.reshape(total_BM, leaves.shape)


def _projection(proposal: Proposal) -> tuple[Callable[[dict[str, Tensor]], Tensor], list[keras.Variable]]:
    """`Proposal.project` on the device, and the tables it reads."""
    tables = {name: _constant(table, f"projection_{name}") for name, table in proposal.projection.items()}

    def project(inputs: dict[str, Tensor]) -> Tensor:
        z_BK = ops.convert_to_tensor(proposal.offset)[None, :]
        for name, table in tables.items():
            column = ops.convert_to_tensor(inputs[name])
            if len(column.shape) == 2:
                weights_BP = ops.convert_to_tensor(inputs[f"{name}__weight"])
                z_BK = z_BK + ops.einsum("bpk,bp->bk", backend.gather(table, column), weights_BP)
            elif "float" in keras.backend.standardize_dtype(column.dtype):
                z_BK = z_BK + column[:, None] * table.value
            else:
                z_BK = z_BK + backend.gather(table, column)
        return z_BK

    return project, list(tables.values())


def _subtree_sums(leaves: Float32) -> Float32:
    """Sums over every subtree, [2·leaves, F], in heap order; row 0 is unused."""
    size = len(leaves)
    sums = np.zeros((2 * size, leaves.shape[1]), np.float32)
    sums[size:] = leaves
    while size > 1:
        size //= 2
        sums[size : 2 * size] = sums[2 * size : 4 * size : 2] + sums[2 * size + 1 : 4 * size : 2]
    return sums


def _constant(array: Array, name: str) -> keras.Variable:
    return keras.Variable(array, dtype=str(array.dtype), trainable=False, name=name)
