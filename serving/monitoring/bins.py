"""Bins of latency and of the dials λ and μ, whose counts add up over workers and minutes.

Legend: `B` queries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from longtail.bundle.arrays import Array, Float32
from longtail.bundle.exposure import Counts

LATENCY_BINS = 42
"""Eight per decade from 0.1 ms to 10 s, one below and one above: a quantile is off by a sixth at most."""
_PER_DECADE = 8
_SHIFT = 1 + 4 * _PER_DECADE

LOWEST, WIDTH = -1.0, 0.05
DIAL_BINS = 61
"""Around −1, −0.95, …, 2; what lies beyond counts in the bin at that end."""


def latency_bin(seconds: float) -> int:
    """Return the bin of a duration, 0 … LATENCY_BINS − 1."""
    return 0 if seconds < 1e-4 else min(int(math.log10(seconds) * _PER_DECADE + _SHIFT), LATENCY_BINS - 1)


def latency_ms(bins: Counts, quantile: float) -> float | None:
    """Return a quantile in ms, logarithmic inside its bin; None of no observation, at most 10 s.

    Args:
        bins: observations per `latency_bin`.
        quantile: between 0 and 1.
    """
    upto = np.cumsum(bins)
    if not upto[-1]:
        return None
    wanted = quantile * float(upto[-1])
    cell = min(int(np.searchsorted(upto, wanted)), LATENCY_BINS - 1)
    inside = (wanted - float(upto[cell] - bins[cell])) / float(bins[cell]) if bins[cell] else 1.0
    if cell == 0:
        return 0.1 * inside
    if cell == LATENCY_BINS - 1:
        return 10_000.0
    return float(10.0 ** ((cell - _SHIFT + inside) / _PER_DECADE) * 1000)


def count_dials(counts: Array, weights_B: Float32) -> None:
    """Add the queries of every bin of one dial to `counts`, [DIAL_BINS]; weights are finite."""
    if len(weights_B) == 1:  # a tenth of the time that arrays take
        place = (float(weights_B[0]) - LOWEST) / WIDTH
        counts[int(min(max(place, 0), DIAL_BINS - 1) + 0.5)] += 1
        return
    places = np.minimum(np.maximum((weights_B - LOWEST) / WIDTH, 0), DIAL_BINS - 1)
    counts += np.bincount((places + 0.5).astype(np.intp), minlength=DIAL_BINS)


def dial_json(counts: Array) -> list[dict[str, Any]]:
    """Return the bins that have queries, ascending by the dial's value."""
    return [
        {"at": round(LOWEST + WIDTH * int(place), 2), "queries": int(counts[place])} for place in np.flatnonzero(counts)
    ]
