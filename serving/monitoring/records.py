"""Records that the service hands over to be counted: answered batches and feedback.

Legend: `B` queries, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Float32, Int8, Int64


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """The arm of an experiment that an answer was given in."""

    run: str
    """The experiment with these arms, shares and settings."""
    arm: str | None
    """None: the unit is not in the experiment."""
    unit: int
    """64 bits that are the unit's."""
    counted: bool = True
    """Whether the arm and chance alone decided how it was answered, so that arms can be compared by it."""


@dataclass(frozen=True)
class AnsweredBatch:
    """One answered batch of queries.

    Attributes:
        release: the one that answered.
        answer_ids: one per query; queries of one request share it, and no other has it.
        places: every query's place in its request, from 0.
        bias_removal_B, popularity_B: λ and μ of every query, float32 [B].
        fingerprints_N: `fingerprints` of the answered labels' ids, all queries one after the other, best first.
        rows_N: their rows, int64 [N]; L and above are labels added since, which have no per-label count.
        scores_N: scores as answered, float32 [N].
        ends_B: where in the N labels every query's end, ascending.
        buckets_N: int8 [N].
        counts_N: training pairs, int64 [N].
        propensities_N: P(shown) of every label given its query, float32 [N]; None where none was drawn by chance.
        explored: labels drawn by chance, by bucket.
        features_B: of every query as JSON, to be recorded with its answer.
        request_ids: what its client calls the request of every query, other requests too perhaps.
        arms_B: of every query.
        restricted_B: whether the client restricted the answer to some labels (`buckets`, `allow`, `filter`), so that it
            says nothing about the release, bool [B]; None: none.
    """

    release: str
    answer_ids: Sequence[str]
    places: Sequence[int]
    bias_removal_B: Float32
    popularity_B: Float32
    fingerprints_N: npt.NDArray[np.uint32]
    rows_N: Int64
    scores_N: Float32
    ends_B: Sequence[int]
    buckets_N: Int8
    counts_N: Int64
    propensities_N: Float32 | None = None
    explored: Mapping[int, int] = field(default_factory=dict)
    features_B: Sequence[bytes | None] | None = None
    request_ids: Sequence[str | None] | None = None
    arms_B: Sequence[ArmAnswer | None] | None = None
    restricted_B: Bools | None = None


@dataclass(frozen=True, slots=True)
class AnswerFeedback:
    """Labels that somebody interacted with after an answer.

    Attributes:
        answer_id: of the answer; None: it is named by `request_id`.
        query: place of the query in its request.
        labels: ids, in the answer or not.
        buckets: of each label in the release now in service, −1 if it has no such label. Where the label was in
            the answer, the answer's bucket counts instead; a label that neither knows is no positive.
        event: what they did, such as `click` or `purchase`.
        weight: what the event is worth in training.
        request_id: of the answered request, where there is no `answer_id`: counts if no other answer is known of a
            request of that id, unless it is the same answer again.
    """

    answer_id: str | None
    query: int
    labels: Sequence[str]
    buckets: Sequence[int]
    event: str = "click"
    weight: float = 1.0
    request_id: str | None = None

    @property
    def named(self) -> str:
        """What it names the answer by."""
        return self.answer_id or self.request_id or ""


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """An organic interaction, and what the service would have answered to the same query (shadow recall).

    Attributes:
        answered: label rows that a retrieval returned, int64.
        interacted: label rows interacted with, int64; negative ones are unknown labels, which are no positives.
        labels: ids interacted with, and their buckets, −1 unknown, to be recorded.
        features: the query's as JSON; None: nothing is recorded.
        event, weight: as of `AnswerFeedback`.
        idempotency_key: one that was recorded under the same key is this one, sent again; None: it is new.
    """

    answered: Int64
    interacted: Int64
    labels: Sequence[tuple[str, int]] = ()
    features: bytes | None = None
    event: str = "click"
    weight: float = 1.0
    idempotency_key: str | None = None
