"""Find which labels of a catalogue are available at a time, to the second.

Legend: `L` labels, `N` boundaries: every time at which a lifetime begins or ends, ascending.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Bools, Int64
from longtail.bundle.sets import distinct
from longtail.index.search.eligible import Eligible


def now() -> float:
    """Return the time that decides which labels are available, seconds since 1970; tests replace this function."""
    return time.time()


def available(lifetimes_M2: Int64, at: float) -> Bools:
    """Compute which labels are available at a time, bool [M], from `bundle.lifetimes`."""
    mask_M: Bools = (lifetimes_M2[:, 0] <= at) & (at < lifetimes_M2[:, 1])
    return mask_M


def around(lifetimes_M2: Int64, at: float) -> tuple[float, float]:
    """Find the last boundary until a time and the next one, from all lifetimes."""
    limits = np.iinfo(np.int64)
    begin = lifetimes_M2[lifetimes_M2 <= at].max(initial=limits.min)
    return float(begin), float(lifetimes_M2[lifetimes_M2 > at].min(initial=limits.max))


class Span(NamedTuple):
    """The available labels of a catalogue in begin <= t < end."""

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

    def at(self, at: float) -> Span:
        """Get the available labels at a time, seconds since 1970."""
        last, limits, second = self._last, np.iinfo(np.int64), math.floor(at)  # a float would convert all N
        if last is not None and last.begin <= at < last.end:
            return last
        place = int(np.searchsorted(self._times_N, second, side="right"))
        begin = float(self._times_N[place - 1]) if place else float(limits.min)
        end = float(self._times_N[place]) if place < len(self._times_N) else float(limits.max)
        if last is None:
            labels = Eligible.from_mask(available(self._lifetimes_L2, at))
        else:
            before = int(np.searchsorted(self._times_N, int(last.begin), side="right"))
            changed_R = distinct(self._rows_N[min(before, place) : max(before, place)])
            labels = last.labels.changed(changed_R, available(self._lifetimes_L2[changed_R], at))
        span = self._last = Span(begin, end, labels)
        return span
