"""Samplers whose draws do not depend on the query: `q(y')` of METHODS §2.1, drawn on the device.

A sampler is a function from a `SamplerSetup`, and the parameters that a recipe may set, to a `Sampler`.

Legend: `B` batch size, `M` drawn negatives, `L` labels.

The examples of this file have a catalogue of four labels with frequencies ½, ¼, ⅛ and ⅛, and batches of 8:

    >>> setup = SamplerSetup(np.log([0.5, 0.25, 0.125, 0.125]), batch_size=8, dim=3)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer.arrays import untrained_variable
from longtail.trainer.backend import Tensor, keras, ops
from longtail.trainer.sampling.base import Count, DrawContext, LabelTable, Sampler, SamplerSetup

if TYPE_CHECKING:
    from keras.random import SeedGenerator

_REDRAWS = 4
"""Number of times that `popularity` redraws hits of the positive. Remaining hits are masked as accidental hits."""


def in_batch(setup: SamplerSetup) -> Sampler:
    """Use the other labels of the batch as negatives; q = π in expectation [R21, Table 1; Yi19].

    A row has B − 1 draws, without any cost of drawing or embedding. q is the label's share of the training pairs,
    without smoothing, as in batches. Batches are cut from N pairs without replacement, so q has an error of order 1/N.
    A label without a pair, which no batch holds, has its smoothed frequency.

    Relations: `popularity` with α = 1 draws from the same q.

    Example:
        >>> np.exp(in_batch(setup).log_q_L)
        array([0.5  , 0.25 , 0.125, 0.125], dtype=float32)
    """
    log_share_L = _log_share(setup)
    log_q_L = np.where(np.isneginf(log_share_L), setup.log_pi_L, log_share_L).astype(np.float32)
    return Sampler(log_q_L, in_batch=True, draw=None, q_of_pi=lambda log_pi: log_pi)


def uniform(
    setup: SamplerSetup, *, negatives: Count, shared: bool = True, exclude_positive: bool = False, replace: bool = True
) -> Sampler:
    """Draw negatives uniformly: q = 1/L [R21, Table 1; without replacement Re19 Algorithm 1].

    Args:
        negatives: M, for the whole batch or for each row.
        shared: draws one set for the whole batch.
        exclude_positive: draws per row and never draws the row's positive: q = 1/(L − 1) on the other labels.
        replace: False draws M distinct labels, every set of M equally likely.

    Weights are exact with and without replacement: a label occurs M/L times in expectation. Without replacement the
    variance of [R21 eq. 10] is (L − M)/(L − 1) times as large, and 0 for M = L.

    Relations: equals `popularity` with α = 0. Without replacement and with M = L, it equals `full`.

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
            # Numbers below L − 1, shifted past the positive, are uniform over the other labels.
            drawn = drawn + ops.cast(drawn >= context.positive_B[:, None], "int32")
        return drawn

    log_miss = (lambda log_q: ops.log1p(-ops.exp(log_q))) if exclude_positive else None
    return Sampler(np.full(labels, -np.log(labels), np.float32), in_batch=False, draw=draw, log_miss=log_miss)


def popularity(
    setup: SamplerSetup,
    *,
    negatives: Count,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
    shared: bool = True,
    exclude_positive: bool = False,
) -> Sampler:
    """Draw negatives by popularity: q ∝ π^α, with replacement, by Walker's alias method.

    Args:
        negatives: M, for the whole batch or for each row.
        alpha: α; 1 is the training frequency, ¾ that of word2vec (Mikolov et al. 2013), 0 uniform.
        shared: draws one set for the whole batch.
        exclude_positive: draws per row, and redraws hits of the row's positive up to four times.

    Relations: equals `uniform` with α = 0, and has the q of `in_batch` with α = 1.

    Example:
        >>> np.exp(popularity(setup, negatives=3, alpha=2.0).log_q_L).round(3)
        array([0.727, 0.182, 0.045, 0.045], dtype=float32)
    """
    log_q_L = alpha * setup.log_pi_L
    log_q_L = log_q_L - np.logaddexp.reduce(log_q_L)
    keep_L, alias_L = alias_table(np.exp(log_q_L))
    shape = (negatives,) if shared and not exclude_positive else (setup.batch_size, negatives)

    def draw_once(seed: SeedGenerator) -> Tensor:
        cell = keras.random.randint(shape, 0, len(keep_L), dtype="int32", seed=seed)
        stays = keras.random.uniform(shape, seed=seed) < ops.take(keep_L, cell, axis=0)
        return ops.where(stays, cell, ops.take(alias_L, cell, axis=0))

    def draw(seed: SeedGenerator, context: DrawContext) -> Tensor:
        drawn = draw_once(seed)
        for _ in range(_REDRAWS if exclude_positive else 0):
            drawn = ops.where(ops.equal(drawn, context.positive_B[:, None]), draw_once(seed), drawn)
        return drawn

    def log_miss(log_q: Tensor) -> Tensor:
        # A draw is another label with probability 1 − q^5, as it hits only if all five draws do. Such a draw has
        # q_y'·(1 − q^5)/(1 − q), so (1 − q)/(1 − q^5) replaces 1 − q.
        still_hits = ops.exp((1 + _REDRAWS) * log_q)
        return ops.log1p(-ops.minimum(ops.exp(log_q), 1 - 1e-6)) - ops.log1p(-ops.minimum(still_hits, 1 - 1e-6))

    return Sampler(
        log_q_L.astype(np.float32), in_batch=False, draw=draw, log_miss=log_miss if exclude_positive else None
    )


