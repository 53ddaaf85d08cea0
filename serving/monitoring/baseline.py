"""Measure what a release promises: answers and recall.

Legend: `B` calibration queries, `K` labels per query, `N` answered labels of all queries, `L` labels of the release,
`P` candidate labels of a query, −1 beyond its last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES, CurvePoint, Manifest
from longtail.bundle.arrays import Float32, Float64, Int8, Int64
from longtail.bundle.exposure import coverage_by_bucket

DECILES = 10
ALL = "all"
_RECALL = re.compile(rf"recall@(\d+)(?:/({'|'.join(BUCKET_NAMES)}))?")
_EXPOSURE = re.compile(r"exposure@(\d+)/head")
_TOLERANCE = 1e-6
_STEPS_PER_UNIT = 100
"""Points of λ per unit that have their own promise: a share that halves within 0.05 changes by 7 % in half a step."""


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBaseline:
    """Distributions of the answers to calibration queries at one λ.

    Attributes:
        shares: shares of the buckets in the answered labels; the sum is 1.
        coverage: share of each bucket's labels that were answered at all.
        by_k: labels per query by bucket and by decile of `score_edges`, among the first 0, 1, …, k labels, float64
            [1 + k, 14].
        score_edges: nine deciles of the scores, ascending, float64 [9].
        score_shares: shares of the scores in the ten ranges; near 1/10 each, unless scores tie.
    """

    bias_removal: float
    k: int
    shares: tuple[float, ...]
    popularity: float
    score_edges: Float64
    score_shares: tuple[float, ...]
    popularity_weight: float
    queries: int
    coverage: tuple[float, ...]
    by_k: Float64

    def report_json(self) -> dict[str, Any]:
        """Return the baseline in the form of GET /v1/monitoring."""
        figures = asdict(self)
        del figures["by_k"]
        scores = {"edges": figures.pop("score_edges").tolist(), "shares": list(figures.pop("score_shares"))}
        of_buckets = {name: dict(zip(BUCKET_NAMES, figures[name], strict=True)) for name in ("shares", "coverage")}
        return figures | of_buckets | {"scores": scores}


def measure_baseline(
    scores_BK: Float32,
    rows_BK: npt.NDArray[np.integer[Any]],
    buckets_L: Int8,
    counts_L: Int64,
    bias_removal: float,
    k: int,
    popularity_weight: float = 0.0,
) -> AnswerBaseline | None:
    """Measure the baseline of answers; None if they are empty.

    Args:
        rows_BK: label rows; −1 fills short answers.
    """
    listed_BK = rows_BK >= 0
    rows_N, scores_N, rank_N = rows_BK[listed_BK], scores_BK[listed_BK].astype(np.float64), np.nonzero(listed_BK)[1]
    if not len(rows_N):
        return None
    edges = np.quantile(scores_N, np.arange(1, DECILES) / DECILES)
    exposures = np.bincount(buckets_L[rows_N], minlength=len(BUCKET_NAMES))
    sizes = np.bincount(buckets_L, minlength=len(BUCKET_NAMES))
    # A score equal to an edge counts in the upper decile.
    decile_N = np.searchsorted(edges, scores_N, side="right")
    in_decile = np.bincount(decile_N, minlength=DECILES)
    counts_KC = np.zeros((1 + rows_BK.shape[1], len(BUCKET_NAMES) + DECILES))
    for columns_N in (buckets_L[rows_N], len(BUCKET_NAMES) + decile_N):
        np.add.at(counts_KC, (1 + rank_N, columns_N), 1 / len(rows_BK))
    coverage = coverage_by_bucket(np.bincount(rows_N, minlength=len(buckets_L)), buckets_L, sizes)
    return AnswerBaseline(
        bias_removal=float(bias_removal),
        k=int(k),
        shares=tuple((exposures / len(rows_N)).tolist()),
        popularity=float(counts_L[rows_N].mean()),
        score_edges=edges,
        score_shares=tuple((in_decile / len(rows_N)).tolist()),
        popularity_weight=float(popularity_weight),
        queries=len(rows_BK),
        coverage=tuple(coverage),
        by_k=counts_KC.cumsum(axis=0),
    )


@dataclass(frozen=True, slots=True)
class CalibrationCandidates:
    """Labels answered to calibration queries at any λ; scores are linear in λ.

    Attributes:
        rows_BP: label rows.
        scores_BP: scores at the smallest λ, float32; −inf where there is no label.
        slopes_BP: what the score gains per unit of λ, float32.
    """

    minimum: float
    maximum: float
    rows_BP: Int64
    scores_BP: Float32
    slopes_BP: Float32

    def rank(self, bias_removal: float, k: int) -> tuple[Float32, Int64]:
        """Rank the best labels at one λ: scores and rows, [B, K]."""
        scores_BP = self.scores_BP + np.float32(bias_removal - self.minimum) * self.slopes_BP
        best_BK = np.argpartition(-scores_BP, min(k, scores_BP.shape[1]) - 1, axis=1)[:, :k]
        scores_BK = np.take_along_axis(scores_BP, best_BK, axis=1)
        order_BK = np.argsort(-scores_BK, axis=1)
        best_BK = np.take_along_axis(best_BK, order_BK, axis=1)
        return np.take_along_axis(scores_BK, order_BK, axis=1), np.take_along_axis(self.rows_BP, best_BK, axis=1)


class Promises:
    """What a release promises at every λ, other dials at their defaults. Thread-safe.

    Args:
        default: baseline at the default λ.
        candidates: candidate labels of the same queries; None: there is no promise at another λ.
        buckets_L, counts_L: bucket and training pairs of every label; for candidates alone.
        is_complete: whether nearly all labels were available when this was measured, as in the evaluation.
    """

    def __init__(
        self,
        default: AnswerBaseline,
        candidates: CalibrationCandidates | None = None,
        buckets_L: Int8 | None = None,
        counts_L: Int64 | None = None,
        *,
        is_complete: bool = True,
    ) -> None:
        self.default, self.is_complete = default, is_complete

        # Clients choose λ, so the number of cached promises needs a bound.
        @lru_cache(1024)
        def measure(step: int) -> AnswerBaseline | None:
            if step == round(_STEPS_PER_UNIT * default.bias_removal):
                return default
            if candidates is None or buckets_L is None or counts_L is None:
                return None
            bias_removal = step / _STEPS_PER_UNIT
            if not candidates.minimum - _TOLERANCE <= bias_removal <= candidates.maximum + _TOLERANCE:
                return None
            scores_BK, rows_BK = candidates.rank(bias_removal, default.k)
            return measure_baseline(scores_BK, rows_BK, buckets_L, counts_L, bias_removal, default.k)

        self._measure = measure

    def get(self, bias_removal: float) -> AnswerBaseline | None:
        """Return the promise at the nearest hundredth of λ."""
        return self._measure(round(_STEPS_PER_UNIT * bias_removal))


class OfflineRecall(NamedTuple):
    """Recall on held-out queries, with a 95 % interval if known."""

    value: float
    low: float | None
    high: float | None


RecallByKind = Mapping[str, OfflineRecall]
"""Recall by bucket, and `all`."""


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Offline figures of one release.

    Attributes:
        curve: λ, ascending, and the recall at it by k, at the default μ, ω and β; empty if the model was not evaluated.
        exposures: λ, k and the shares of the buckets at them, for every k that was measured.
        data_until: time when the training data was read, in seconds since 1970; None: unknown.
    """

    curve: Sequence[tuple[float, Mapping[int, RecallByKind]]] = ()
    exposures: Sequence[tuple[float, int, tuple[float, ...]]] = ()
    data_until: float | None = None

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """Read the offline figures from a bundle's manifest."""
        together = 0.0 if manifest.cooccurrence is None else manifest.cooccurrence.default
        defaults = np.array([manifest.popularity.default, together])
        bonus = {bucket: beta.default for bucket, beta in manifest.bonus.items() if beta.default}
        curve: list[tuple[float, Mapping[int, RecallByKind]]] = []
        exposures: list[tuple[float, int, tuple[float, ...]]] = []
        for point in manifest.bias_removal.curve:
            if np.abs(defaults - (point.popularity, point.cooccurrence)).max() > _TOLERANCE or point.bonus != bonus:
                continue
            recall: dict[int, dict[str, OfflineRecall]] = {}
            for name, figure in point.metrics.items():
                if match := _RECALL.fullmatch(name):
                    of_k = recall.setdefault(int(match[1]), {})
                    of_k[match[2] or ALL] = OfflineRecall(figure.value, figure.low, figure.high)
            curve.append((point.bias_removal, recall))
            for name in point.metrics:
                if match := _EXPOSURE.fullmatch(name):
                    k = int(match[1])
                    exposures.append(
                        (point.bias_removal, k, tuple(_exposure(point, k, bucket) for bucket in BUCKET_NAMES))
                    )
        return cls(sorted(curve, key=lambda point: point[0]), exposures, manifest.data_until.timestamp())

    def compare_exposures(self, promises: Promises) -> list[dict[str, Any]]:
        """Compare promised exposures with the evaluation, at the largest common k."""
        cutoffs = {k for _, k, _ in self.exposures if k <= promises.default.k}
        compared = []
        for bias_removal, k, shares in self.exposures:
            promise = promises.get(bias_removal)
            if promise is None or k != max(cutoffs, default=0):
                continue
            labels = promise.by_k[k][: len(BUCKET_NAMES)]
            of_now = dict(zip(BUCKET_NAMES, (labels / labels.sum()).tolist(), strict=True))
            of_then = dict(zip(BUCKET_NAMES, shares, strict=True))
            compared.append({"bias_removal": bias_removal, "k": k, "shares": of_then, "now": of_now})
        return compared

    def interpolate_recall(self, bias_removal: float, k: int) -> RecallByKind:
        """Interpolate recall at λ, for the largest measured k up to `k`.

        Recall grows with k, so that a smaller k is a lower bound. Empty beyond the measured λ and below the smallest k.
        """
        above = next((i for i, (at, _) in enumerate(self.curve) if at >= bias_removal - _TOLERANCE), None)
        if above is None or (above == 0 and self.curve[0][0] > bias_removal + _TOLERANCE):
            return {}
        (low, recall_low), (high, recall_high) = self.curve[max(above - 1, 0)], self.curve[above]
        weight = 1.0 if high - low < _TOLERANCE else min((bias_removal - low) / (high - low), 1.0)
        cutoff = max((cutoff for cutoff in recall_high if cutoff <= k and cutoff in recall_low), default=None)
        if cutoff is None:
            return {}
        before, after = recall_low[cutoff], recall_high[cutoff]
        return {kind: _interpolate(before[kind], after[kind], weight) for kind in after if kind in before}


def _exposure(point: CurvePoint, k: int, bucket: str) -> float:
    figures = point.metrics.get(f"exposure@{k}/{bucket}")
    return 0.0 if figures is None else figures.value


def _interpolate(before: OfflineRecall, after: OfflineRecall, weight: float) -> OfflineRecall:
    value, low, high = (
        None if start is None or end is None else (1 - weight) * start + weight * end
        for start, end in zip(before, after, strict=True)
    )
    return OfflineRecall(value or 0.0, low, high)
