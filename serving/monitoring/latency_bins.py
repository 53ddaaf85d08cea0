"""Latencies in bins of equal ratio, so that those of all workers and minutes add up, and quantiles of the sum."""

from __future__ import annotations

import math

import numpy as np

from longtail.bundle.exposure import Counts

LATENCY_BINS = 42
"""Eight per decade from 0.1 ms to 10 s, one below and one above: a quantile is off by a sixth at most."""
_PER_DECADE = 8
_FIRST_EXPONENT = -4
_SHIFT = 1 - _FIRST_EXPONENT * _PER_DECADE


def latency_bin(seconds: float) -> int:
    """The bin of a duration, 0 … LATENCY_BINS − 1."""
    if seconds < 1e-4:
        return 0
    return min(int(math.log10(seconds) * _PER_DECADE + _SHIFT), LATENCY_BINS - 1)


def latency_ms(bins: Counts, quantile: float) -> float | None:
    """A quantile in ms, logarithmic inside its bin; None of no observation, 10 s of what took longer.

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
