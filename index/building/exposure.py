"""Measure shares of the buckets in exact answers along λ, and λ's effective range.

Legend: `L` labels, `C` example queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from longtail.bundle import BUCKET_NAMES, Bundle
from longtail.bundle.arrays import Float32, Float64
from longtail.bundle.exposure import coverage
from longtail.index.recall import spread_rows

_K = 20
_QUERIES, _SCORES = 200, 2 * 10**7
"""Most queries, and most scores of all queries at one λ."""
_ENDS = 0.05, 0.95
"""Shares of the head in the answers at the ends of the useful range of λ."""
_DOUBLINGS, _HALVINGS = 10, 12
_POINTS = 5
_NARROW = 0.5


class AnswerShares(NamedTuple):
    """Hold shares of answers by bucket, float64 [4], and coverage, at one λ."""

    bias_removal: float
    shares: Float64
    coverage: float


class DialExposure:
    """Exact answers of a bundle's example queries along λ, without co-occurrence.

    Attributes:
        queries: number of example queries.
        k: length of an answer.
    """

    def __init__(self, bundle: Bundle) -> None:
        labels, queries_CD = bundle.manifest.labels, bundle.calibration_queries
        self.queries = max(min(len(queries_CD), _QUERIES, _SCORES // labels), 1)
        self.k = min(_K, labels)
        queries_CE = bundle.augmentation.queries(queries_CD[spread_rows(len(queries_CD), self.queries)], 0.0)
        self._taste_CL: Float32 = queries_CE @ bundle.rows().T / np.float32(bundle.manifest.temperature)
        self._log_noise_L: Float32 = bundle.labels.log_pn
        self._buckets_L = bundle.labels.buckets
        self._measured: dict[float, AnswerShares] = {}

    def measure(self, bias_removal: float) -> AnswerShares:
        """Measure the answers at one λ."""
        if bias_removal not in self._measured:
            shown_L = np.zeros(len(self._log_noise_L), np.int64)
            dial_L = np.float32(bias_removal) * self._log_noise_L
            for taste_L in self._taste_CL:
                shown_L[np.argpartition(taste_L + dial_L, -self.k)[-self.k :]] += 1
            shares = np.bincount(self._buckets_L, shown_L, minlength=len(BUCKET_NAMES)) / shown_L.sum()
            self._measured[bias_removal] = AnswerShares(bias_removal, shares, coverage(shown_L))
        return self._measured[bias_removal]

    def useful_range(self) -> tuple[float, float] | None:
        """Find the λ between which the head's share goes from 5 to 95 %; None if there are none."""
        noise = float(np.std(self._log_noise_L))
        step = float(np.std(self._taste_CL[0])) / noise if noise else 0.0
        if not 0 < step < np.inf:
            return None
        low, high = (self._crossing(share, step) for share in _ENDS)
        return None if low is None or high is None or low >= high else (low, high)

    def _crossing(self, share: float, step: float) -> float | None:
        """Find the λ at which the head's share passes another one, by bisection; the share grows with λ."""
        low, high = -step, step
        for _ in range(_DOUBLINGS):
            if self.measure(low).shares[0] < share <= self.measure(high).shares[0]:
                break
            low, high = 2 * low, 2 * high
        else:
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.measure(middle).shares[0] >= share else (middle, high)
        return (low + high) / 2


def describe_exposure(bundle: Bundle, temperature: float) -> Iterator[str]:
    """Describe exposure by bucket over the useful range of λ.

    Args:
        temperature: what training divided scores by; a range that requests can hardly use gets a better one.
    """
    exposure = DialExposure(bundle)
    ends = exposure.useful_range()
    if ends is None:
        yield "λ: no λ was found between which the head's share of the answers goes from 5 % to 95 %"
    points = sorted({0.0, *(_rounded(value) for value in np.linspace(*(ends or (-1.0, 2.0)), _POINTS))})
    yield f"λ: exact answers of {exposure.queries:,} example queries, {exposure.k} places each"
    for point in map(exposure.measure, points):
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in zip(BUCKET_NAMES, point.shares, strict=True) if share
        )
        yield f"λ: {point.bias_removal:6g}: {shares}; {point.coverage:.0%} of the labels are in an answer"
    if ends is None:
        return
    low, high = map(_rounded, ends)
    yield f"λ: useful from {low:g} to {high:g}, where the head's share goes from 5 % to 95 %"
    reach, limits = max(abs(low), abs(high)), bundle.manifest.bias_removal
    if reach < _NARROW or low < limits.minimum or high > limits.maximum:
        yield (
            f"λ: requests take λ from {limits.minimum:g} to {limits.maximum:g}; --temperature "
            f"{_rounded(temperature * reach):g} gives the same answers with λ from {_rounded(low / reach):g} to "
            f"{_rounded(high / reach):g}"
        )


def _rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")
