"""The report as Prometheus gauges; METRICS.md says what each means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.dial_bins import DIAL_BINS, LOWEST, WIDTH
from longtail.serving.monitoring.feedback_counts import (
    AMBIGUOUS,
    EVENTS_OF_ANSWERS,
    EVENTS_ORGANIC,
    SOURCES,
    UNMATCHED,
)
from longtail.serving.monitoring.findings import SIGNALS
from longtail.serving.monitoring.release_figures import WINDOWS
from longtail.serving.monitoring.verdict import severities

_ALL = (*BUCKET_NAMES, "all")
_SEVERITIES = {"steady": 0.0, "unknown": math.nan, "watch": 1.0, "act": 2.0}
_BINS_SHOWN = 5
"""Of the dials' bins, together on a metric: a quarter of λ."""


def report_metrics(
    report: Mapping[str, Any] | None, totals: Mapping[str, float], labels: tuple[int, int]
) -> Iterator[Metric]:
    """Every series of this package, NaN where a figure is undefined.

    Args:
        report: as GET /v1/monitoring; None before a release is in service.
        totals: `FeedbackStore.totals`.
        labels: how many are added and hidden.
    """
    yield from _exposure(report)
    yield from _recall(report)
    yield from _dials(report)
    yield _verdict(report)
    events = CounterMetricFamily("longtail_feedback_events", "Feedback events taken, by kind.", labels=["kind"])
    events.add_metric(["answer"], totals[EVENTS_OF_ANSWERS])
    events.add_metric(["organic"], totals[EVENTS_ORGANIC])
    yield events
    yield CounterMetricFamily(
        "longtail_feedback_unmatched", "Answers named by feedback that nothing is known of.", value=totals[UNMATCHED]
    )
    yield CounterMetricFamily(
        "longtail_feedback_ambiguous",
        "Request ids named by feedback under which different answers were given.",
        value=totals[AMBIGUOUS],
    )
    yield GaugeMetricFamily("longtail_labels_added", "Labels added since the release was built.", value=labels[0])
    yield GaugeMetricFamily("longtail_labels_hidden", "Labels of the release that are hidden.", value=labels[1])


def _exposure(report: Mapping[str, Any] | None) -> Iterator[Metric]:
    share = GaugeMetricFamily(
        "longtail_exposure_share", "Share of the answered labels that are in the bucket.", labels=["bucket", "window"]
    )
    baseline = GaugeMetricFamily(
        "longtail_exposure_baseline_share", "The same share of calibration queries.", labels=["bucket"]
    )
    coverage = GaugeMetricFamily(
        "longtail_coverage", "Share of the bucket's labels that were answered at all.", labels=["bucket", "window"]
    )
    by_window = {
        name: GaugeMetricFamily(f"longtail_{name}", text, labels=["window"])
        for name, text in {
            "exposure_psi": "Population stability index of exposures by bucket against the baseline.",
            "score_psi": "The same of scores by decile.",
            "gini": "Gini coefficient of the labels' exposures.",
            "popularity": "Mean training pairs of the answered labels.",
            "bias_removal_mean": "Mean λ of the queries.",
            "popularity_weight_mean": "Mean μ of the queries.",
        }.items()
    }
    for bucket in BUCKET_NAMES:
        baseline.add_metric([bucket], _at(report, "baseline", "shares", bucket))
    for window in (window.name for window in WINDOWS):
        figures = None if report is None else report["windows"][window]
        for bucket in BUCKET_NAMES:
            share.add_metric([bucket, window], _at(figures, "exposures", bucket, "share"))
            coverage.add_metric([bucket, window], _at(figures, "exposures", bucket, "coverage"))
        coverage.add_metric(["all", window], _at(figures, "coverage"))
        by_window["exposure_psi"].add_metric([window], _at(figures, "psi", "buckets"))
        by_window["score_psi"].add_metric([window], _at(figures, "psi", "scores"))
        by_window["gini"].add_metric([window], _at(figures, "gini"))
        by_window["popularity"].add_metric([window], _at(figures, "popularity"))
        by_window["bias_removal_mean"].add_metric([window], _at(figures, "bias_removal"))
        by_window["popularity_weight_mean"].add_metric([window], _at(figures, "popularity_weight"))
    yield from (share, baseline, coverage, *by_window.values())


def _recall(report: Mapping[str, Any] | None) -> Iterator[Metric]:
    names = ["source", "bucket", "window"]
    recall = GaugeMetricFamily(
        "longtail_online_recall", "Share of the labels interacted with that the answer held.", labels=names
    )
    positives = GaugeMetricFamily(
        "longtail_online_positives", "Labels interacted with, of which online recall is the share found.", labels=names
    )
    for window in (window.name for window in WINDOWS):
        figures = None if report is None else report["windows"][window]["recall"]
        for source in SOURCES:
            for bucket in _ALL:
                recall.add_metric([source, bucket, window], _at(figures, source, bucket, "value"))
                positives.add_metric([source, bucket, window], _at(figures, source, bucket, "positives"))
    yield from (recall, positives)


def _dials(report: Mapping[str, Any] | None) -> Iterator[Metric]:
    for dial, name, symbol in (("bias_removal", "bias_removal", "λ"), ("popularity_weight", "popularity_weight", "μ")):
        family = GaugeMetricFamily(
            f"longtail_{name}_share",
            f"Share of the queries that asked for this {symbol}, to the next quarter.",
            labels=["at", "window"],
        )
        for window in (window.name for window in WINDOWS):
            figures = None if report is None else report["windows"][window]["dials"][dial]
            total = sum(one["queries"] for one in figures or ())
            near = [0.0] * (DIAL_BINS // _BINS_SHOWN + 1)
            for one in figures or ():
                near[round((one["at"] - LOWEST) / (WIDTH * _BINS_SHOWN))] += one["queries"] / total
            for place, share in enumerate(near):
                at = f"{LOWEST + WIDTH * _BINS_SHOWN * place:g}"
                family.add_metric([at, window], share if total else math.nan)
        yield family


def _verdict(report: Mapping[str, Any] | None) -> Metric:
    family = GaugeMetricFamily(
        "longtail_verdict", "What the verdict says of a signal: 0 steady, 1 watch, 2 act.", labels=["signal"]
    )
    found = {} if report is None else severities(report["verdict"])
    for signal in SIGNALS:
        # What is broken is judged always, so where there is no finding, nothing is.
        well = signal in ("label_log", "refused_release", "engine", "experiments") and report is not None
        family.add_metric([signal], _SEVERITIES[found[signal]] if signal in found else 0.0 if well else math.nan)
    return family


def _at(figures: Any, *path: str) -> float:
    """The number at the end of the path; NaN if it, or anything before it, is None."""
    for name in path:
        if figures is None:
            return math.nan
        figures = figures[name]
    return math.nan if figures is None else float(figures)
