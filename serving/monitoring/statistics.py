"""The formulas, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]

PSI_FLOOR = 1e-4
"""Share of an empty cell, on either side, so that the logarithm is finite."""
PSI_MINIMUM = 200
"""Observations below which no PSI is given: without drift it is about (cells − 1) / observations, and labels of one
query are alike, so that far fewer would raise alarms by chance."""
_Z = 1.959963984540054
"""Standard normal quantile of 97.5 %."""


def psi(counts: Counts, shares: Sequence[float]) -> float | None:
    """Population stability index Σ (p − q)·ln(p / q) of observed p against expected q [Siddiqi 2006, §8].

    The symmetric Kullback-Leibler divergence, in nats. By convention below 0.1 is stable, above 0.25 has shifted.

    Args:
        counts: observations per cell.
        shares: q, expected share per cell.

    Returns:
        None below PSI_MINIMUM observations.
    """
    total = float(counts.sum())
    if total < PSI_MINIMUM:
        return None
    p = np.maximum(counts / total, PSI_FLOOR)
    q = np.maximum(np.asarray(shares, np.float64), PSI_FLOOR)
    return float(np.sum((p - q) * np.log(p / q)))


def gini(exposures_L: npt.NDArray[np.integer[Any]]) -> float | None:
    """Gini coefficient of exposures: 0 when all L are equal, (L − 1) / L when one has all [METHODS §7].

    With x ascending, 2·Σ i·x_i / (L·Σ x_i) − (L + 1) / L. Labels without exposure come first and add nothing, so
    only the others are sorted.

    Args:
        exposures_L: times each label was answered, ≥ 0.

    Returns:
        None when nothing was answered.
    """
    shown = np.sort(exposures_L[exposures_L > 0])
    if not len(shown):
        return None
    labels = len(exposures_L)
    ascending = shown.astype(np.float64)
    ranks = np.arange(labels - len(shown) + 1, labels + 1, dtype=np.float64)
    return float(2 * (ranks @ ascending) / (labels * ascending.sum()) - (labels + 1) / labels)


def wilson(hits: int, positives: int) -> tuple[float, float] | None:
    """95 % score interval of a proportion [Wilson 1927]; None of no positives.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n): inside [0, 1], and of use from the first few positives on.
    """
    if positives == 0:
        return None
    share = hits / positives
    square = _Z * _Z / positives
    middle = share + square / 2
    reach = _Z * math.sqrt(share * (1 - share) / positives + square / (4 * positives))
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


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