def mixed(setup: SamplerSetup, *, negatives: Count) -> Sampler:
    """Use the batch's labels and M uniform draws as negatives (Yang et al. 2020, mixed negative sampling).

    The mixture has q = ((B − 1)·π + M/L)/(B − 1 + M), as a row's own position in the batch is no draw. Labels without a
    pair are negatives too, unless they have other features than their id [METHODS §9].

    Args:
        negatives: M, shared by the batch.

    Relations: combines `in_batch` and `uniform`.

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


def cross_batch(setup: SamplerSetup, *, negatives: Count, gradients: bool = False) -> Sampler:
    """Use the batch's labels and the last M positives of earlier batches as negatives; q = π in expectation.

    Every batch holds labels in proportion to π, so labels of the memory have the q of `in_batch`, and B − 1 + M draws
    per row cost the embedding of only B labels. The memory keeps embeddings from up to M/B steps ago, without gradient.
    To make up for this, the gradient of the batch's labels as negatives is multiplied by (B − 1 + M)/(B − 1). The
    embeddings are renewed at the beginning of every epoch. Before the first step the memory holds M draws from π.

    Args:
        negatives: M, the size of the memory.
        gradients: the memory holds only labels, which every step embeds again, with gradient.

    Relations: acts like `in_batch` with larger batches but the same number of positives.

    Example:
        >>> sampler = cross_batch(setup, negatives=100)
        >>> sampler.draw(None, None).shape[0]
        100
    """
    batch = in_batch(setup)
    share_L = np.exp(_log_share(setup))
    # `choice` refuses probabilities whose sum rounding has moved off 1.
    first_M = np.random.default_rng(0).choice(len(share_L), negatives, p=share_L / share_L.sum())
    labels_M = untrained_variable(first_M.astype(np.int32), "memory_labels")

    # Copies, because `remember` assigns to the variables later in the same step.
    def draw(_seed: SeedGenerator, _context: DrawContext) -> Tensor:
        return ops.copy(labels_M)

    if gradients:

        def remember_labels(positive_B: Tensor, _labels_BD: Tensor, _bias_B: Tensor) -> None:
            _push(labels_M, positive_B)

        return replace(batch, draw=draw, remember=remember_labels, variables=(labels_M,))

    rows_MD = untrained_variable(np.zeros((negatives, setup.dim), np.float32), "memory_embeddings")
    bias_M = untrained_variable(np.zeros(negatives, np.float32), "memory_biases")

    def remember(positive_B: Tensor, labels_BD: Tensor, bias_B: Tensor) -> None:
        _push(labels_M, positive_B)
        _push(rows_MD, labels_BD)
        _push(bias_M, bias_B)

    def recall() -> tuple[Tensor, Tensor]:
        return ops.copy(rows_MD), ops.copy(bias_M)

    def refresh(table: LabelTable) -> None:
        labels = ops.convert_to_numpy(labels_M)
        rows_MD.assign(table.embeddings_LD[labels])
        bias_M.assign(np.zeros(negatives, np.float32) if table.bias_L is None else table.bias_L[labels])

    variables = (labels_M, rows_MD, bias_M)
    return replace(batch, draw=draw, recall=recall, remember=remember, refresh=refresh, variables=variables)


def _push(memory: keras.Variable, newest: Tensor) -> None:
    """Append the newest entries, and drop the same number of the oldest."""
    memory.assign(ops.concatenate([ops.copy(memory), newest])[-memory.shape[0] :])


def full(setup: SamplerSetup) -> Sampler:
    """Use every label once, without sampling: q = 1/L, and the positive is masked.

    A step costs O(B·L·D), which suits catalogues of up to tens of thousands of labels.

    Relations: with weight `importance` and family `softmax`, gives the full softmax cross-entropy.

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
    """Draw distinct numbers below `labels` along the last axis, int32 of `shape`; all ordered choices equally likely.

    This computes the first M swaps of a Fisher-Yates shuffle at once. Swap i exchanges positions i and j_i ≥ i and
    returns the number that was at j_i: the one that the last earlier swap with j_i left there, or j_i itself. Pointer
    doubling follows these references. The cost is a sort of M numbers per row and log₂ M gathers, independent of the
    number of labels.

    Args:
        shape: [M] or [B, M].

    Example:
        >>> np.sort(distinct((4,), 4, keras.random.SeedGenerator(1)))
        array([0, 1, 2, 3], dtype=int32)
    """
    rows, draws = int(np.prod(shape[:-1])), shape[-1]
    step_BM = ops.broadcast_to(np.arange(draws, dtype=np.int32), (rows, draws))
    bits_BM = keras.random.randint((rows, draws), 0, np.iinfo(np.int32).max, dtype="int32", seed=seed)
    swap_BM = step_BM + bits_BM % (labels - step_BM)
    # The number at s before step s came from the last earlier swap with s, and so on back to an untouched position.
    row_BM = np.arange(rows, dtype=np.int32)[:, None] * draws
    swapped_BM = ops.where((swap_BM > step_BM) & (swap_BM < draws), swap_BM + row_BM, rows * draws)
    last_N = ops.segment_max(ops.reshape(step_BM, (-1,)), ops.reshape(swapped_BM, (-1,)), rows * draws + 1)
    origin_BM = ops.reshape(last_N[:-1], (rows, draws))
    origin_BM = ops.where(origin_BM < 0, step_BM, origin_BM)
    for _ in range(draws.bit_length()):  # pointer doubling: each pass doubles the length of resolved chains
        origin_BM = ops.take_along_axis(origin_BM, origin_BM, axis=1)
    # In order of position, then of step, the last earlier swap with the same position is the previous element.
    order_BM = ops.argsort(swap_BM, axis=1)
    sorted_BM = ops.take_along_axis(swap_BM, order_BM, axis=1)
    repeats_BM = ops.pad(ops.equal(sorted_BM[:, 1:], sorted_BM[:, :-1]), ((0, 0), (1, 0)))
    previous_BM = ops.pad(order_BM[:, :-1], ((0, 0), (1, 0)))
    drawn_BM = ops.where(repeats_BM, ops.take_along_axis(origin_BM, previous_BM, axis=1), sorted_BM)
    return ops.reshape(ops.take_along_axis(drawn_BM, ops.argsort(order_BM, axis=1), axis=1), shape)


