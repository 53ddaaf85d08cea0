"""The entries of histories, and the packing of a batch's histories into blocks.

Legend: `N` pairs, `Q` queries, `B` batch, `P` entries of a padded history.
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
class HistoryBags:
    """Hold the entries of a history feature, by query.

    Attributes:
        bags: entries, one row per query.
        earlier: number of entries before each pair and before the end, int64 [N + 1]; None if every pair is an entry.
    """

    bags: Bags
    earlier: Int64 | None

    @classmethod
    def build(cls, pairs: Pairs, offsets: Int64, events: Sequence[int] | None) -> HistoryBags:
        """Build histories from all pairs, or from pairs of some event types; entries are label rows.

        Args:
            pairs: sorted by query.
            offsets: start of every query's pairs, int64 [Q + 1].
            events: codes of the event types; None for all pairs.
        """
        labels = pairs.labels
        if events is None or pairs.events is None:
            return cls(Bags(offsets, labels, np.ones(len(labels), np.float32)), None)
        # Entries are counted along all pairs, so that a pair finds its place among the chosen ones.
        chosen = np.isin(pairs.events, list(events))
        earlier = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int64)
        bags = Bags(earlier[offsets], labels[chosen], np.ones(int(earlier[-1]), np.float32))
        return cls(bags, earlier)

    def count_earlier(self, pairs_B: Int64) -> Int64:
        """Count the entries before some places among the pairs, int64 [B]."""
        return pairs_B if self.earlier is None else self.earlier[pairs_B]


LAST_SLOTS, SEGMENTS, POSITIONS = "__last", "__segment", "__position"
"""Suffixes of the columns that locate packed histories in a batch: `_`, the feature's name, then the suffix."""


class Packing(NamedTuple):
    """Locate the entries that a batch reads.

    Attributes:
        entries_SP: int64, entries of the queries' histories; 0 for an empty place.
        segments_SP: int32, the number of the history, from 1; 0 for an empty place.
        positions_SP: int32, position in the history, from 0.
        last_slots_B: int32, place of each row's last entry among all S·P; −1 without an entry.
    """

    entries_SP: Int64
    segments_SP: Int32
    positions_SP: Int32
    last_slots_B: Int32


def pack(firsts_B: Int64, ends_B: Int64, *, length: int) -> Packing:
    """Pack the histories of a batch's rows into blocks.

    A row reads its last entries: all of them if they are at most `length`, else more than half of `length`. Rows of a
    query that read from the same first entry share a history. A query with n entries costs n places if n ≤ `length`,
    and otherwise at most 2·n.

    Args:
        firsts_B: the first entry of each row's query, int64.
        ends_B: the entry after the last one that the row reads, int64; histories of different queries do not overlap.
    """
    # First entries move in hops of half a length, so that many rows of a long history share one.
    hop = (length + 1) // 2
    seen_B = ends_B - firsts_B
    starts_B = firsts_B + hop * -(-np.maximum(seen_B - length, 0) // hop)
    rows = np.flatnonzero(seen_B)
    starts_G, of_rows = np.unique(starts_B[rows], return_inverse=True)
    lengths_G = np.zeros(len(starts_G), np.int64)
    # A shared history is as long as its longest row needs.
    np.maximum.at(lengths_G, of_rows, ends_B[rows] - starts_B[rows])
    bases_G = np.cumsum(lengths_G) - lengths_G
    blocks = _few_sizes(-(-int(lengths_G.sum()) // length))
    entries_T, segments_T, positions_T = (np.zeros(blocks * length, np.int64) for _ in range(3))
    total = int(lengths_G.sum())
    positions_T[:total] = np.arange(total) - np.repeat(bases_G, lengths_G)
    entries_T[:total] = positions_T[:total] + np.repeat(starts_G, lengths_G)
    segments_T[:total] = np.repeat(np.arange(1, len(starts_G) + 1), lengths_G)
    # A row's last entry is at its distance from the first entry of the history that the row shares.
    last_slots_B = np.full(len(ends_B), -1, np.int32)
    last_slots_B[rows] = bases_G[of_rows] + ends_B[rows] - starts_B[rows] - 1
    shape = (blocks, length)
    return Packing(
        entries_T.reshape(shape),
        segments_T.reshape(shape).astype(np.int32),
        positions_T.reshape(shape).astype(np.int32),
        last_slots_B,
    )


def _few_sizes(blocks: int) -> int:
    """Round a number of blocks up to four values per doubling.

    A step is compiled for each number of blocks, so few numbers should occur.
    """
    step = max(1 << max(blocks.bit_length() - 3, 0), 1)
    return max(-(-blocks // step) * step, 1)
