"""The last 24 hours by minute, over all releases that served in them.

Legend: `M` minutes with traffic, `R` releases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.serving.monitoring.baseline import Baseline
from longtail.serving.monitoring.feedback_counts import SOURCES
from longtail.serving.monitoring.feedback_store import RecallRow
from longtail.serving.monitoring.latency_bins import latency_ms
from longtail.serving.monitoring.release_figures import (
    ANSWER_COLUMNS,
    ANSWERS,
    BIAS_REMOVAL,
    EXPOSURES,
    LATENCY,
    MINUTES,
    QUERIES,
    REQUESTS,
    SHED,
    TRAFFIC,
)
from longtail.serving.monitoring.windows import exposure_psi, ratio, recall_counts


def iso(at: float) -> str:
    """Seconds since 1970 in ISO 8601, UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Series:
    """The figures of each of the last 1,440 minutes, added up over releases.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self._newest = ANSWERS.period(now)
        self._answers = np.zeros((MINUTES, ANSWER_COLUMNS))
        self._traffic = np.zeros((MINUTES, TRAFFIC.columns))
        self._most = np.zeros(MINUTES)
        self._names: list[str | None] = [None] * MINUTES
        self._psi: list[float | None] = [None] * MINUTES
        self._recall: Mapping[int, dict[tuple[str, int], tuple[int, int]]] = defaultdict(dict)

    def add(self, release: str, baseline: Baseline | None, answers: Array, traffic: Array) -> None:
        """Add a release. A minute goes by the name, and against the baseline, of the release with most traffic in it.

        Args:
            release: name of the release.
            baseline: baseline of the release; None if it has none.
            answers: of `answers_by_minute`, float64 [MINUTES, ANSWER_COLUMNS].
            traffic: columns of TRAFFIC by minute, float64 [MINUTES, columns].
        """
        self._answers += answers
        self._traffic += traffic
        volume = answers[:, QUERIES] + traffic[:, REQUESTS] + traffic[:, SHED]
        for minute in np.flatnonzero((volume > 0) & (volume >= self._most)).tolist():
            self._names[minute] = release
            self._psi[minute] = None if baseline is None else exposure_psi(answers[minute], baseline)
        self._most = np.maximum(self._most, volume)

    def add_recall(self, rows: Iterable[RecallRow]) -> None:
        """Add the counts of feedback and shadow, of any release."""
        for row in rows:
            minute = MINUTES - 1 - (self._newest - row.minute)
            if 0 <= minute < MINUTES:
                of_minute = self._recall[minute]
                positives, hits = of_minute.get((row.source, row.bucket), (0, 0))
                of_minute[row.source, row.bucket] = positives + row.positives, hits + row.hits
                self._names[minute] = self._names[minute] or row.release

    def report_json(self) -> dict[str, Any]:
        """`series` of GET /v1/monitoring: minutes with traffic only, oldest first, the last one under way."""
        minutes = [minute for minute in range(MINUTES) if self._names[minute] is not None]
        answers_M, traffic_M = self._answers[minutes], self._traffic[minutes]
        exposures_M = answers_M[:, EXPOSURES].sum(axis=1)
        counts = {
            source: [recall_counts(source, self._recall.get(minute, {})) for minute in minutes] for source in SOURCES
        }
        seconds_M = [60.0 if minute < MINUTES - 1 else max(self._now - self._newest * 60, 1.0) for minute in minutes]
        return {
            "step_seconds": 60,
            "at": [iso((self._newest - MINUTES + 1 + minute) * 60) for minute in minutes],
            "queries": answers_M[:, QUERIES].astype(int).tolist(),
            "share": {
                name: list(map(ratio, answers_M[:, EXPOSURES][:, bucket].tolist(), exposures_M.tolist()))
                for bucket, name in enumerate(BUCKET_NAMES)
            },
            "psi": [self._psi[minute] for minute in minutes],
            "recall": {
                source: {
                    name: [ratio(hits, positives) for positives, hits in (of[name] for of in by_minute)]
                    for name in (*BUCKET_NAMES, "all")
                }
                for source, by_minute in counts.items()
            },
            "bias_removal": list(map(ratio, answers_M[:, BIAS_REMOVAL].tolist(), answers_M[:, QUERIES].tolist())),
            "requests_per_second": list(map(ratio, traffic_M[:, REQUESTS].tolist(), seconds_M)),
            "p50_ms": [latency_ms(bins, 0.5) for bins in traffic_M[:, LATENCY]],
            "p99_ms": [latency_ms(bins, 0.99) for bins in traffic_M[:, LATENCY]],
            "shed": traffic_M[:, SHED].astype(int).tolist(),
            "release": [self._names[minute] for minute in minutes],
        }
