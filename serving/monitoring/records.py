"""Define what the service passes to monitoring.

Legend: `B` queries, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from longtail.bundle.arrays import Float32, Int8, Int64


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """An answer's arm in an experiment."""

    run: str
    """Name of the experiment with its arms, shares and settings."""
    arm: str
    unit: int
    """Hash of the unit, 64 bits."""
    counted: bool = True
    """Whether chance alone decided the arm, and the arm the settings, so that the answer counts in comparisons."""


IdKind = Literal["query", "history", "feedback"]
"""Where ids stood that the release should know: a query's features, its history, and the labels of feedback."""
ID_KINDS: tuple[IdKind, ...] = get_args(IdKind)


Restriction = Literal["buckets", "allow", "filter"]
"""Option of a query by which a client restricts the eligible labels."""
RESTRICTIONS: tuple[Restriction, ...] = get_args(Restriction)


Basis = Literal["model", "cooccurrence", "popularity"]
"""What an answer stands on: the towers, labels chosen with the history, or popularity alone."""
BASES: tuple[Basis, ...] = get_args(Basis)


class IdCounts(NamedTuple):
    """Ids of one kind in some queries or events.

    Attributes:
        senders: queries or events that named any.
        ids: ids that they named.
        unknown: of these, ids that the release does not know.
    """

    senders: int
    ids: int
    unknown: int


@dataclass(slots=True)
class AnsweredBatch:
    """One answered batch of queries.

    Attributes:
        rows_N: rows of the answered labels of all queries in sequence, int64 [N]. Labels of the release have their rows
            in it, even if embedded again; L and above are labels added since.
        ends_B: position after each query's last label, ascending.
        explored: number of randomly drawn labels, by bucket.
        floored: numbers of queries with floors, and of these with a floor that the answer does not meet.
        restrictions_B: options by which the client restricted the eligible labels; None: no query is restricted.
        judged_at_B: λ whose promise holds for the answer, float32 [B]; NaN: the release promises nothing for it.
        ids: what the queries named, by the kinds of `ID_KINDS`.
        bases: numbers of queries by what their answers stand on; empty for similar labels.
        unknown: numbers of unknown ids in all `exclude` and in all `allow`.
        seconds: duration of each stage of the search.
        waited: seconds that each request of the search waited in the queue.
        features_B: features of each query, for groups of them; None: they are not counted by groups.
    """

    release: str
    bias_removal_B: Float32
    popularity_B: Float32
    cooccurrence_B: Float32
    judged_at_B: Float32
    rows_N: Int64
    scores_N: Float32
    ends_B: Sequence[int]
    buckets_N: Int8
    counts_N: Int64
    explored: Mapping[int, int] = field(default_factory=dict)
    floored: tuple[int, int] = (0, 0)
    arms_B: Sequence[ArmAnswer | None] | None = None
    restrictions_B: Sequence[Sequence[Restriction]] | None = None
    ids: Mapping[IdKind, IdCounts] = field(default_factory=dict)
    bases: Mapping[Basis, int] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    waited: Sequence[float] = ()
    features_B: Sequence[Mapping[str, Any] | None] | None = None

    @staticmethod
    def joined(batches: Sequence[AnsweredBatch]) -> AnsweredBatch:
        """Join the answers of batches of one release; what concerns the searches is left out."""
        if len(batches) == 1:
            return batches[0]
        sizes = [len(batch.ends_B) for batch in batches]
        starts = accumulate([batch.ends_B[-1] if batch.ends_B else 0 for batch in batches], initial=0)
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(batch, name) for batch in batches])
            for name in (
                "bias_removal_B", "popularity_B", "cooccurrence_B", "judged_at_B", "rows_N", "scores_N", "buckets_N",
                "counts_N",
            )
        }  # fmt: skip
        ids: dict[IdKind, IdCounts] = {}
        for batch in batches:
            for kind, more in batch.ids.items():
                ids[kind] = IdCounts(*map(sum, zip(ids.get(kind, (0, 0, 0)), more, strict=True)))
        return AnsweredBatch(
            release=batches[0].release,
            ends_B=[start + end for start, batch in zip(starts, batches, strict=False) for end in batch.ends_B],
            explored=_added([batch.explored for batch in batches]),
            floored=(sum([batch.floored[0] for batch in batches]), sum([batch.floored[1] for batch in batches])),
            arms_B=_optional([batch.arms_B for batch in batches], sizes, None),
            restrictions_B=_optional([batch.restrictions_B for batch in batches], sizes, ()),
            ids=ids,
            bases=_added([batch.bases for batch in batches]),
            **columns,
        )


def _added(counts: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for more in counts:
        total.update(more)
    return dict(total)


def _optional(columns: Sequence[Sequence[Any] | None], sizes: Sequence[int], missing: Any) -> list[Any] | None:
    if not any(columns):
        return None
    joined = list[Any]()
    for column, size in zip(columns, sizes, strict=True):
        joined += [missing] * size if column is None else column
    return joined


Source = Literal["feedback", "organic"]
"""Source of a choice: from an answer, or without one."""
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(slots=True)
class ChosenLabels:
    """Labels that a user chose in one event.

    Attributes:
        release: the release that answered, or would have answered.
        buckets: bucket of each label; −1: the release does not know the label, which is not counted as a positive.
        positions: position of each label in the answer; None: the answer did not hold it.
        judged_at: λ whose promise holds for the answer; NaN: the release promises nothing for it.
        k: labels of the answer.
    """

    source: Source
    release: str
    buckets: Sequence[int]
    positions: Sequence[int | None]
    bias_removal: float
    judged_at: float
    k: int
    arm: ArmAnswer | None = None

    @property
    def ids(self) -> IdCounts:
        """Count the event's labels, all and unknown ones."""
        return IdCounts(1, len(self.buckets), sum(bucket < 0 for bucket in self.buckets))
