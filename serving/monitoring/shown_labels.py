"""When each label of a release was last answered, and how often of late: coverage and Gini.

Legend: `L` labels of the release, `N` answered labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Int8, Int32, Int64
from longtail.bundle.exposure import coverage, coverage_by_bucket, gini
from longtail.serving.monitoring.ring import map_file

SUFFIX = ".shown"
_DAY_MINUTES = 1440


class ShownLabels:
    """One mapped file of 12·L bytes that all workers of a host write. Not thread-safe: its owner holds a lock.

    It is int32 [3, 1 + L]: the minute since 1970 in which a label was last answered, and its answers on even and on
    odd days (UTC); the first column of these is the day. Workers take no turns, as of two that add to one
    label in the same nanoseconds one may be lost, which no coefficient shows.

    Args:
        directory: existing directory.
        release: names the file.
        buckets_L: bucket of every label, int8 [L].
    """

    def __init__(self, directory: Path, release: str, buckets_L: Int8) -> None:
        labels = len(buckets_L)
        memory = map_file(directory / f"{release}{SUFFIX}", 12 * (1 + labels))
        table: Int32 = np.frombuffer(memory, np.int32).reshape(3, 1 + labels)
        self._last_L, self._days = table[0, 1:], table[1:]
        self.buckets_L = buckets_L
        self.sizes: Int64 = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))

    def count(self, rows_N: Int64, now: float) -> None:
        """Count answered labels, by their rows; those beyond L, added since, are left out."""
        if len(rows_N) and rows_N.max() >= len(self.buckets_L):
            rows_N = rows_N[rows_N < len(self.buckets_L)]
        minute = int(now // 60)
        self._last_L[rows_N] = minute
        day = minute // _DAY_MINUTES
        shown = self._days[day % 2]
        if shown[0] != day:
            shown[:] = 0
            shown[0] = day
        np.add.at(shown, rows_N + 1, np.int32(1))  # of its own type: numpy adds any other a dozen times slower

    def coverage_since(self, since: int) -> tuple[list[float], float]:
        """Return the share of each bucket's labels answered since a minute, and of all labels."""
        shown_L = (self._last_L >= since).astype(np.int8)
        return coverage_by_bucket(shown_L, self.buckets_L, self.sizes), coverage(shown_L)

    def gini(self, now: float) -> float | None:
        """Return the Gini coefficient of the answers of today and yesterday (UTC); None of no answers."""
        today = int(now // 60) // _DAY_MINUTES
        shown = self._days[(self._days[:, 0] >= today - 1) & (self._days[:, 0] <= today), 1:]
        return gini(shown.sum(axis=0, dtype=np.int64))
