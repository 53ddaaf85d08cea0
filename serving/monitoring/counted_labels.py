"""The labels whose exposures are counted one by one: all of a catalogue, or of a large one a part that tells as much.

Legend: `L` labels of the release, `S` labels counted, `N` answered labels.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array, Float64, Int8, Int64
from longtail.bundle.exposure import coverage, coverage_by_bucket, gini

_MOST = 1 << 20
"""Labels counted one by one, at most: 76 bytes each on the disk, for each worker and release."""
_BUCKETS = len(BUCKET_NAMES)


class CountedLabels:
    """Beyond a million labels, some of each bucket stand for all of it, evenly spaced over its rows: all of a small
    bucket, and as many of one large bucket as of another. Every worker chooses the same.

    A coverage p of a bucket of which n labels are counted is then an estimate with the standard error √(p(1 − p)/n), at
    most .0009 of 300,000 [Cochran 1977, §3.2]. So is the Gini coefficient, whose error is small where the labels that
    have most of the exposures are in a bucket that is counted whole, as the head is.

    Args:
        buckets_L: bucket of every label, int8 [L].

    Attributes:
        sizes: labels of each bucket, int64.
        counted: those of them that are counted, int64.
        rows_S: the rows counted, int64, ascending; None: all.
    """

    def __init__(self, buckets_L: Int8) -> None:
        self.sizes: Int64 = np.bincount(buckets_L, minlength=_BUCKETS)
        self.counted = self.sizes
        self.rows_S: Int64 | None = None
        self._buckets_S: Int8 = buckets_L
        self._each_S: Float64 | None = None
        if len(buckets_L) > _MOST:
            self.rows_S = _evenly(buckets_L, _quotas(self.sizes, _MOST))
            self._buckets_S = buckets_L[self.rows_S]
            self.counted = np.bincount(self._buckets_S, minlength=_BUCKETS)
            self._each_S = (self.sizes / np.maximum(self.counted, 1))[self._buckets_S]

    def __len__(self) -> int:
        return len(self._buckets_S)

    def places(self, rows_N: Int64) -> Int64:
        """Where among the S the counted ones of some rows are, int64 [at most N]; they may repeat."""
        if self.rows_S is None:
            return rows_N
        places_N = np.searchsorted(self.rows_S, rows_N)
        counted: Int64 = places_N[self.rows_S[np.minimum(places_N, len(self.rows_S) - 1)] == rows_N]
        return counted

    def coverage_by_bucket(self, exposures_S: Array) -> list[float]:
        """Share of each bucket's labels that were shown at least once, or an estimate of it."""
        return coverage_by_bucket(exposures_S, self._buckets_S, self.counted)

    def coverage(self, exposures_S: Array) -> float:
        """Share of all labels that were shown at least once, or an estimate of it."""
        return coverage(exposures_S, self._each_S)

    def gini(self, exposures_S: Array) -> float | None:
        """Gini coefficient of exposures, or an estimate of it; None when nothing was shown."""
        return gini(exposures_S, self._each_S)


def _quotas(sizes: Int64, most: int) -> list[int]:
    """How many labels of each bucket are counted: what small ones leave, the larger ones share."""
    quotas, room = [0] * len(sizes), most
    ascending = np.argsort(sizes, kind="stable").tolist()
    for place, bucket in enumerate(ascending):
        quotas[bucket] = min(int(sizes[bucket]), room // (len(ascending) - place))
        room -= quotas[bucket]
    return quotas


def _evenly(buckets_L: Int8, quotas: list[int]) -> Int64:
    parts = []
    for bucket, quota in enumerate(quotas):
        rows = np.flatnonzero(buckets_L == bucket)
        parts.append(rows[np.arange(quota) * len(rows) // max(quota, 1)])
    return np.sort(np.concatenate(parts))
