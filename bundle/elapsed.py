"""How long before a request the entries of a history were, in ticks: whole seconds, or whole numbers where nothing says
what unit times are in.

Times are rounded down to ticks before they are subtracted, so that how far two entries lie apart does not depend on
when it is asked.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from longtail.bundle.arrays import Float64, Int32, Int64

TimeUnit = Literal["date", "seconds", "milliseconds", "microseconds", "nanoseconds", "number"]
PER_TICK: dict[TimeUnit, float] = {
    "date": 1e6, "seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9, "number": 1.0,
}  # fmt: skip
"""How many of a unit a tick has; dates are microseconds since 1970."""
LONGEST_AGE = int(np.iinfo(np.int32).max)
"""68 years; what is older is as old."""
NO_TIME = -1
"""Stands for the age of an entry that was given without a time."""


def ticks_of(times_N: Float64, unit: TimeUnit) -> Int64:
    """Times as ticks, int64 [N]."""
    ticks: Int64 = np.floor(times_N / PER_TICK[unit]).astype(np.int64)
    return ticks


def ages_of(now: Int64, ticks: Int64) -> Int32:
    """Ticks from some times to now, int32 of their common shape; none of what comes after it."""
    ages: Int32 = np.clip(now - ticks, 0, LONGEST_AGE).astype(np.int32)
    return ages
