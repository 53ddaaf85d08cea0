"""Compute shares of label groups by the hour of the week [METHODS §6].

Times are UTC. Legend: `G` groups, the last one for labels without a value; `H` the 168 hours of a week, from Thursday
00:00; `W` half-lives; `N` pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from longtail.bundle.arrays import Float64, Int64

HOURS = 168
_HOUR = 3_600.0
_OPEN = 0.01
"""Fraction of an average hour's pairs that is added to every hour, for hours without any."""
_SAMPLES = 672
"""Largest number of times at which a period is sampled: the quarters of an hour in a week."""

Window = Literal["day", "hour"]


@dataclass(frozen=True)
class Calendar:
    """Pairs of every group by hour of the week.

    Attributes:
        pairs: decayed sums, float64 [G, H].
        windows: effects that are estimated, one after the other: of the `day` of the week, over 24 hours around each
            hour, and of the `hour` of the day, over 3 hours of all days.
        shrinkage: number of pairs added to observed and expected pairs of every window.
    """

    pairs: Float64
    windows: Sequence[Window]
    shrinkage: float

    def past(self, until: float, half_lives_W: Float64) -> Float64:
        """Compute the calendar's factor in decayed sums, float64 [G, W]."""
        lag_H = np.arange(HOURS)
        into = until / _HOUR % 1
        # The present hour has lasted for a fraction of an hour; earlier weeks repeat this one.
        weights_WH = np.exp2(-np.maximum(lag_H + into - 0.5, 0) * _HOUR / half_lives_W[:, None])
        weights_WH[:, 0] *= into
        hours_H = (hour_of_week(until) - lag_H) % HOURS
        return np.asarray((self._expected[:, hours_H] @ weights_WH.T) / (self._even[:, hours_H] @ weights_WH.T))

    def ahead(self, begin: float, seconds: float) -> Float64:
        """Compute the factor of the calendar in a period, float64 [G]."""
        samples = int(np.clip(np.ceil(4 * seconds / _HOUR), 4, _SAMPLES))
        hours = hour_of_week(begin + (np.arange(samples) + 0.5) * seconds / samples)
        return np.asarray(self._expected[:, hours].sum(axis=1) / self._even[:, hours].sum(axis=1))

    def gains(self, groups_N: Int64, times_N: Float64) -> Float64:
        """Compute the log-likelihood gain of later pairs' groups, nats, float64 [N]."""
        share_G = self.pairs.sum(axis=1) + 0.5
        factors_GH, hours_N = self._expected / self._even, hour_of_week(times_N)
        log_total_H = np.log(share_G @ factors_GH / share_G.sum())
        return np.asarray(np.log(factors_GH[groups_N, hours_N]) - log_total_H[hours_N])

    @cached_property
    def _even(self) -> Float64:
        """Compute expected pairs with the same hours for all groups, float64 [G, H]."""
        pairs_H = self.pairs.sum(axis=0)
        pairs_H = pairs_H + _OPEN * pairs_H.mean() + np.finfo(float).tiny
        pairs_G = self.pairs.sum(axis=1) + 1e-9
        return np.asarray(np.outer(pairs_G, pairs_H) / pairs_H.sum())

    @cached_property
    def _expected(self) -> Float64:
        """Compute the pairs expected by the calendar, float64 [G, H]."""
        expected_GH = self._even
        for name in self.windows:
            window = _WINDOWS[name]
            # A ratio of sums, each with the same number of pairs added, goes to 1 where pairs are few.
            ratio_GH = (window(self.pairs) + self.shrinkage) / (window(expected_GH) + self.shrinkage)
            expected_GH = expected_GH * ratio_GH
        return expected_GH


def hour_of_week(times: Float64 | float) -> Int64:
    """Compute the hour of the week, UTC, of seconds since 1970."""
    return np.asarray(np.asarray(times) // _HOUR % HOURS, np.int64)


def pairs_by_hour(groups_N: Int64, times_N: Float64, amounts_N: Float64, groups: int) -> Float64:
    """Sum amounts by group and hour of the week, float64 [G, H]."""
    cells_N = groups_N * HOURS + hour_of_week(times_N)
    return np.bincount(cells_N, amounts_N, groups * HOURS).astype(np.float64).reshape(groups, HOURS)


def _moving(pairs_GH: Float64, hours: int) -> Float64:
    """Sum over a window around every hour, float64 [G, H]."""
    around = hours // 2
    sums_GX = np.cumsum(np.pad(pairs_GH, ((0, 0), (around + 1, around)), mode="wrap"), axis=1)
    return np.asarray(sums_GX[:, hours:] - sums_GX[:, :-hours])


def _sum_day(pairs_GH: Float64) -> Float64:
    # Of 25 hours the outer two count half, so that every hour of the day has the same weight.
    return (_moving(pairs_GH, 25) + _moving(pairs_GH, 23)) / 2


def _sum_hour(pairs_GH: Float64) -> Float64:
    by_day = _moving(pairs_GH, 3).reshape(len(pairs_GH), 7, 24)
    return np.tile(by_day.sum(axis=1), (1, 7))


_WINDOWS: dict[Window, Callable[[Float64], Float64]] = {"day": _sum_day, "hour": _sum_hour}
