"""The pairs that histories are made of, and when they were.

Legend: `N` known pairs, `Q` queries, `B` batch, `P` entries of a padded history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.bundle.elapsed import NO_TIME, TimeUnit, ages_of, ticks_of
from longtail.trainer.data.columns import Bags
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.errors import DataError


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
            first_A = np.full(int(held_out.request_rows.max(initial=-1)) + 1, _NEVER)
            np.minimum.at(first_A, held_out.request_rows, ticks_of(held_out.times, unit))
        return cls(unit, ticks_of(known.times, unit), first_A)

    def of_requests(self, requests_B: Int32) -> Int64:
        """Return when queries are asked, int64 [B]."""
        newest = self.of_pairs.max(initial=0)
        if not len(self.first):
            return np.full(len(requests_B), newest)
        first_B = np.where(
            requests_B < len(self.first), self.first[np.minimum(requests_B, len(self.first) - 1)], _NEVER
        )
        return np.where(first_B == _NEVER, newest, first_B)


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
