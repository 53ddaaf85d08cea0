"""Histories of evaluated requests, as slices of one table of pairs.

Legend: `N` pairs, `Q` queries, `A` requests, `E` held-out pairs, `R` rows (requests or held-out pairs), `B` a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Int32, Int64
from longtail.trainer.data.pairs import Pairs

Rows = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Past:
    """Locate the history of every row that is evaluated.

    A fixed past has a row per request, whose history is all known pairs of the query. A growing past has a row per
    held-out pair, whose history is the query's known and held-out pairs before that pair.

    Attributes:
        known_pairs: pairs known before the held-out ones.
        pairs: pairs of the histories, sorted by query, then time; label −1 for a label outside of the catalogue.
        offsets: start of every query's pairs, int64 [Q + 1].
        request_queries: query row of every request, int32 [A]; None if every query has exactly one request.
        held_out: pairs of the rows of a growing past, [E]; None for a fixed past.
        ends: end of every row's history in `pairs`, int64 [E]; None for a fixed past.
    """

    known_pairs: Pairs
    pairs: Pairs
    offsets: Int64
    request_queries: Int32 | None = None
    held_out: Pairs | None = None
    ends: Int64 | None = None

    @classmethod
    def fixed(cls, known_pairs: Pairs, *, queries: int, requests: Int32 | None = None) -> Past:
        """Create a fixed past; `requests` are the query rows of requests, int32 [A]."""
        offsets = np.searchsorted(known_pairs.queries, np.arange(queries + 1, dtype=np.int32)).astype(np.int64)
        return cls(known_pairs, known_pairs, offsets, requests)

    @classmethod
    def growing(cls, known_pairs: Pairs, held_out: Pairs, *, queries: int) -> Past:
        """Create a growing past of sorted held-out pairs; row e is the e-th of these pairs."""
        has_row_Q = np.zeros(queries, np.bool_)
        has_row_Q[held_out.queries] = True
        # A small part of the known pairs, if most held-out queries are new.
        earlier_pairs = known_pairs.take(has_row_Q[known_pairs.queries])
        ends = earlier_pairs.insertion_points(held_out) + np.arange(len(held_out))
        past = cls.fixed(earlier_pairs.merge_later(held_out), queries=queries)
        return replace(past, known_pairs=known_pairs, held_out=held_out, ends=ends)

    def queries(self, rows_B: Rows) -> Rows:
        """Return the query row of each row, int [B]."""
        if self.held_out is not None:
            return self.held_out.queries[rows_B]
        return rows_B if self.request_queries is None else self.request_queries[rows_B]

    def requests(self, rows_B: Rows) -> Rows:
        """Return the request of each row, as in `Pairs.request_rows`, int [B]."""
        return rows_B if self.held_out is None else self.held_out.request_rows[rows_B]

    def slices(self, rows_B: Rows) -> tuple[Int64, Int64]:
        """Return start and end of each row's history in `pairs`, int64 [B] each."""
        queries_B = self.queries(rows_B)
        return self.offsets[queries_B], self.offsets[queries_B + 1] if self.ends is None else self.ends[rows_B]

    def lengths(self, rows_B: Rows) -> Int64:
        """Count the pairs in each row's history, int64 [B]."""
        starts_B, ends_B = self.slices(rows_B)
        return ends_B - starts_B

    def seen_labels(self, rows_B: Rows) -> Int64:
        """Get (row in the block, label) of every history pair, oldest first, int64 [n, 2]."""
        row_n, entry_n = self.entries(rows_B)
        seen_n2 = np.stack([row_n, self.pairs.labels[entry_n]], axis=1)
        return seen_n2[seen_n2[:, 1] >= 0]

    def entries(self, rows_B: Rows) -> tuple[Int64, Int64]:
        """Get each history pair's row in the block and in `pairs`, int64 [n] both."""
        starts_B, ends_B = self.slices(rows_B)
        lengths_B = ends_B - starts_B
        row_n = np.repeat(np.arange(len(rows_B)), lengths_B)
        shift_B = starts_B - (np.cumsum(lengths_B) - lengths_B)
        return row_n, np.arange(len(row_n)) + shift_B[row_n]

    def holds(self, rows_n: Rows, labels_n: Rows) -> Bools:
        """Return whether each row's history holds a label, bool [n]."""
        pairs, queries_n = self.pairs, self.queries(rows_n)
        labels = int(max(pairs.labels.max(initial=0), labels_n.max(initial=0))) + 1
        keys_n = queries_n.astype(np.int64) * labels + labels_n
        keys_K, key_n = np.unique(keys_n, return_inverse=True)
        has_row_Q = np.zeros(len(self.offsets), np.bool_)
        has_row_Q[queries_n] = True
        entries = np.flatnonzero(has_row_Q[pairs.queries] & (pairs.labels >= 0))
        keys = pairs.queries[entries].astype(np.int64) * labels + pairs.labels[entries]
        key = np.searchsorted(keys_K, keys)
        # −1 equals no key: it stands past the last one, where `searchsorted` may point.
        equal = np.append(keys_K, -1)[key] == keys
        # A label in no history is first met after the last pair.
        first_K = np.full(len(keys_K), len(pairs))
        np.minimum.at(first_K, key[equal], entries[equal])
        in_history_n: Bools = first_K[key_n] < self.slices(rows_n)[1]
        return in_history_n

    def with_labels(self, rows_L: Int32) -> Past:
        """Return the same histories with other label rows, int32 [L]; −1 leaves a label out."""
        return replace(self, pairs=replace(self.pairs, labels=rows_L[self.pairs.labels]))