def _log_share(setup: SamplerSetup) -> Float64:
    """Return log shares of labels in batches, float64 [L]; −inf for a label without a pair."""
    return setup.log_pi_L if setup.log_share_L is None else setup.log_share_L


def alias_table(probability_L: Float64) -> tuple[Float32, Int32]:
    """Build Walker's alias table without a loop: a draw is cell `i` with probability `keep[i]`, else `alias[i]`.

    Cells with a probability below 1/L borrow from cells with more. A lender serves borrowers, in order, until its
    surplus is overdrawn; it then borrows the deficit from the next lender. Cumulative sums match borrowers and lenders.

    Args:
        probability_L: float64 [L]; the sum is 1.

    Returns:
        keep float32 [L] in [0, 1], alias int32 [L].
    """
    scaled = probability_L * len(probability_L)
    borrowers, lenders = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    keep, alias = np.minimum(scaled, 1), np.arange(len(scaled))
    if len(borrowers) and len(lenders):
        # Borrowers take [owed[i − 1], owed[i]) of the total surplus; lender j ends at lent[j]. A borrower is served by
        # the lender in whose part it begins. A lender overdrawn at its end borrows the excess from the next lender.
        owed = np.cumsum(1 - scaled[borrowers])
        lent = np.cumsum(scaled[lenders] - 1)
        server = np.searchsorted(lent, np.concatenate([[0.0], owed[:-1]]), side="left")
        alias[borrowers] = lenders[np.minimum(server, len(lenders) - 1)]
        overdrawn_by = np.searchsorted(owed, lent[:-1], side="right")
        closes = overdrawn_by < len(owed)
        gap = owed[np.minimum(overdrawn_by, len(owed) - 1)] - lent[:-1]
        keep[lenders[:-1][closes]] = 1 - gap[closes]
        alias[lenders[:-1][closes]] = lenders[1:][closes]
    # Rounding of the sums can leave a cell slightly outside of [0, 1].
    return np.clip(keep, 0, 1).astype(np.float32), alias.astype(np.int32)
