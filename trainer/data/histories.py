"""The pairs that histories are made of, and when they were.

Legend: `N` known pairs, `Q` queries, `B` batch, `P` entries of a padded history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.bundle.elapsed import NO_TIME, ages_of
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.pairs import Pairs


@dataclass(frozen=True)
class Histories:
    """The pairs that a history is made of, by query.

    Attributes:
        bags: an entry for each of them, a row for each query.
        earlier: how many of them come before each of the known pairs, int64 [N]; None where they are all of these.
        ticks: when each of them was, int64; None where nothing reads it.
    """

    bags: Bags
    earlier: Int64 | None
    ticks: Int64 | None

    @classmethod
    def of(cls, known: Pairs, offsets: Int64, events: Sequence[int] | None, ticks: Int64 | None) -> Histories:
        """Of the known pairs, or of those of some event types; entries are label rows.

        Args:
            known: sorted by query.
            offsets: start of every query's pairs, int64 [Q + 1].
            events: codes of the types; None of all.
            ticks: of the known pairs, int64 [N]; None where nothing reads it.
        """
        labels = known.labels
        if events is None or known.events is None:
            return cls(Bags(offsets, labels, np.ones(len(labels), np.float32)), None, ticks)
        chosen = np.isin(known.events, list(events))
        earlier = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
        bags = Bags(earlier[offsets], labels[chosen], np.ones(int(earlier[-1]), np.float32))
        return cls(bags, earlier[:-1], None if ticks is None else ticks[chosen])

    def before(self, pairs_B: Int64) -> Int64:
        """Return how many of the entries come before some known pairs, int64 [B]."""
        return pairs_B if self.earlier is None else self.earlier[pairs_B]

    def ages(self, starts_B: Int64, there_BP: Bools, now_B: Int64, known_B: Bools | None = None) -> Int32:
        """Return how long before a request the entries of padded histories were, in ticks, int32 [B, P].

        Args:
            starts_B: the first entry of each, int64.
            now_B: when each is asked with, int64.
            known_B: of which the times are told; by default of all.
        """
        if self.ticks is None or not len(self.ticks):
            return np.zeros(there_BP.shape, np.int32)
        at_BP = np.where(there_BP, starts_B[:, None] + np.arange(there_BP.shape[1]), 0)
        ages_BP = ages_of(now_B[:, None], self.ticks[at_BP])
        if known_B is not None:
            ages_BP = np.where(known_B[:, None], ages_BP, np.int32(NO_TIME))
        return np.where(there_BP, ages_BP, np.int32(0))
