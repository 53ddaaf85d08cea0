"""When pairs were and when queries are asked, for histories that say how long ago their entries were.

Legend: `N` pairs, `A` queries as they are asked, `B` batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.elapsed import TimeUnit, ticks_of
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError

_NEVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Moments:
    """Ticks of some pairs and of requests.

    A pair of training is asked for when it was chosen. A query that is evaluated is asked when the first of its
    held-out pairs was chosen, one that has none when the last of all known pairs was: what a service knows, its clock.

    Attributes:
        of_pairs: int64 [N].
        first: of the held-out pairs of each way to ask, int64 [A], `_NEVER` of one without; shorter where the last
            have none.
    """

    unit: TimeUnit
    of_pairs: Int64
    first: Int64

    @classmethod
    def of(cls, known: Pairs, unit: TimeUnit, held_out: Pairs | None = None) -> Moments:
        """Of known pairs, and of those that are looked for."""
        if known.times is None:
            raise DataError("data.timestamp: expected times of all pairs for encoder.time_buckets, found none")
        first_A = np.zeros(0, np.int64)
        if held_out is not None and held_out.times is not None:
            first_A = np.full(int(held_out.askings.max(initial=-1)) + 1, _NEVER)
            np.minimum.at(first_A, held_out.askings, ticks_of(held_out.times, unit))
        return cls(unit, ticks_of(known.times, unit), first_A)

    def of_requests(self, askings_B: Int32) -> Int64:
        """Return when queries are asked, int64 [B]."""
        newest = self.of_pairs.max(initial=0)
        if not len(self.first):
            return np.full(len(askings_B), newest)
        first_B = np.where(askings_B < len(self.first), self.first[np.minimum(askings_B, len(self.first) - 1)], _NEVER)
        return np.where(first_B == _NEVER, newest, first_B)
