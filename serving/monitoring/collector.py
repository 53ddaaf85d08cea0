"""The report as Prometheus gauges; METRICS.md says what each means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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
_Sample = tuple[tuple[str, ...], float]


def report_metrics(
    report: Mapping[str, Any] | None, totals: Mapping[str, float], labels: tuple[int, int]
) -> Iterator[Metric]:
    """Yield every series that is computed at the scrape, NaN where a figure is undefined.

    Args:
        report: as GET /v1/monitoring; None before a release is in service.
        totals: `FeedbackStore.totals`.
        labels: how many are added and hidden.
    """

    def gauge(name: str, text: str, names: tuple[str, ...], samples: Iterable[_Sample]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"longtail_{name}", text, labels=names)
        for values, figure in samples:
            family.add_metric(values, figure)
        return family

    windows = {window: None if report is None else report["windows"][window] for window in WINDOWS}
    by_bucket = [(bucket, window) for window in WINDOWS for bucket in BUCKET_NAMES]
    by_source = [(source, bucket, window) for window in WINDOWS for source in SOURCES for bucket in _ALL]
    yield gauge(
        "exposure_share", "Share of the unrestricted answers' labels in the bucket.", ("bucket", "window"),
        ((of, _at(windows[of[1]], "unrestricted", "shares", of[0])) for of in by_bucket),
    )  # fmt: skip
    yield gauge(
        "exposure_baseline_share", "The same share of calibration queries.", ("bucket",),
        (((bucket,), _at(report, "baseline", "shares", bucket)) for bucket in BUCKET_NAMES),
    )  # fmt: skip
    covered = [(of, _at(windows[of[1]], "exposures", of[0], "coverage")) for of in by_bucket]
    covered += [(("all", window), _at(figures, "coverage")) for window, figures in windows.items()]
    text = "Share of the bucket's labels that were answered at all."
    yield gauge("coverage", text, ("bucket", "window"), covered)
    for name, text, figure in (
        ("online_recall", "Share of the labels interacted with that the answer held.", "value"),
        ("online_positives", "Labels interacted with.", "positives"),
    ):
        samples = ((of, _at(windows[of[2]], "recall", *of[:2], figure)) for of in by_source)
        yield gauge(name, text, ("source", "bucket", "window"), samples)
    for name, (text, path) in _OF_WINDOW.items():
        yield gauge(name, text, ("window",), (((window,), _at(of, *path)) for window, of in windows.items()))
    text = "Gini coefficient of the labels' exposures of today and yesterday (UTC)."
    yield gauge("gini", text, (), [((), _at(report, "gini"))])
    found = dict.fromkeys(SIGNALS, math.nan if report is None else 0.0)
    for finding in reversed([] if report is None else report["verdict"]["findings"]):  # the worst last
        found[finding["signal"]] = _SEVERITIES[finding["severity"]]
    text = "Worst finding of a signal: 0 none, 1 watch, 2 act; NaN: too few answers."
    yield gauge("verdict", text, ("signal",), (((signal,), value) for signal, value in found.items()))
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
