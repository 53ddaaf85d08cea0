"""The report of all workers, as GET /v1/monitoring shows it: windows, the series by minute, and releases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail.serving.monitoring.baseline import load_baseline
from longtail.serving.monitoring.feedback_store import FeedbackStore, RecallRow
from longtail.serving.monitoring.release_figures import (
    TRAFFIC,
    WINDOWS,
    ReleaseFigures,
    TimeWindow,
    answers_by_minute,
)
from longtail.serving.monitoring.release_history import ReleaseInterval
from longtail.serving.monitoring.ring import by_period, worker_arrays
from longtail.serving.monitoring.series import Series, iso
from longtail.serving.monitoring.windows import window_json


def make_report(
    figures: ReleaseFigures,
    intervals: Sequence[ReleaseInterval],
    store: FeedbackStore,
    *,
    now: float,
) -> dict[str, Any]:
    """Everything but the counts of added and hidden labels, in the shape of the answer.

    Args:
        figures: figures of the release in service.
        intervals: the history of releases, oldest first; the last is the one in service, but for a replica that has not
            gone over to it yet.
        store: store of feedback.
        now: seconds since 1970.
    """
    release = figures.release
    since = next((interval.since for interval in reversed(intervals) if interval.name == release), now)
    recall = store.recall(now)
    return {
        "release": release,
        "since": iso(since),
        "now": iso(now),
        "baseline": None if figures.baseline is None else figures.baseline.report_json(),
        "windows": {
            window.name: window_json(
                figures, window, _recall_in(window, release, recall, since=since, now=now), since=since, now=now
            )
            for window in WINDOWS
        },
        "series": _series(figures.directory.parent, recall, now),
        "releases": [
            {
                "name": interval.name,
                "from": iso(interval.since),
                "until": None if interval.until is None else iso(interval.until),
            }
            for interval in intervals
        ],
    }


def _recall_in(
    window: TimeWindow, release: str, rows: Sequence[RecallRow], *, since: float, now: float
) -> dict[tuple[str, int], tuple[int, int]]:
    oldest = max(int(now // 60) - window.minutes + 1, int(since // 60))
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for row in rows:
        if row.release == release and row.minute >= oldest:
            positives, hits = counts.get((row.source, row.bucket), (0, 0))
            counts[row.source, row.bucket] = positives + row.positives, hits + row.hits
    return counts


def _series(root: Path, recall: Sequence[RecallRow], now: float) -> dict[str, Any]:
    series = Series(now)
    for directory in sorted(root.iterdir()):
        series.add(
            directory.name,
            load_baseline(directory),
            answers_by_minute(directory, now),
            by_period(worker_arrays(directory, TRAFFIC), TRAFFIC, now),
        )
    series.add_recall(recall)
    return series.report_json()
