"""Samplers whose draws do not depend on the query: `q(y')` of METHODS §2.1, drawn on the device.

A sampler is a function from a `SamplerSetup`, and the parameters that a recipe may set, to a `Sampler`.

Legend: `B` batch size, `M` drawn negatives, `L` labels.

The examples of this file are of a catalogue of four labels with frequencies ½, ¼, ⅛ and ⅛, and batches of 8:

    >>> setup = SamplerSetup(np.log([0.5, 0.25, 0.125, 0.125]), batch_size=8)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.sampling.base import DrawContext, Sampler, SamplerSetup

if TYPE_CHECKING:
    from keras.random import SeedGenerator

_REDRAWS = 4
"""Times that `popularity` draws again what hit the positive; what still hits is masked as any accidental hit."""


def in_batch(setup: SamplerSetup) -> Sampler:
    """In-batch negatives: the batch's other labels; q = π in expectation [R21, Table 1; Yi19].

    Costs no draw and no further embedding. B − 1 draws a row. q is the label's share of the training pairs, without
    smoothing, which is what batches hold; they are cut from N pairs without replacement, so q is right to 1/N. A label
    in no pair, which no batch holds, has its smoothed frequency.

    Relations: `popularity` with α = 1 draws from the same q.

    Example:
        >>> np.exp(in_batch(setup).log_q_L)
        array([0.5  , 0.25 , 0.125, 0.125], dtype=float32)
    """
    log_share_L = _log_share(setup)
    log_q_L = np.where(np.isneginf(log_share_L), setup.log_pi_L, log_share_L).astype(np.float32)
    return Sampler(log_q_L, in_batch=True, draw=None, q_of_pi=lambda log_pi: log_pi)


def uniform(
    setup: SamplerSetup, *, negatives: int, shared: bool = True, exclude_positive: bool = False, replace: bool = True
) -> Sampler:
    """Uniform negatives: q = 1/L [R21, Table 1; without replacement Re19 Algorithm 1].

    Args:
        negatives: M, for the whole batch or for each row.
        shared: one set of draws for the whole batch.
        exclude_positive: per row, a row's positive is never drawn: q = 1/(L − 1) on the others.
        replace: False draws M different labels, every set of M equally likely.

    Weights are exact either way, for any label is one of the M with probability M/L or comes M/L times in the mean.
    Without replacement the variance of [R21 eq. 10] is (L − M)/(L − 1) times as large, and none at all for M = L.

    Relations: `popularity` with α = 0. Without replacement and M = L, `full`.

    Example:
        >>> np.exp(uniform(setup, negatives=3).log_q_L)
        array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    labels = len(setup.log_pi_L)
    drawable = labels - 1 if exclude_positive else labels
    shape = (negatives,) if shared and not exclude_positive else (setup.batch_size, negatives)

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        drawn: Tensor
        if replace:
            drawn = keras.random.randint(shape, 0, drawable, dtype="int32", seed=seed)
        else:
            drawn = distinct(shape, drawable, seed)
        if exclude_positive:
            drawn = drawn + ops.cast(drawn >= context.positive_B[:, None], "int32")
        return drawn

    log_miss = (lambda log_q: ops.log1p(-ops.exp(log_q))) if exclude_positive else None
    return Sampler(np.full(labels, -np.log(labels), np.float32), in_batch=False, draw=draw, log_miss=log_miss)


