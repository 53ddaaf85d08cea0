"""Samplers by the model's own scores: `model` and `minimum_variance` [METHODS §2.1].

They read the present query embeddings, and the label embeddings from the beginning of the epoch.

Legend: `B` batch, `M` draws per row, `L` labels, `D` model dimensions, `F` random features, `N` nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from longtail.bundle.arrays import Array, Float32
from longtail.bundle.proposal import PADDING, PADDING_BIAS
from longtail.trainer import backend
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, ops
from longtail.trainer.sampling.base import Count, DrawContext, LabelTable, Sampler, SamplerSetup
from longtail.trainer.sampling.walk import assign_leaves, log_path, sample_leaves, subtree_sums

if TYPE_CHECKING:
    from keras.random import SeedGenerator

FEATURES_BANDWIDTH = 2.0
"""Default bandwidth of random features: the highest at which 128 of them are closer to the model than uniform draws."""
_NEVER = -1e30
"""Log-mass of a label that is never drawn; even half of it is far below any other."""
_sampler = partial(Sampler, None, in_batch=False, sees_embeddings=True)


def model(
    setup: SamplerSetup,
    *,
    negatives: Count,
    exact: bool = False,
    features: Annotated[int, Field(ge=2, multiple_of=2)] | None = None,
    bandwidth: Annotated[float, Field(gt=0)] | None = None,
) -> Sampler:
    """Draw negatives by the model's scores, q ∝ exp(f), refreshed every epoch [R21, Table 1].

    Each row draws down a binary tree of similar labels. The mass Σ exp(f) of a subtree is approximated by its size
    times exp of its mean f, which costs O(D log L) per draw (the idea of Blanc and Rendle 2018, with means instead of
    their kernel). Despite the approximation, the q in weights is the exact distribution of the draws. METHODS §2.1 has
    a table of the distances from exp(f) for the three variants: the tree is worthwhile at every temperature there,
    random features only at a low bandwidth.

    Args:
        negatives: labels that each row draws.
        exact: uses q ∝ exp(f) over the whole catalogue without approximation, O(B·L·D) a step, for small L or as a
            reference.
        features: F, even; random Fourier features of unit vectors replace subtree means (Rawat et al. 2019). Their
            error is e^bandwidth/√F of a label's mass: above `bandwidth` ≈ ½ ln F, uniform draws are closer to the
            model.
        bandwidth: uses q ∝ exp(bandwidth·u·v) instead of f = u·v/T + b; 2 by default with `features`.

    Relations: approaches `uniform` as the bandwidth goes to 0. `adversarial` is fitted once, not every epoch.
    `minimum_variance` with family `softmax` and weight `importance` equals `exact` without draws of the positive.
    """
    if exact:
        return _whole_catalogue(setup, negatives, lambda _context, logits_BL: logits_BL, bandwidth)
    if features is not None:
        return _random_features(setup, negatives, features, FEATURES_BANDWIDTH if bandwidth is None else bandwidth)
    return _means(setup, negatives, bandwidth)


def minimum_variance(
    setup: SamplerSetup, *, negatives: Count, uniform_share: Annotated[float, Field(ge=0, le=1)] = 0.01
) -> Sampler:
    """Draw from the q of least variance [R21 Prop. 5, eq. 17]: q*(y'|x, y) ∝ ρ_yy' φ(−f_y'(x)) for y' ≠ y.

    ρ is the weight's margin and φ the family's loss. For softmax families the terms are those of the bracket, ρ e^f_y';
    for pairwise forms they are ρ φ(f_y − f_y'). Every negative then contributes equally to the loss: with embeddings of
    the present step, the loss would not depend on the draws. A step costs O(B·L·D).

    Args:
        setup: L, B, D, and the terms of the loss.
        negatives: labels that each row draws.
        uniform_share: share of uniform draws, in [0, 1]. A label whose term was 0 at the beginning of the epoch may
            have a term now, and with q = 0 it could never be drawn. 0 is q* itself.
    """
    if setup.log_terms is None:
        raise ValueError("minimum_variance: expected the terms of a loss, received none")
    labels, log_terms = len(setup.log_pi_L), setup.log_terms

    def log_mass(context: DrawContext, logits_BL: Tensor) -> Tensor:
        # The positive gets 2 · _NEVER, below labels whose term is 0, so that it stays impossible even if all are 0.
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
    """Draw from q ∝ exp(log_mass) over all labels, by a tree of sums per row.

    `log_mass` is a function of the logits [B, L].
    """
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    labels_LD = untrained_variable(np.zeros((labels, setup.dim), np.float32), "label_embeddings")
    bias_L = untrained_variable(np.zeros(labels, np.float32), "label_biases")

    def refresh(table: LabelTable) -> None:
        scaled_LD, log_size_L = _scale_embeddings(table, bandwidth)
        labels_LD.assign(scaled_LD)
        bias_L.assign(log_size_L)

    def compute_log_q(context: DrawContext) -> Tensor:
        logits_BL = ops.matmul(context.queries_BD, ops.transpose(labels_LD.value)) + bias_L.value
        return ops.log_softmax(log_mass(context, logits_BL), axis=1)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        # Sums of probabilities over subtrees, from the leaves up; padding leaves have probability 0.
        level_BN = ops.pad(ops.exp(compute_log_q(context)), ((0, 0), (0, (1 << depth) - labels)))
        levels = [level_BN]
        for _ in range(depth):
            level_BN = level_BN[:, ::2] + level_BN[:, 1::2]
            levels.append(level_BN)
        # Heap order, as `sample_leaves` numbers nodes: column 1 is the root (column 0 repeats it), then level by level.
        heap_BN = ops.log(ops.concatenate([level_BN, *reversed(levels)], axis=1))

        def right_log_odds(log_BN: Tensor, nodes_BM: Tensor) -> Tensor:
            right_BM = ops.take_along_axis(log_BN, 2 * nodes_BM + 1, axis=1)
            return right_BM - ops.take_along_axis(log_BN, 2 * nodes_BM, axis=1)

        return sample_leaves(right_log_odds, heap_BN, depth, (setup.batch_size, negatives), seed)

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        of_BM = labels_of[:, None] if len(labels_of.shape) == 1 else labels_of
        return ops.reshape(ops.take_along_axis(compute_log_q(context), of_BM, axis=1), labels_of.shape)

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=(labels_LD, bias_L))


def _means(setup: SamplerSetup, negatives: int, bandwidth: float | None) -> Sampler:
    """Walk by the approximate log-mass of subtrees: log Σ e^b + u·(mean of v, weighted by e^b), f at a leaf."""
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    untrained = np.zeros((labels, setup.dim), np.float32)
    tables = tuple(untrained_variable(array, name) for name, array in _tree(untrained, untrained[:, 0]).items())
    means_ND, log_sizes_N, leaves_L, labels_N = tables

    def refresh(table: LabelTable) -> None:
        for variable, array in zip(tables, _tree(*_scale_embeddings(table, bandwidth)).values(), strict=True):
            variable.assign(array)

    def right_log_odds(queries_BD: Tensor, nodes_BM: Tensor) -> Tensor:
        step_BMD = backend.gather(means_ND, 2 * nodes_BM + 1) - backend.gather(means_ND, 2 * nodes_BM)
        log_ratio_BM = backend.gather(log_sizes_N, 2 * nodes_BM + 1) - backend.gather(log_sizes_N, 2 * nodes_BM)
        return ops.einsum("bmd,bd->bm", step_BMD, queries_BD) + log_ratio_BM

    def read_queries(context: DrawContext) -> Tensor:
        return ops.convert_to_tensor(context.queries_BD)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        shape = (setup.batch_size, negatives)
        return backend.gather(labels_N, sample_leaves(right_log_odds, read_queries(context), depth, shape, seed))

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        return log_path(right_log_odds, read_queries(context), depth, backend.gather(leaves_L, labels_of))

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=tables)


def _tree(scaled_LD: Float32, bias_L: Float32) -> dict[str, Array]:
    """Build the arrays of `_means`: means and log-sizes of nodes in heap order, leaves of labels, labels of leaves."""
    labels = len(scaled_LD)
    depth = max(labels - 1, 0).bit_length()
    leaves_L, labels_N = assign_leaves(scaled_LD), np.full(1 << depth, PADDING, np.int32)
    labels_N[leaves_L] = np.arange(labels)
    highest = bias_L.max()  # sizes are relative to the largest, so exp cannot overflow
    size_L1 = np.exp(bias_L - highest)[:, None]
    # The first column sums e^b, the others sum e^b·v; their ratio is the weighted mean of v.
    rows_ND = np.zeros((1 << depth, 1 + scaled_LD.shape[1]), np.float32)
    rows_ND[leaves_L] = np.concatenate([size_L1, size_L1 * scaled_LD], axis=1)
    sums_ND = subtree_sums(rows_ND)
    # Padding has size 0: the mean of its subtree is never used, but must not be NaN.
    size_N = np.maximum(sums_ND[:, 0], np.finfo(np.float32).tiny)
    empty_N = sums_ND[:, 0] == 0
    return {
        "subtree_means": (sums_ND[:, 1:] / size_N[:, None]).astype(np.float32),
        "subtree_log_sizes": np.where(empty_N, -PADDING_BIAS, np.log(size_N)).astype(np.float32),
        "label_leaves": leaves_L,
        "leaf_labels": labels_N,
    }


def _random_features(setup: SamplerSetup, negatives: int, features: int, bandwidth: float) -> Sampler:
    """Walk by sums of random features over subtrees, with labels in row order."""
    labels = len(setup.log_pi_L)
    depth = max(labels - 1, 0).bit_length()
    half = features // 2
    scale = np.float32(1 / np.sqrt(half))
    # E cos(ω·(u − v)) = exp(−bandwidth·|u − v|²/2) ∝ exp(bandwidth·u·v) for unit vectors and ω ~ N(0, bandwidth).
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
        # The estimate of a mass may be zero or negative; every label keeps at least 1e-3, so its q is positive.
        log_mass_BM = ops.log(ops.maximum(mass_BM, 1e-3 * ops.maximum(sizes_BM, 1.0)))
        return ops.where(sizes_BM > 0, log_mass_BM, -PADDING_BIAS)

    def right_log_odds(features_BF: Tensor, nodes_BM: Tensor) -> Tensor:
        return log_mass(features_BF, 2 * nodes_BM + 1) - log_mass(features_BF, 2 * nodes_BM)

    def compute_features(context: DrawContext) -> Tensor:
        angles = ops.matmul(context.queries_BD, omega)
        return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=1) * scale

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        return sample_leaves(right_log_odds, compute_features(context), depth, (setup.batch_size, negatives), seed)

    def log_q(context: DrawContext, labels_of: Tensor) -> Tensor:
        return log_path(right_log_odds, compute_features(context), depth, labels_of)

    return _sampler(draw=draw, log_q=log_q, refresh=refresh, variables=(sums_NF, sizes_N))


def _scale_embeddings(table: LabelTable, bandwidth: float | None) -> tuple[Float32, Float32]:
    """Scale embeddings [L, D] and biases [L] so that q ∝ exp(u·v + b)."""
    no_bias_L = np.zeros(len(table.embeddings_LD), np.float32)
    if bandwidth is not None:
        return (table.embeddings_LD * bandwidth).astype(np.float32), no_bias_L
    bias_L = no_bias_L if table.bias_L is None else table.bias_L
    return (table.embeddings_LD / table.temperature).astype(np.float32), bias_L
