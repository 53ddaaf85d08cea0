"""Histories of a batch laid one after another in blocks, each once for all the pairs that share it.

Legend: `B` batch, `G` histories, `T` entries, `S` blocks, `P` places of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.elapsed import ages_of

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

    def ages(self, ticks_N: Int64, pairs_B: Int64) -> Int32:
        """Return how long before the last of the rows that end in a history its entries were, int32 [S, P].

        Args:
            ticks_N: when the pairs were that are entries, int64.
            pairs_B: that of each row, which is asked for then.
        """
        if not len(ticks_N):
            return self.segments_SP
        now_G = np.zeros(int(self.segments_SP.max(initial=0)) + 1, np.int64)
        rows = self.places_B >= 0
        np.maximum.at(now_G, self.segments_SP.ravel()[self.places_B[rows]], ticks_N[pairs_B[rows]])
        return ages_of(now_G[self.segments_SP], ticks_N[self.entries_SP])


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