def popularity(
    setup: SamplerSetup, *, negatives: int, alpha: float = 1.0, shared: bool = True, exclude_positive: bool = False
) -> Sampler:
    """Return negatives by popularity: q ∝ π^α, drawn with replacement by Walker's alias method.

    Args:
        negatives: M, for the whole batch or for each row.
        alpha: α; 1 the training frequency, ¾ word2vec's (Mikolov et al. 2013), 0 uniform.
        shared: one set of draws for the whole batch.
        exclude_positive: per row, draws that hit the row's positive are drawn again, a few times.

    Relations: `uniform` with α = 0; the q of `in_batch` with α = 1.

    Example:
        >>> np.exp(popularity(setup, negatives=3, alpha=2.0).log_q_L).round(3)
        array([0.727, 0.182, 0.045, 0.045], dtype=float32)
    """
    log_q_L = alpha * setup.log_pi_L
    log_q_L = log_q_L - np.logaddexp.reduce(log_q_L)
    keep_L, alias_L = alias_table(np.exp(log_q_L))
    shape = (negatives,) if shared and not exclude_positive else (setup.batch_size, negatives)

    def once(seed: SeedGenerator) -> Tensor:
        cell = keras.random.randint(shape, 0, len(keep_L), dtype="int32", seed=seed)
        stays = keras.random.uniform(shape, seed=seed) < ops.take(keep_L, cell, axis=0)
        return ops.where(stays, cell, ops.take(alias_L, cell, axis=0))

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        drawn = once(seed)
        for _ in range(_REDRAWS if exclude_positive else 0):
            drawn = ops.where(ops.equal(drawn, context.positive_B[:, None]), once(seed), drawn)
        return drawn

    def log_miss(log_q: Tensor) -> Tensor:
        still_hits = ops.exp((1 + _REDRAWS) * log_q)
        return ops.log1p(-ops.minimum(ops.exp(log_q), 1 - 1e-6)) - ops.log1p(-ops.minimum(still_hits, 1 - 1e-6))

    return Sampler(
        log_q_L.astype(np.float32), in_batch=False, draw=draw, log_miss=log_miss if exclude_positive else None
    )


def mixed(setup: SamplerSetup, *, negatives: int) -> Sampler:
    """Mixed negative sampling: the batch's labels and M uniform draws (Yang et al. 2020).

    q = ((B − 1)·π + M/L)/(B − 1 + M), the mixture's own: a row's own place in the batch is no draw. Labels that are
    in no pair are negatives too, unless features beside their id tell what they are [METHODS §9].

    Args:
        negatives: M, shared by the batch.

    Relations: `in_batch` and `uniform` together.

    Example:
        >>> np.exp(mixed(setup, negatives=8).log_q_L).round(3)
        array([0.367, 0.25 , 0.192, 0.192], dtype=float32)
    """
    others, labels = setup.batch_size - 1, len(setup.log_pi_L)
    log_uniform = float(np.log(negatives) - np.log(labels))

    def q_of_pi(log_pi: Tensor) -> Tensor:
        mass = ops.logaddexp(log_pi + float(np.log(others)), ops.full_like(log_pi, log_uniform))
        return mass - float(np.log(others + negatives))

    log_q_L = np.logaddexp(np.log(others) + _log_share(setup), log_uniform) - np.log(others + negatives)
    draw = uniform(setup, negatives=negatives).draw
    return Sampler(log_q_L.astype(np.float32), in_batch=True, draw=draw, q_of_pi=q_of_pi)


