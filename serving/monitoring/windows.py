"""One window of the report: what the release in service answered, how fast, and its online recall.

Definitions are the trainer's [METHODS §7], over answers instead of test queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.bundle.exposure import psi
from longtail.bundle.frequency import TAIL
from longtail.serving.monitoring.baseline import Baseline
from longtail.serving.monitoring.dial_bins import dial_json
from longtail.serving.monitoring.feedback_counts import SOURCES
from longtail.serving.monitoring.latency_bins import latency_ms
from longtail.serving.monitoring.likeness import telling
from longtail.serving.monitoring.release_figures import (
    BIAS_REMOVAL,
    BUCKETS,
    ERRORS,
    EXPOSURES,
    LATENCY,
    POPULARITY,
    QUERIES,
    REQUESTS,
    SCORES,
    SHED,
    ReleaseFigures,
    TimeWindow,
)

_Z = 1.959963984540054
"""Standard normal quantile of 97.5 %."""

RecallCounts = Mapping[tuple[str, int], tuple[int, int]]
"""(source, bucket) → positives, hits."""


def window_json(
    figures: ReleaseFigures, window: TimeWindow, recall: RecallCounts, *, since: float, now: float
) -> dict[str, Any]:
    """The figures of one window, as in `windows` of GET /v1/monitoring.

    Args:
        figures: figures of the release in service.
        window: how far back.
        recall: counts of this release in the window.
        since, now: when it went into service and when this is, seconds since 1970.
    """
    answers = figures.answers_in(window, now, since=since)
    baseline = figures.baseline
    # A damaged file may hold anything.
    answers[QUERIES], answers[EXPOSURES] = max(answers[QUERIES], 0), np.maximum(answers[EXPOSURES], 0)
    exposures = answers[EXPOSURES]
    dials = figures.dials_in(window, now, since=since)
    pairs = figures.likeness_in(window, now, since=since)
    return {
        "seconds": window.seconds,
        "queries": int(answers[QUERIES]),
        "bias_removal": ratio(answers[BIAS_REMOVAL], answers[QUERIES]),
        "popularity_weight": ratio(figures.popularity_weight_in(window, now, since=since), answers[QUERIES]),
        "dials": {"bias_removal": dial_json(dials[0]), "popularity_weight": dial_json(dials[1])},
        **_catalogue(
            exposures, figures, figures.exposures_in(window, now), telling(exposures, pairs, float(answers[QUERIES]))
        ),
        "popularity": ratio(answers[POPULARITY], exposures.sum()),
        "scores": {"counts": answers[SCORES].astype(int).tolist()},
        "psi": drift_json(answers, baseline),
        "recall": {source: recall_json(source, recall) for source in SOURCES},
        "dropped": figures.dropped_in(window, now, since=since),
        "requests": _requests(figures.traffic_in(window, now, since=since), window, since=since, now=now),
    }


def drift_json(answers: Array, baseline: Baseline | None) -> dict[str, float | None]:
    """Population stability index of exposures by bucket and of scores by decile, against the baseline.

    Args:
        answers: what was answered in the window, float64 [ANSWER_COLUMNS].
        baseline: None makes both null.
    """
    if baseline is None:
        return {"buckets": None, "scores": None}
    return {
        "buckets": exposure_psi(answers, baseline),
        "scores": psi(answers[SCORES], baseline.score_shares),
    }


def exposure_psi(answers: Array, baseline: Baseline) -> float | None:
    """Population stability index of exposures of head, torso, and tail with new: the baseline knows no label that was
    added since.

    Args:
        answers: what was answered, float64 [ANSWER_COLUMNS].
        baseline: of the release.
    """
    return psi(_new_with_tail(answers[EXPOSURES]), _new_with_tail(np.array(baseline.shares)).tolist())


def _new_with_tail(by_bucket: Array) -> Array:
    """Numbers of head, torso, tail and new, [4], as those of head, torso and the other two, [3]."""
    return np.append(by_bucket[:TAIL], by_bucket[TAIL:].sum())


def recall_json(source: str, recall: RecallCounts) -> dict[str, dict[str, Any]]:
    """Per bucket and over all: positives, hits, hits / positives and its 95 % interval."""
    return {name: _proportion(*pair) for name, pair in recall_counts(source, recall).items()}


def recall_counts(source: str, recall: RecallCounts) -> dict[str, tuple[int, int]]:
    """Positives and hits per bucket and over all."""
    counts = [recall.get((source, bucket), (0, 0)) for bucket in range(BUCKETS)]
    counts.append((sum(positives for positives, _ in counts), sum(hits for _, hits in counts)))
    return dict(zip((*BUCKET_NAMES, "all"), counts, strict=True))


def wilson(hits: float, positives: float, z: float = _Z) -> tuple[float, float] | None:
    """Score interval of a proportion [Wilson 1927], 95 % unless z is another quantile; None of no positives.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n): inside [0, 1], and of use from the first few positives on.
    """
    if positives == 0:
        return None
    share = hits / positives
    square = z * z / positives
    middle = share + square / 2
    reach = z * math.sqrt(share * (1 - share) / positives + square / (4 * positives))
    return max(0.0, (middle - reach) / (1 + square)), min(1.0, (middle + reach) / (1 + square))


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator; None if the denominator is 0."""
    return float(numerator / denominator) if denominator else None


def _proportion(positives: int, hits: int) -> dict[str, Any]:
    low, high = wilson(hits, positives) or (None, None)
    return {"positives": positives, "hits": hits, "value": ratio(hits, positives), "low": low, "high": high}


def _catalogue(
    exposures: Array, figures: ReleaseFigures, exposures_S: Array, telling_: Sequence[float]
) -> dict[str, Any]:
    coverages = figures.counted.coverage_by_bucket(exposures_S)
    return {
        "exposures": {
            name: {
                "count": int(exposures[bucket]),
                "share": ratio(exposures[bucket], exposures.sum()),
                "telling": telling_[bucket],
                "coverage": coverages[bucket],
            }
            for bucket, name in enumerate(BUCKET_NAMES)
        },
        "coverage": figures.counted.coverage(exposures_S),
        "gini": figures.counted.gini(exposures_S),
    }


def _requests(traffic: Array, window: TimeWindow, *, since: float, now: float) -> dict[str, Any]:
    covered = now - max(since, (int(now // 60) - window.minutes + 1) * 60)
    return {
        "count": int(traffic[REQUESTS]),
        "per_second": float(traffic[REQUESTS] / max(covered, 1.0)),
        "p50_ms": latency_ms(traffic[LATENCY], 0.5),
        "p99_ms": latency_ms(traffic[LATENCY], 0.99),
        "shed": int(traffic[SHED]),
        "errors": int(traffic[ERRORS]),
    }
