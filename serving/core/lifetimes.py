"""Find the labels available at a time, to the second.

Legend: `L` labels, `M` rows of the overlay, `N` boundaries: every time at which a lifetime begins or ends, ascending.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from typing import NamedTuple, Self

import numpy as np

from longtail.bundle.arrays import Bools, Int64
from longtail.bundle.sets import distinct
from longtail.index.search.eligible import Eligible

_YEAR_10_000 = 253_402_300_800


def now() -> float:
    """Get the time for lifetimes, in seconds since 1970; tests replace this function."""
    return time.time()


def available(lifetimes_M2: Int64, at: float) -> Bools:
    """Compute which labels are available at a time, bool [M]."""
    mask_M: Bools = (lifetimes_M2[:, 0] <= at) & (at < lifetimes_M2[:, 1])
    return mask_M


class Span(NamedTuple):
    """A catalogue's available labels in begin <= t < end."""

    begin: float
    end: float
    labels: Eligible


class Lifetimes:
    """The lifetimes of a catalogue's labels; only labels with a boundary between two times are read again. Thread-safe.

    Args:
        lifetimes_L2: `Labels.lifetimes`.
    """

    def __init__(self, lifetimes_L2: Int64) -> None:
        self._lifetimes_L2 = lifetimes_L2
        limits = np.iinfo(np.int64)
        rows, columns = np.nonzero((lifetimes_L2 > limits.min) & (lifetimes_L2 < limits.max))
        times = lifetimes_L2[rows, columns]
        order = np.argsort(times, kind="stable")
        self._times_N, self._rows_N = times[order], rows[order]
        self._last: Span | None = None

    def find_span(self, at: float) -> Span:
        """Find the labels available at a time, and how long they stay so."""
        last, limits, second = self._last, np.iinfo(np.int64), math.floor(at)  # a float would convert all N
        if last is not None and last.begin <= at < last.end:
            return last
        i = int(np.searchsorted(self._times_N, second, side="right"))
        begin = float(self._times_N[i - 1]) if i else float(limits.min)
        end = float(self._times_N[i]) if i < len(self._times_N) else float(limits.max)
        if last is None:
            labels = Eligible.from_mask(available(self._lifetimes_L2, at))
        else:
            last_i = int(np.searchsorted(self._times_N, int(last.begin), side="right"))
            changed_R = distinct(self._rows_N[min(last_i, i) : max(last_i, i)])
            labels = last.labels.changed(changed_R, available(self._lifetimes_L2[changed_R], at))
        # Without a lock: threads at the same time compute equal spans, and the last one stays.
        span = self._last = Span(begin, end, labels)
        return span


class Available(NamedTuple):
    """A release's available rows in begin <= t < end: `labels` of the index, and bool [M] of the overlay."""

    begin: float
    end: float
    labels: Eligible
    of_overlay_M: Bools

    @classmethod
    def narrow(cls, at: float, span: Span, lifetimes_M2: Int64, in_use_M: Bools) -> Self:
        """Narrow a span to the time until an overlay's label changes."""
        limits = np.iinfo(np.int64)
        begin = max(span.begin, float(lifetimes_M2[lifetimes_M2 <= at].max(initial=limits.min)))
        end = min(span.end, float(lifetimes_M2[lifetimes_M2 > at].min(initial=limits.max)))
        return cls(begin, end, span.labels, in_use_M & available(lifetimes_M2, at))

    def contains(self, rows_N: Int64, base: int) -> Bools:
        """Compute whether each row is available, bool [N]; rows from `base` on are the overlay's."""
        above_N = rows_N >= base
        available_N = self.labels.contains(np.where(above_N, 0, rows_N))
        available_N[above_N] = self.of_overlay_M[rows_N[above_N] - base]
        return available_N

    def count(self, masked: Int64) -> int:
        """Count the rows, without masked rows of the index."""
        hidden = np.count_nonzero(self.labels.contains(masked))
        return self.labels.count - int(hidden) + int(np.count_nonzero(self.of_overlay_M))

    @property
    def next_change(self) -> datetime | None:
        """Get when a label comes or ends next."""
        return datetime.fromtimestamp(self.end, UTC) if self.end < _YEAR_10_000 else None
