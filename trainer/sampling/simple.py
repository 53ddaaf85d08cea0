"""Where negatives come from: `q(y'|x, y)` of METHODS §2.1, drawn on the device.

A sampler is a row of `SAMPLERS`: a function that says whether the batch's own labels serve as
negatives, how further ones are drawn, and the log-probability it draws any label with.

Legend: `B` batch size, `M` drawn negatives, `L` labels.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from longtail.bundle.arrays import Float32, Float64, Int32
from longtail.trainer.sampling.base import Catalogue, Context, Sampler, Tensor
from longtail.trainer.sampling.conditional import adversarial, model


def in_batch(catalogue: Catalogue) -> Sampler:
    """The batch's other labels: q = π in expectation."""
    return Sampler(catalogue.log_pi_L.astype(np.float32), in_batch=True, draw=None, q_of_pi=lambda log_pi: log_pi)


def uniform(catalogue: Catalogue, *, negatives: int, shared: bool = True, exclude_positive: bool = False) -> Sampler:
    """q = 1/L: `negatives` draws with replacement, for the whole batch or for each row.

    With `exclude_positive` (per row) a row's positive is never drawn: q = 1/(L − 1) on the others.
    """
    labels = len(catalogue.log_pi_L)
    shape = (negatives,) if shared and not exclude_positive else (catalogue.batch_size, negatives)

    def draw(seed: keras.random.SeedGenerator, context: Context) -> Tensor:
        if not exclude_positive:
            return keras.random.randint(shape, 0, labels, dtype="int32", seed=seed)
        others = keras.random.randint(shape, 0, labels - 1, dtype="int32", seed=seed)
        return others + ops.cast(others >= context.positive_B[:, None], "int32")

    return Sampler(np.full(labels, -np.log(labels), np.float32), in_batch=False, draw=draw)


_REDRAWS = 4
"""Times that `popularity` draws again what hit the positive; what still hits is masked as any accidental hit."""


def popularity(
    catalogue: Catalogue,
    *,
    negatives: int,
    alpha: float = 1.0,
    shared: bool = True,
    exclude_positive: bool = False,
) -> Sampler:
    """q ∝ π^α (1: training frequency; ¾: word2vec; 0: uniform), by Walker's alias method.

    With `exclude_positive` (per row) draws that hit the row's positive are drawn again.
    """
    log_q_L = alpha * catalogue.log_pi_L
    log_q_L = log_q_L - np.logaddexp.reduce(log_q_L)
    keep_L, alias_L = alias_table(np.exp(log_q_L))
    shape = (negatives,) if shared and not exclude_positive else (catalogue.batch_size, negatives)

    def once(seed: keras.random.SeedGenerator) -> Tensor:
        cell = keras.random.randint(shape, 0, len(keep_L), dtype="int32", seed=seed)
        stays = keras.random.uniform(shape, seed=seed) < ops.take(keep_L, cell, axis=0)
        return ops.where(stays, cell, ops.take(alias_L, cell, axis=0))

    def draw(seed: keras.random.SeedGenerator, context: Context) -> Tensor:
        drawn = once(seed)
        for _ in range(_REDRAWS if exclude_positive else 0):
            drawn = ops.where(ops.equal(drawn, context.positive_B[:, None]), once(seed), drawn)
        return drawn

    return Sampler(log_q_L.astype(np.float32), in_batch=False, draw=draw)


def mixed(catalogue: Catalogue, *, negatives: int) -> Sampler:
    """The batch's labels and M uniform draws; q = (B·π + M/L)/(B + M), the mixture's own (Yang et al. 2020)."""
    batch, labels = catalogue.batch_size, len(catalogue.log_pi_L)
    log_uniform = float(np.log(negatives) - np.log(labels))

    def q_of_pi(log_pi: Tensor) -> Tensor:
        return ops.logaddexp(np.log(batch) + log_pi, ops.full_like(log_pi, log_uniform)) - np.log(batch + negatives)

    log_q_L = np.logaddexp(np.log(batch) + catalogue.log_pi_L, log_uniform) - np.log(batch + negatives)
    draw = uniform(catalogue, negatives=negatives).draw
    return Sampler(log_q_L.astype(np.float32), in_batch=True, draw=draw, q_of_pi=q_of_pi)


def full(catalogue: Catalogue) -> Sampler:
    """Every label once: no sampling, the reference. q = 1/L, and the positive is masked."""
    labels = len(catalogue.log_pi_L)
    return Sampler(
        np.full(labels, -np.log(labels), np.float32),
        in_batch=False,
        draw=lambda _seed, _context: ops.arange(labels, dtype="int32"),
    )


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "in_batch": in_batch,
    "uniform": uniform,
    "popularity": popularity,
    "mixed": mixed,
    "full": full,
    "adversarial": adversarial,
    "model": model,
}


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
