"""Measure exposure, offline and live: coverage and Gini of shown labels, and drift of shares (PSI).

Legend: `L` labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Int8, Int64

Counts = npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]

PSI_FLOOR = 1e-4
"""Share assumed for an empty cell, so that the logarithm is finite."""
PSI_MINIMUM = 200
"""Fewest observations for a PSI. Without drift PSI is about (cells − 1) / observations, and labels of one query are
correlated, so fewer observations would raise false alarms."""


def coverage(exposures_L: Counts) -> float:
    """Compute the share of labels shown at least once [METHODS §7]; 0 without labels."""
    return float((exposures_L > 0).mean()) if exposures_L.size else 0.0


def coverage_by_bucket(exposures_L: Counts, buckets_L: Int8, sizes: Int64) -> list[float]:
    """Compute `coverage` of each bucket, given its number of labels, int64 [4]; 0 for an empty bucket."""
    covered = np.bincount(buckets_L[exposures_L > 0], minlength=len(sizes))
    coverages: list[float] = (covered / np.maximum(sizes, 1)).tolist()
    return coverages


def gini(exposures_L: npt.NDArray[np.integer[Any]]) -> float | None:
    """Compute the Gini coefficient: 0 when all L are equal, (L − 1) / L when one has all [METHODS §7].

    With x ascending, 2·Σ i·x_i / (L·Σ x_i) − (L + 1) / L. Labels without exposure come first and add nothing, so only
    the others are sorted. None if nothing was shown.
    """
    ascending = np.sort(exposures_L[exposures_L > 0]).astype(np.float64)
    if not len(ascending):
        return None
    labels = float(len(exposures_L))
    ranks = np.arange(labels - len(ascending) + 1, labels + 1)
    return float(2 * (ranks @ ascending) / (labels * ascending.sum()) - (labels + 1) / labels)


def psi(counts: Counts, shares: Sequence[float]) -> float | None:
    """Compute the population stability index of observed against expected shares [Siddiqi 2006, §8].

    PSI = Σ (p − q)·ln(p / q), the symmetric Kullback-Leibler divergence in nats; None below PSI_MINIMUM observations.
    By convention values below 0.1 are stable, and values above 0.25 mean a shift.
    """
    total = float(counts.sum())
    if total < PSI_MINIMUM:
        return None
    p = np.maximum(counts / total, PSI_FLOOR)
    q = np.maximum(np.asarray(shares, np.float64), PSI_FLOOR)
    return float(np.sum((p - q) * np.log(p / q)))
