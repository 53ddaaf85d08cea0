"""Samplers by what the model says of its query: `model` and `minimum_variance` [METHODS §2.1].

They look at query embeddings as they are, and at those of all labels as they were when the epoch began.

Legend: `B` batch, `M` draws per row, `L` labels, `D` model dimensions, `F` random features, `N` nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Array, Float32
from longtail.bundle.proposal import PADDING, PADDING_BIAS
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.sampling.base import DrawContext, LabelTable, Sampler, SamplerSetup
from longtail.trainer.sampling.walk import by_similarity, log_path, sample_leaves, subtree_sums

if TYPE_CHECKING:
    from keras.random import SeedGenerator

FEATURES_BANDWIDTH = 2.0
"""Of random features where none is given: the highest at which 128 of them are nearer the model than uniform draws."""
_NEVER = -1e30
"""Log-mass of what is never drawn: half of it is still far below any other."""
_sampler = partial(Sampler, None, in_batch=False, sees_embeddings=True)


def model(
    setup: SamplerSetup, *, negatives: int, exact: bool = False, features: int | None = None,
    bandwidth: float | None = None,
) -> Sampler:  # fmt: skip
    """Return negatives by the model itself, q ∝ exp(f) [R21, Table 1], of the epoch's first label embeddings.

    Per-row draws down a binary tree of labels that are alike: a subtree's mass Σ exp(f) is taken for its size times
    exp of its mean f, O(D log L) a draw (the idea of Blanc and Rendle 2018, with means for their kernel). The q that
    enters weights is the exact distribution of the draws, whatever the error of that. How far it is from exp(f), and
    how far the other two ways are, is a table in METHODS §2.1: the tree pays at any temperature there, random
    features only at a low bandwidth.

    Args:
        exact: no approximation: q ∝ exp(f) over the whole catalogue, O(B·L·D) a step, for small L or as reference.
        features: F, even: random Fourier features in place of means (Rawat et al. 2019), of unit vectors. Their error
            is e^bandwidth/√F of a label's mass: beyond `bandwidth` ≈ ½ ln F uniform draws are nearer the model.
        bandwidth: q ∝ exp(bandwidth·u·v), in place of f = u·v/T + b; with `features` 2 if not given.

    Relations: `uniform` as the bandwidth goes to 0. `adversarial` is fitted once instead of every epoch.
    `minimum_variance` with family `softmax` and weight `importance` is `exact` that never draws the positive.
    """
    if exact:
        return _whole_catalogue(setup, negatives, lambda _context, logits_BL: logits_BL, bandwidth)
    if features is not None:
        return _random_features(setup, negatives, features, FEATURES_BANDWIDTH if bandwidth is None else bandwidth)
    return _means(setup, negatives, bandwidth)


def minimum_variance(setup: SamplerSetup, *, negatives: int, uniform_share: float = 0.01) -> Sampler:
    """Return the q of least variance, q*(y'|x, y) ∝ ρ_yy' φ(−f_y'(x)) on labels other than y [R21 Prop. 5, eq. 17].

    ρ is the weight's margin, φ the family's; for the softmax families the terms are those of the bracket, ρ e^f_y',
    and pairwise they are ρ φ(f_y − f_y'). Every negative then contributes the same: were the embeddings those of this
    very step, the loss would not depend on the draws. Costs O(B·L·D) a step.

    Args:
        setup: L, B, D, and the terms of the loss.
        uniform_share: share of uniform draws, in [0, 1]: a label whose term was 0 when the epoch began may have one
            now, and q = 0 would leave it out for good. 0 is q* itself.
    """
    if setup.log_terms is None:
        raise ValueError("minimum_variance: expected the terms of a loss, received none")
    labels, log_terms = len(setup.log_pi_L), setup.log_terms

    def log_mass(context: DrawContext, logits_BL: Tensor) -> Tensor:
        own_BL = ops.equal(np.arange(labels, dtype=np.int32), context.positive_B[:, None])
        terms_BL = ops.where(own_BL, 2 * _NEVER, ops.maximum(log_terms(context.positive_B, logits_BL), _NEVER))
        log_best_BL = ops.log_softmax(terms_BL, axis=1)
        if not uniform_share:
            return log_best_BL
        log_uniform = float(np.log(uniform_share) - np.log(max(labels - 1, 1)))
        mixed_BL = ops.logaddexp(log_best_BL + float(np.log1p(-min(uniform_share, 1 - 1e-9))), log_uniform)
        return ops.where(own_BL, 2 * _NEVER, mixed_BL)

    return _whole_catalogue(setup, negatives, log_mass, None)


def _whole_catalogue(
    setup: SamplerSetup,
    negatives: int,
    log_mass: Callable[[DrawContext, Tensor], Tensor],
    bandwidth: float | None,
) -> Sampler:
    """q ∝ exp(log_mass) of every label, drawn down a tree of its sums for each row; `log_mass` is of logits [B, L]."""
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    labels_LD = untrained_variable(np.zeros((labels, setup.dim), np.float32), "label_embeddings")
    bias_L = untrained_variable(np.zeros(labels, np.float32), "label_biases")

    def refresh(table: LabelTable) -> None:
        scaled_LD, log_size_L = _scaled(table, bandwidth)
        labels_LD.assign(scaled_LD)
        bias_L.assign(log_size_L)

    def log_q_of_all(context: DrawContext) -> Tensor:
        logits_BL = ops.matmul(context.queries_BD, ops.transpose(labels_LD.value)) + bias_L.value
        return ops.log_softmax(log_mass(context, logits_BL), axis=1)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        level_BN = ops.pad(ops.exp(log_q_of_all(context)), ((0, 0), (0, (1 << depth) - labels)))
        levels = [level_BN]
        for _ in range(depth):
            level_BN = level_BN[:, ::2] + level_BN[:, 1::2]
            levels.append(level_BN)
        heap_BN = ops.log(ops.concatenate([level_BN, *reversed(levels)], axis=1))

        def right_log_odds(log_BN: Tensor, nodes_BM: Tensor) -> Tensor:
            right_BM = ops.take_along_axis(log_BN, 2 * nodes_BM + 1, axis=1)
            return right_BM - ops.take_along_axis(log_BN, 2 * nodes_BM, axis=1)

        return sample_leaves(right_log_odds, heap_BN, depth, (setup.batch_size, negatives), seed)

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        of_BM = labels_of[:, None] if len(labels_of.shape) == 1 else labels_of
        return ops.reshape(ops.take_along_axis(log_q_of_all(context), of_BM, axis=1), labels_of.shape)

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=(labels_LD, bias_L))


def _means(setup: SamplerSetup, negatives: int, bandwidth: float | None) -> Sampler:
    """Walk by a subtree's log-mass log Σ e^b + u·(mean of v, weighed by e^b); a leaf's is f itself."""
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    untrained = np.zeros((labels, setup.dim), np.float32)
    tables = tuple(untrained_variable(array, name) for name, array in _tree(untrained, untrained[:, 0]).items())
    means_ND, log_sizes_N, leaves_L, labels_N = tables

    def refresh(table: LabelTable) -> None:
        for variable, array in zip(tables, _tree(*_scaled(table, bandwidth)).values(), strict=True):
            variable.assign(array)

    def right_log_odds(queries_BD: Tensor, nodes_BM: Tensor) -> Tensor:
        step_BMD = backend.gather(means_ND, 2 * nodes_BM + 1) - backend.gather(means_ND, 2 * nodes_BM)
        log_ratio_BM = backend.gather(log_sizes_N, 2 * nodes_BM + 1) - backend.gather(log_sizes_N, 2 * nodes_BM)
        return ops.einsum("bmd,bd->bm", step_BMD, queries_BD) + log_ratio_BM

    def queries_of(context: DrawContext) -> Tensor:
        return ops.convert_to_tensor(context.queries_BD)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        shape = (setup.batch_size, negatives)
        return backend.gather(labels_N, sample_leaves(right_log_odds, queries_of(context), depth, shape, seed))

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        return log_path(right_log_odds, queries_of(context), depth, backend.gather(leaves_L, labels_of))

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=tables)


def _tree(scaled_LD: Float32, bias_L: Float32) -> dict[str, Array]:
    """Return what `_means` walks by: means and log-sizes of all nodes in heap order, leaves of labels, labels of
    leaves."""
    labels = len(scaled_LD)
    depth = max(labels - 1, 0).bit_length()
    leaves_L, labels_N = by_similarity(scaled_LD), np.full(1 << depth, PADDING, np.int32)
    labels_N[leaves_L] = np.arange(labels)
    highest = bias_L.max()
    size_L1 = np.exp(bias_L - highest)[:, None]
    rows_ND = np.zeros((1 << depth, 1 + scaled_LD.shape[1]), np.float32)
    rows_ND[leaves_L] = np.concatenate([size_L1, size_L1 * scaled_LD], axis=1)
    sums_ND = subtree_sums(rows_ND)
    size_N = np.maximum(sums_ND[:, 0], np.finfo(np.float32).tiny)
    empty_N = sums_ND[:, 0] == 0
    return {
        "subtree_means": (sums_ND[:, 1:] / size_N[:, None]).astype(np.float32),
        "subtree_log_sizes": np.where(empty_N, -PADDING_BIAS, np.log(size_N)).astype(np.float32),
        "label_leaves": leaves_L,
        "leaf_labels": labels_N,
    }


def _random_features(setup: SamplerSetup, negatives: int, features: int, bandwidth: float) -> Sampler:
    """Walk by sums of features over subtrees, of labels in row order; a sum that is not positive is lifted."""
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    half = features // 2
    scale = np.float32(1 / np.sqrt(half))
    omega = np.random.default_rng(0).normal(0, np.sqrt(bandwidth), (setup.dim, half)).astype(np.float32)
    sums_NF = untrained_variable(np.zeros((2 << depth, 2 * half), np.float32), "subtree_sums")
    are_labels_N1 = (np.arange(1 << depth) < labels)[:, None].astype(np.float32)
    sizes_N = untrained_variable(subtree_sums(are_labels_N1)[:, 0], "sizes")

    def refresh(table: LabelTable) -> None:
        angles = table.embeddings_LD @ omega
        leaves = np.zeros((1 << depth, 2 * half), np.float32)
        leaves[:labels] = scale * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        sums_NF.assign(subtree_sums(leaves))

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
        return sample_leaves(right_log_odds, features_of(context), depth, (setup.batch_size, negatives), seed)

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        return log_path(right_log_odds, features_of(context), depth, labels_of)

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=(sums_NF, sizes_N))


def _scaled(table: LabelTable, bandwidth: float | None) -> tuple[Float32, Float32]:
    """Return embeddings [L, D] and biases [L] whose `u·v + b` is what q is the exponential of."""
    no_bias_L = np.zeros(len(table.embeddings_LD), np.float32)
    if bandwidth is not None:
        return (table.embeddings_LD * bandwidth).astype(np.float32), no_bias_L
    bias_L = no_bias_L if table.bias_L is None else table.bias_L
    return (table.embeddings_LD / table.temperature).astype(np.float32), bias_L
