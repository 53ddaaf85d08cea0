"""The positives that training knows of every query, for losses that do not take them as negatives [METHODS §2.1].

Legend: `N` known positives, `Q` queries, `B` rows of a batch, `K` known positives of a batch, all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.sets import distinct
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.losses.hits import KNOWN_LIMIT


@dataclass(frozen=True)
class KnownPositives:
    """Distinct training labels of every query: query q has `labels[offsets[q]:offsets[q + 1]]`, rising.

    With objectives the queries are `Pairs.owners`: what a query clicked is no known positive of what it bought.

    Attributes:
        labels: int32 [N].
        offsets: int64 [Q + 1].
    """

    labels: Int32
    offsets: Int64

    @classmethod
    def of(cls, train: Pairs, *, limit: int = KNOWN_LIMIT) -> KnownPositives:
        """Of the training pairs; of a query with more labels than `limit` the most frequent are known.

        What is left out may be drawn as a negative of the query's other labels, as under `mask`: the rarest of a
        long list, which all samplers but `uniform` and `full` draw least.
        """
        size = int(train.labels.max()) + 1
        owners = train.owners
        keys = distinct(owners * size + train.labels)
        queries, labels = keys // size, keys % size
        by_frequency = np.lexsort((-np.bincount(train.labels)[labels], queries))
        rank = np.empty(len(keys), np.int64)
        rank[by_frequency] = np.arange(len(keys)) - np.searchsorted(queries, queries)
        kept = rank < limit
        queries, labels = queries[kept], labels[kept]
        offsets = np.searchsorted(queries, np.arange(int(owners.max()) + 2)).astype(np.int64)
        return cls(labels.astype(np.int32), offsets)

    def of_queries(self, queries_B: Int32 | Int64) -> tuple[Int32, Int32]:
        """Known positives of a batch's queries and the row of each, int32 [K] both, as `known_among` takes them.

        K is rounded up to a power of two, so that few shapes occur, by repeats of the last.
        """
        starts_B = self.offsets[queries_B]
        lengths_B = self.offsets[queries_B + 1] - starts_B
        rows_K = np.repeat(np.arange(len(queries_B), dtype=np.int32), lengths_B)
        at_K = np.arange(len(rows_K)) + np.repeat(starts_B - np.cumsum(lengths_B) + lengths_B, lengths_B)
        more = (0, (1 << (len(rows_K) - 1).bit_length()) - len(rows_K))
        return np.pad(self.labels[at_K], more, mode="edge"), np.pad(rows_K, more, mode="edge")