def full(setup: SamplerSetup) -> Sampler:
    """Return every label once: no sampling, the reference. q = 1/L, and the positive is masked.

    A step costs O(B·L·D): for catalogues of a few ten thousand labels.

    Relations: with weight `importance` and family `softmax`, the full softmax cross-entropy itself.

    Example:
        >>> np.exp(full(setup).log_q_L)
        array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    labels = len(setup.log_pi_L)
    return Sampler(
        np.full(labels, -np.log(labels), np.float32),
        in_batch=False,
        draw=lambda _seed, _context: ops.arange(labels, dtype="int32"),
    )


def distinct(shape: tuple[int, ...], labels: int, seed: SeedGenerator) -> Tensor:
    """Different numbers below `labels` along the last axis, int32 of `shape`; every ordered choice equally likely.

    The first M swaps of a Fisher-Yates shuffle, all at once: swap i exchanges places i and j_i ≥ i and gives what
    was at j_i. That is what the last swap before i to touch j_i had left there, or j_i itself. These references are
    followed by pointer doubling. Costs a sort of M numbers a row and log₂ M gathers, whatever the number of labels.

    Args:
        shape: [M] or [B, M].

    Example:
        >>> np.sort(distinct((4,), 4, keras.random.SeedGenerator(1)))
        array([0, 1, 2, 3], dtype=int32)
    """
    rows, draws = int(np.prod(shape[:-1])), shape[-1]
    step_BM = ops.broadcast_to(np.arange(draws, dtype=np.int32), (rows, draws))
    bits_BM = keras.random.randint((rows, draws), 0, np.iinfo(np.int32).max, dtype="int32", seed=seed)
    place_BM = step_BM + bits_BM % (labels - step_BM)
    # What is at place s before step s came from the last earlier swap with it, and so on back to a place untouched.
    row_BM = np.arange(rows, dtype=np.int32)[:, None] * draws
    swapped_BM = ops.where((place_BM > step_BM) & (place_BM < draws), place_BM + row_BM, rows * draws)
    last_N = ops.segment_max(ops.reshape(step_BM, (-1,)), ops.reshape(swapped_BM, (-1,)), rows * draws + 1)
    origin_BM = ops.reshape(last_N[:-1], (rows, draws))
    origin_BM = ops.where(origin_BM < 0, step_BM, origin_BM)
    for _ in range(draws.bit_length()):
        origin_BM = ops.take_along_axis(origin_BM, origin_BM, axis=1)
    # Sorted by place, then by step, the last earlier swap with the same place is the neighbour.
    order_BM = ops.argsort(place_BM, axis=1)
    sorted_BM = ops.take_along_axis(place_BM, order_BM, axis=1)
    repeats_BM = ops.pad(ops.equal(sorted_BM[:, 1:], sorted_BM[:, :-1]), ((0, 0), (1, 0)))
    before_BM = ops.pad(order_BM[:, :-1], ((0, 0), (1, 0)))
    taken_BM = ops.where(repeats_BM, ops.take_along_axis(origin_BM, before_BM, axis=1), sorted_BM)
    return ops.reshape(ops.take_along_axis(taken_BM, ops.argsort(order_BM, axis=1), axis=1), shape)


def _log_share(setup: SamplerSetup) -> Float64:
    """log of the share of the batches' places that a label has, float64 [L]; −inf for a label in no pair."""
    return setup.log_pi_L if setup.log_share_L is None else setup.log_share_L


def alias_table(probability_L: Float64) -> tuple[Float32, Int32]:
    """Walker's alias table without a loop: a draw is cell `i` with probability `keep[i]`, else `alias[i]`.

    Cells with less than their share of 1/L borrow from cells with more. In order, cell after cell, a
    lender serves borrowers until its surplus is overdrawn; what it then lacks it borrows from the next
    lender. Cumulative sums say who meets whom.

    Args:
        probability_L: float64 [L], sums to 1.

    Returns:
        keep float32 [L] in [0, 1], alias int32 [L].
    """
    scaled = probability_L * len(probability_L)
    borrowers, lenders = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    keep, alias = np.minimum(scaled, 1), np.arange(len(scaled))
    if len(borrowers) and len(lenders):
        owed = np.cumsum(1 - scaled[borrowers])
        lent = np.cumsum(scaled[lenders] - 1)
        server = np.searchsorted(lent, np.concatenate([[0.0], owed[:-1]]), side="left")
        alias[borrowers] = lenders[np.minimum(server, len(lenders) - 1)]
        overdrawn_by = np.searchsorted(owed, lent[:-1], side="right")
        closes = overdrawn_by < len(owed)
        gap = owed[np.minimum(overdrawn_by, len(owed) - 1)] - lent[:-1]
        keep[lenders[:-1][closes]] = 1 - gap[closes]
        alias[lenders[:-1][closes]] = lenders[1:][closes]
    return np.clip(keep, 0, 1).astype(np.float32), alias.astype(np.int32)
