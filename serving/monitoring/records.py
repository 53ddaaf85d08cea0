"""Records that the service hands over to be counted: answered batches and labels chosen.

Legend: `B` queries, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from longtail.bundle.arrays import Bools, Float32, Int8, Int64


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """The arm of an experiment that an answer was given in."""

    run: str
    """The experiment with these arms, shares and settings."""
    arm: str
    unit: int
    """64 bits that are the unit's."""
    counted: bool = True
    """Whether the arm and chance alone decided how it was answered, so that arms can be compared by it."""


@dataclass(frozen=True)
class AnsweredBatch:
    """One answered batch of queries.

    Attributes:
        rows_N: rows of the answered labels, all queries one after the other, int64 [N]: of the release's labels their
            rows in it, also of those that were embedded anew; L and above are labels added since.
        ends_B: where in the N labels every query's end, ascending.
        explored: labels drawn by chance, by bucket.
        restricted_B: whether the client restricted the answer to some labels (`buckets`, `allow`, `filter`), so that it
            says nothing about the release, bool [B]; None: none.
    """

    release: str
    bias_removal_B: Float32
    popularity_B: Float32
    rows_N: Int64
    scores_N: Float32
    ends_B: Sequence[int]
    buckets_N: Int8
    counts_N: Int64
    explored: Mapping[int, int] = field(default_factory=dict)
    arms_B: Sequence[ArmAnswer | None] | None = None
    restricted_B: Bools | None = None


Source = Literal["feedback", "organic"]
"""Of a choice: from an answer, or without one."""
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(slots=True)
class ChosenLabels:
    """Labels that somebody chose at once.

    Attributes:
        release: that answered, or would have.
        buckets: of each label, −1 of one that the release does not know: it is no positive.
        positions: of each label in the answer; None: not in it.
    """

    source: Source
    release: str
    buckets: Sequence[int]
    positions: Sequence[int | None]
    bias_removal: float
    arm: ArmAnswer | None = None
