"""Which training pairs an epoch visits after a warm start: what is new, and a share of what the bundle has learnt from.

Legend: `N` training pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Float64, Int64
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError


@dataclass(frozen=True)
class Replay:
    """New pairs, all visited every epoch, and old ones, of which an epoch draws some.

    Attributes:
        new: rows of the training pairs, int64.
        old: rows of the others, int64.
        drawn: how many of the old ones an epoch visits.
    """

    new: Int64
    old: Int64
    drawn: int

    @classmethod
    def of(cls, train: Pairs, *, share: float, newest: float) -> Replay:
        """Split the training pairs by time.

        Args:
            share: of the old pairs, that an epoch visits.
            newest: time of the last pair that the bundle has learnt from, in the pairs' unit.
        """
        assert train.times is not None  # a recipe with a share needs data.timestamp
        is_new = train.times > newest
        if not is_new.any():
            raise DataError(
                f"training.replay = {share:g}: expected training pairs newer than {newest:.15g}, the newest that the "
                f"bundle has learnt from, found {train.times.max():.15g} as the newest here"
            )
        old = np.flatnonzero(~is_new)
        return cls(np.flatnonzero(is_new), old, round(share * len(old)))

    @property
    def visits(self) -> int:
        """Return pairs that an epoch visits."""
        return len(self.new) + self.drawn

    def chances(self) -> Float64:
        """Return expected visits of every pair in an epoch, float64 [N]."""
        chances_N = np.ones(len(self.new) + len(self.old))
        chances_N[self.old] = self.drawn / max(len(self.old), 1)
        return chances_N

    def rows(self, rng: np.random.Generator) -> Int64:
        """Return rows in the order in which an epoch visits them, int64 [visits]."""
        return rng.permutation(np.concatenate([self.new, rng.choice(self.old, self.drawn, replace=False)]))

    def __str__(self) -> str:
        return f"epochs visit {len(self.new):,} new pairs and {self.drawn:,} of the {len(self.old):,} old ones"
