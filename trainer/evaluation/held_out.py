"""What there is to find: held-out pairs, and which of them an evaluation measures.

Legend: `L` labels, `P` distinct pairs, `A` queries as they are asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Int32, Int64
from longtail.bundle.sets import distinct, is_among
from longtail.trainer.data.pairs import Pairs


@dataclass(frozen=True)
class HeldOut:
    """How many pairs of a split are measured, and why not all.

    Attributes:
        seen: of these, those that training has too, which `evaluation.exclude_seen` leaves out; 0 where it is off.
        queries: that have such a pair, each as often as it is asked in a way of its own.
    """

    pairs: int
    distinct: int
    seen: int
    measured: int
    queries: int

    @classmethod
    def of(
        cls, held_out: Pairs, known: Pairs, *, labels: int, exclude_seen: bool, askers: Int32 | None = None
    ) -> HeldOut:
        """Of a split.

        Args:
            askers: query row of every way to ask, int32 [A]; None where it is one of each.
        """
        seen = seen_pairs(known, labels=labels, exclude_seen=exclude_seen, held_out=held_out)
        keys_P = to_find(held_out, seen, labels=labels, askers=askers)
        once = len(to_find(held_out, seen[:0], labels=labels, askers=askers))
        queries = len(distinct(keys_P // labels))
        return cls(len(held_out), once, once - len(keys_P), len(keys_P), queries)

    def __str__(self) -> str:
        repeats = f", {self.pairs - self.distinct:,} repeats" if self.pairs > self.distinct else ""
        seen = f", {self.seen:,} seen in training (evaluation.exclude_seen)" if self.seen else ""
        return f"{self.pairs:,} pairs → {self.measured:,} to find of {self.queries:,} queries{repeats}{seen}"


def seen_pairs(known: Pairs, *, labels: int, exclude_seen: bool, held_out: Pairs | None = None) -> Int64:
    """`query · L + label` of what is left out of rankings, int64 [P], rising; nothing where it is not excluded.

    Args:
        held_out: pairs whose queries are ranked for; None where all are.
    """
    if not exclude_seen:
        return np.zeros(0, np.int64)
    if held_out is not None:
        asked_Q = np.zeros(int(max(known.queries.max(initial=-1), held_out.queries.max(initial=-1))) + 1, np.bool_)
        asked_Q[held_out.queries] = True
        known = known.take(asked_Q[known.queries])
    return distinct(_keys(known, labels))


def to_find(held_out: Pairs, seen: Int64, *, labels: int, askers: Int32 | None = None) -> Int64:
    """`query · L + label` of distinct held-out pairs that are not seen, int64 [P], rising.

    With `askers`, queries as they are asked (`Pairs.askings`): what a query has seen is left out of all of its.

    Args:
        seen: keys to leave out, int64 [P].
        askers: query row of every way to ask, int32 [A]; None where it is one of each.
    """
    if askers is None:
        keys = distinct(_keys(held_out, labels))
        return keys[~is_among(keys, seen)]
    keys = distinct(held_out.askings.astype(np.int64) * labels + held_out.labels)
    return keys[~is_among(askers[keys // labels].astype(np.int64) * labels + keys % labels, seen)]


def _keys(pairs: Pairs, labels: int) -> Int64:
    return pairs.queries.astype(np.int64) * labels + pairs.labels
