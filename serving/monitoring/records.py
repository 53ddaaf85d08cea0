"""Records that the service hands over to be counted: answered batches, feedback, and the baseline of a release.

Legend: `B` queries, `K` labels per query, `N` answered labels of all queries, `L` labels of the release.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Float32, Float64, Int8, Int64

DECILES = 10


@dataclass(frozen=True)
class AnsweredBatch:
    """One answered batch of queries.

    Attributes:
        release: the one that answered.
        request_ids: one per query; queries of one request share it.
        places: every query's place in its request, from 0.
        bias_removal_B: λ of every query, float32 [B].
        fingerprints_N: `fingerprints` of the answered labels' ids, all queries one after the other, best first.
        rows_N: their rows, int64 [N]; L and above are labels added since, which have no per-label count.
        scores_N: as answered, float32 [N].
        ends_B: where in the N labels every query's end, ascending.
        buckets_N: int8 [N].
        counts_N: training pairs, int64 [N].
    """

    release: str
    request_ids: Sequence[str]
    places: Sequence[int]
    bias_removal_B: Float32
    fingerprints_N: npt.NDArray[np.uint32]
    rows_N: Int64
    scores_N: Float32
    ends_B: Sequence[int]
    buckets_N: Int8
    counts_N: Int64

    @cached_property
    def exposures(self) -> Int64:
        """How many of the N labels are head, torso and tail, int64 [3]."""
        return np.bincount(self.buckets_N, minlength=len(BUCKET_NAMES))


@dataclass(frozen=True, slots=True)
class AnswerFeedback:
    """Labels that somebody interacted with after an answer.

    Attributes:
        request_id: of the answer.
        query: place of the query in its request.
        labels: ids, in the answer or not.
        buckets: of each label in the release now in service, −1 if it has no such label. Where the label was in
            the answer, the answer's bucket counts instead; a label that neither knows is no positive.
    """

    request_id: str
    query: int
    labels: Sequence[str]
    buckets: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """An organic interaction, and what the service would have answered to the same query (shadow recall).

    Attributes:
        answered: label rows that a retrieval returned, int64.
        interacted: label rows interacted with, int64; negative ones are unknown labels, which are no positives.
    """

    answered: Int64
    interacted: Int64


@dataclass(frozen=True, slots=True)
class Baseline:
    """What calibration queries get from a release: the distributions that live traffic is compared with.

    Attributes:
        bias_removal: λ of the retrieval.
        k: labels per query.
        shares: of the answered labels, by bucket; they sum to 1.
        popularity: mean training pairs of the answered labels.
        score_edges: nine deciles of the scores, ascending.
        score_shares: of the scores between them, ten; near 1/10 each, unless scores tie.
    """

    bias_removal: float
    k: int
    shares: tuple[float, ...]
    popularity: float
    score_edges: tuple[float, ...]
    score_shares: tuple[float, ...]

    def report_json(self) -> dict[str, Any]:
        """As GET /v1/monitoring shows it."""
        return {
            "bias_removal": self.bias_removal,
            "k": self.k,
            "shares": dict(zip(BUCKET_NAMES, self.shares, strict=True)),
            "popularity": self.popularity,
            "scores": {"edges": list(self.score_edges), "shares": list(self.score_shares)},
        }

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON can hold them; `from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """What `to_json` wrote; raises TypeError if fields are missing or unknown."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)


def fingerprints(ids: Iterable[str]) -> npt.NDArray[np.uint32]:
    """CRC-32 of every id, uint32 [N]: a label that is not among 20 answered ones passes for one of them once in
    2·10^8.
    """
    return np.array([zlib.crc32(id_.encode("utf-8", "replace")) for id_ in ids], np.uint32)


def measure_baseline(
    scores_BK: Float32,
    rows_BK: npt.NDArray[np.integer[Any]],
    buckets_L: Int8,
    counts_L: Int64,
    bias_removal: float,
    k: int,
) -> Baseline | None:
    """The baseline from a retrieval of calibration queries; None if it returned nothing.

    Args:
        scores_BK: best first.
        rows_BK: label rows; −1 where a list ends early.
        buckets_L: bucket of every label.
        counts_L: training pairs of every label.
        bias_removal: λ of the retrieval, the same for all queries.
        k: K.
    """
    listed_BK = rows_BK >= 0
    rows_N, scores_N = rows_BK[listed_BK], scores_BK[listed_BK].astype(np.float64)
    if not len(rows_N):
        return None
    edges = np.quantile(scores_N, np.arange(1, DECILES) / DECILES)
    exposures = np.bincount(buckets_L[rows_N], minlength=len(BUCKET_NAMES))
    in_decile = np.bincount(decile_of(scores_N, edges), minlength=DECILES)
    return Baseline(
        bias_removal=float(bias_removal),
        k=int(k),
        shares=tuple((exposures / len(rows_N)).tolist()),
        popularity=float(counts_L[rows_N].mean()),
        score_edges=tuple(edges.tolist()),
        score_shares=tuple((in_decile / len(rows_N)).tolist()),
    )


def decile_of(scores_N: npt.NDArray[np.floating[Any]], edges: Float64) -> npt.NDArray[np.intp]:
    """The decile of every score, 0 … 9, int [N]: a score on an edge belongs to the decile above it."""
    return np.searchsorted(edges, scores_N, side="right")
