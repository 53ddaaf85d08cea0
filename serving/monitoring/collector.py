"""The report as Prometheus gauges; METRICS.md says what each means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.feedback_counts import (
    AMBIGUOUS,
    EVENTS_OF_ANSWERS,
    EVENTS_ORGANIC,
    SOURCES,
    UNMATCHED,
)
from longtail.serving.monitoring.report import WINDOWS
from longtail.serving.monitoring.verdict import SIGNALS

_ALL = (*BUCKET_NAMES, "all")
_SEVERITIES = {"unknown": math.nan, "watch": 1.0, "act": 2.0}
_OF_WINDOW = {
    "exposure_psi": ("Population stability index of exposures by bucket against the baseline.", ("psi", "buckets")),
    "score_psi": ("The same of scores by decile.", ("psi", "scores")),
    "bias_removal_mean": ("Mean λ of the queries.", ("bias_removal",)),
    "popularity_weight_mean": ("Mean μ of the queries.", ("popularity_weight",)),
    "popularity": ("Mean training pairs of the answered labels.", ("popularity",)),
}


def report_metrics(
    report: Mapping[str, Any] | None, totals: Mapping[str, float], labels: tuple[int, int]
) -> Iterator[Metric]:
    """Yield every series that is computed at the scrape, NaN where a figure is undefined.

    Args:
        report: as GET /v1/monitoring; None before a release is in service.
        totals: `FeedbackStore.totals`.
        labels: how many are added and hidden.
    """

    def gauge(name: str, text: str, *names: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"longtail_{name}", text, labels=names)

    share = gauge("exposure_share", "Share of the unrestricted answers' labels in the bucket.", "bucket", "window")
    baseline = gauge("exposure_baseline_share", "The same share of calibration queries.", "bucket")
    coverage = gauge("coverage", "Share of the bucket's labels that were answered at all.", "bucket", "window")
    recall = gauge(
        "online_recall", "Share of the labels interacted with that the answer held.", "source", "bucket", "window"
    )
    positives = gauge("online_positives", "Labels interacted with.", "source", "bucket", "window")
    by_window = {name: gauge(name, text, "window") for name, (text, _) in _OF_WINDOW.items()}
    for window in WINDOWS:
        figures = None if report is None else report["windows"][window]
        for bucket in BUCKET_NAMES:
            share.add_metric([bucket, window], _at(figures, "unrestricted", "shares", bucket))
            coverage.add_metric([bucket, window], _at(figures, "exposures", bucket, "coverage"))
        coverage.add_metric(["all", window], _at(figures, "coverage"))
        for name, (_, path) in _OF_WINDOW.items():
            by_window[name].add_metric([window], _at(figures, *path))
        for source in SOURCES:
            for bucket in _ALL:
                recall.add_metric([source, bucket, window], _at(figures, "recall", source, bucket, "value"))
                positives.add_metric([source, bucket, window], _at(figures, "recall", source, bucket, "positives"))
    for bucket in BUCKET_NAMES:
        baseline.add_metric([bucket], _at(report, "baseline", "shares", bucket))
    yield from (share, baseline, coverage, recall, positives, *by_window.values())
    gini = gauge("gini", "Gini coefficient of the labels' exposures of today and yesterday (UTC).")
    gini.add_metric([], _at(report, "gini"))
    yield gini
    verdict = gauge("verdict", "Worst finding of a signal: 0 none, 1 watch, 2 act; NaN: too few answers.", "signal")
    found: dict[str, str] = {}
    for finding in () if report is None else report["verdict"]["findings"]:
        found.setdefault(finding["signal"], finding["severity"])
    for signal in SIGNALS:
        verdict.add_metric([signal], math.nan if report is None else _SEVERITIES.get(found.get(signal, ""), 0.0))
    yield verdict
    events = CounterMetricFamily("longtail_feedback_events", "Feedback events taken, by kind.", labels=["kind"])
    events.add_metric(["answer"], totals[EVENTS_OF_ANSWERS])
    events.add_metric(["organic"], totals[EVENTS_ORGANIC])
    yield events
    for name, text, total in (
        ("unmatched", "Answers named by feedback that nothing is known of.", UNMATCHED),
        ("ambiguous", "Request ids named by feedback under which different answers were given.", AMBIGUOUS),
    ):
        yield CounterMetricFamily(f"longtail_feedback_{name}", text, value=totals[total])
    yield GaugeMetricFamily("longtail_labels_added", "Labels added since the release was built.", value=labels[0])
    yield GaugeMetricFamily("longtail_labels_hidden", "Labels of the release that are hidden.", value=labels[1])


def _at(figures: Any, *path: str) -> float:
    """Return the number at the end of the path; NaN if it, or anything before it, is None."""
    for name in path:
        if figures is None:
            return math.nan
        figures = figures[name]
    return math.nan if figures is None else float(figures)
