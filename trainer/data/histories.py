"""The pairs that histories are made of, and how those of a batch lie in blocks.

Legend: `N` known pairs, `Q` queries, `B` batch, `P` entries of a padded history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Int32, Int64
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.pairs import Pairs


@dataclass(frozen=True)
class Histories:
    """The pairs that a history is made of, by query.

    Attributes:
        bags: an entry for each of them, a row for each query.
        earlier: how many of them come before each of the known pairs, int64 [N]; None where they are all of these.
    """

    bags: Bags
    earlier: Int64 | None

    @classmethod
    def of(cls, known: Pairs, offsets: Int64, events: Sequence[int] | None) -> Histories:
        """Of the known pairs, or of those of some event types; entries are label rows.

        Args:
            known: sorted by query.
            offsets: start of every query's pairs, int64 [Q + 1].
            events: codes of the types; None of all.
        """
        labels = known.labels
        if events is None or known.events is None:
            return cls(Bags(offsets, labels, np.ones(len(labels), np.float32)), None)
        chosen = np.isin(known.events, list(events))
        earlier = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
        bags = Bags(earlier[offsets], labels[chosen], np.ones(int(earlier[-1]), np.float32))
        return cls(bags, earlier[:-1])

    def before(self, pairs_B: Int64) -> Int64:
        """Return how many of the entries come before some known pairs, int64 [B]."""
        return pairs_B if self.earlier is None else self.earlier[pairs_B]


PLACES, SEGMENTS, POSITIONS = "__place", "__segment", "__position"
"""What names of a batch's columns end with that say where packed histories lie, after `_` and the feature's name."""


class Packing(NamedTuple):
    """Which entries a batch reads, and where.

    Attributes:
        entries_SP: int64, entries of the query's pairs; 0 where there is none.
        segments_SP: int32, a number from 1 for each history; 0 where there is none.
        positions_SP: int32, places in the history, from 0.
        places_B: int32, where each row's last entry is among all S·P; −1 where it has none.
    """

    entries_SP: Int64
    segments_SP: Int32
    positions_SP: Int32
    places_B: Int32


def pack(firsts_B: Int64, ends_B: Int64, *, length: int) -> Packing:
    """Lay out the histories that rows end in.

    A row sees its last entries: all where they are at most `length`, else more than half of it. Rows of a query that
    see the same first entry share a history, so that one of length n costs n entries, and a longer one at most twice
    as many.

    Args:
        firsts_B: the first entry of each row's query, int64.
        ends_B: the entry after the last that it sees, int64; histories of different queries do not overlap.
    """
    hop = (length + 1) // 2
    seen_B = ends_B - firsts_B
    starts_B = firsts_B + hop * -(-np.maximum(seen_B - length, 0) // hop)
    rows = np.flatnonzero(seen_B)
    starts_G, of_rows = np.unique(starts_B[rows], return_inverse=True)
    lengths_G = np.zeros(len(starts_G), np.int64)
    np.maximum.at(lengths_G, of_rows, ends_B[rows] - starts_B[rows])
    bases_G = np.cumsum(lengths_G) - lengths_G
    blocks = _few_sizes(-(-int(lengths_G.sum()) // length))
    entries_T, segments_T, positions_T = (np.zeros(blocks * length, np.int64) for _ in range(3))
    total = int(lengths_G.sum())
    positions_T[:total] = np.arange(total) - np.repeat(bases_G, lengths_G)
    entries_T[:total] = positions_T[:total] + np.repeat(starts_G, lengths_G)
    segments_T[:total] = np.repeat(np.arange(1, len(starts_G) + 1), lengths_G)
    places_B = np.full(len(ends_B), -1, np.int32)
    places_B[rows] = bases_G[of_rows] + ends_B[rows] - starts_B[rows] - 1
    shape = (blocks, length)
    return Packing(
        entries_T.reshape(shape),
        segments_T.reshape(shape).astype(np.int32),
        positions_T.reshape(shape).astype(np.int32),
        places_B,
    )


def _few_sizes(blocks: int) -> int:
    """At least as many blocks, and at least one; of four numbers to a doubling, for each is compiled on its own."""
    step = max(1 << max(blocks.bit_length() - 3, 0), 1)
    return max(-(-blocks // step) * step, 1)
