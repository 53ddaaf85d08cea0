"""Create the series of /metrics, which METRICS.md lists.

All series exist, at 0, from the first scrape.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.bundle.forecast import ForecastSettings
from longtail.serving.monitoring.baseline import DECILES
from longtail.serving.monitoring.counters import (
    BATCH_QUERIES,
    DIAL_BOUNDS,
    KINDS,
    REFUSALS,
    ROUTE_CELLS,
    SECONDS,
    STAGES,
    STATUS_CLASSES,
)
from longtail.serving.monitoring.records import BASES, ID_KINDS, SOURCES
from longtail.serving.monitoring.report import WINDOWS
from longtail.serving.monitoring.verdict import SIGNALS

_Labels = Mapping[str, Sequence[str]]
_Rows = Mapping[tuple[str, ...], Array]
_BY_BUCKET: _Labels = {"bucket": BUCKET_NAMES}
_BY_SOURCE: _Labels = {"source": SOURCES, "bucket": BUCKET_NAMES}
_COUNTERS: Mapping[str, tuple[str, _Labels]] = {
    "previews": ("Previews answered, by class of status; they are in no other series.", {"status": STATUS_CLASSES}),
    "queries": ("Queries answered; a request may hold many.", {}),
    "bases": ("Queries of /v1/retrieve, by what their answers stand on.", {"basis": BASES}),
    "exposures": (
        "Labels answered, by frequency bucket; restricted: by the client's filters.",
        {"restricted": ("no", "yes"), **_BY_BUCKET},
    ),
    "scores": (
        "Labels of judged answers, by the promised deciles of scores.",
        {"decile": [str(decile) for decile in range(1, DECILES + 1)]},
    ),
    "explored": ("Labels drawn at random for requests that explore, by frequency bucket.", _BY_BUCKET),
    "floored_queries": (
        "Queries with floors (at_least), by whether the answer meets them all.", {"met": ("yes", "no")}
    ),
    "feedback_events": ("Feedback events that were kept, by source.", {"source": SOURCES}),
    "positives": ("Labels chosen that the release knows, by frequency bucket.", _BY_SOURCE),
    "hits": ("Labels chosen that the answer held, by frequency bucket.", _BY_SOURCE),
    "answer_ids_refused": ("Answer ids in feedback that were refused.", {"reason": REFUSALS}),
    "events_dropped": ("Events of answers and label changes that were not stored.", {}),
    "ids": ("Ids in requests that the release should know, by where they stood.", {"list": ID_KINDS}),
    "ids_unknown": (
        "Ids in requests that the release does not know, by where they stood.",
        {"list": (*ID_KINDS, "exclude", "allow")},
    ),
    "release_swaps": ("Releases taken into service.", {}),
    "release_load_failures": ("Attempts to load a release that failed; the one before stayed in service.", {}),
    "shed": ("Requests refused because the queue was full (429).", {}),
    "timeouts": ("Requests given up because no answer was there in time.", {}),
    "engine_unanswered": ("Queries refused because the server that holds the index did not answer.", {}),
}  # fmt: skip
_HISTOGRAMS: Mapping[str, tuple[str, _Labels, tuple[float, ...]]] = {
    "stage_seconds": (
        "Parts of a retrieval: wait in the queue (of every request), then encode the queries, search the index and "
        "make the answers (of every batch).",
        {"stage": STAGES}, SECONDS,
    ),
    "batch_queries": ("Queries that shared a search.", {}, BATCH_QUERIES),
    "query_bias_removal": ("λ of the queries.", {}, DIAL_BOUNDS),
    "query_popularity": ("μ of the queries.", {}, DIAL_BOUNDS),
    "query_cooccurrence": ("ω of the queries.", {}, DIAL_BOUNDS),
    "choice_bias_removal": (
        "λ of answers that labels were chosen from, by whether they held them.", {"hit": ("yes", "no")}, DIAL_BOUNDS
    ),
}  # fmt: skip
_SEVERITIES = {"unknown": math.nan, "watch": 1.0, "act": 2.0}
_OF_WINDOW = {
    "exposure_psi": ("Population stability index of exposures by bucket against the baseline.", ("psi", "buckets")),
    "score_psi": ("Population stability index of scores by decile against the baseline.", ("psi", "scores")),
    "bias_removal_mean": ("Mean λ of the queries.", ("bias_removal",)),
    "popularity_weight_mean": ("Mean μ of the queries.", ("popularity_weight",)),
    "cooccurrence_mean": ("Mean ω of the queries.", ("cooccurrence",)),
    "popularity": ("Mean training pairs of the answered labels.", ("popularity",)),
}
_Sample = tuple[tuple[str, ...], float]


def collect_counters(
    counts: np.void,
    totals: np.void,
    labelled: _Rows,
    routes: Sequence[str],
    groups: Mapping[str, Sequence[str]],
) -> Iterator[Metric]:
    """Yield counters and histograms.

    Args:
        counts, totals, labelled: see `Counters.read_totals`.
        groups: features and the values by which their queries are counted.
    """
    values = {name: row[name] for row in (counts, totals) for name in row.dtype.names or ()}
    restricted, (floored, unmet) = values["restricted_exposures"], values["floored"]
    values |= {
        "exposures": np.stack([values["exposures"] - restricted, restricted]),
        "scores": values["judged_scores"],
        "floored_queries": [floored - unmet, unmet],
        "events_dropped": values["dropped"],
        "ids_unknown": [*values["ids"][:, 2], *values["unknown_ids"]],
        "ids": values["ids"][:, 1],
        **dict(
            zip(("query_bias_removal", "query_popularity", "query_cooccurrence"), values["query_dials"], strict=True)
        ),
    }
    for name, (text, labels) in _COUNTERS.items():
        yield _counter(name, text, [*labels], zip(product(*labels.values()), np.ravel(values[name]), strict=True))
    for name, (text, labels, bounds) in _HISTOGRAMS.items():
        histograms = np.reshape(values[name], (-1, len(bounds) + 2))
        yield _histogram(name, text, [*labels], bounds, zip(product(*labels.values()), histograms, strict=True))
    # Zeros from the first scrape on, because Prometheus misses the first increase of a new series.
    absent = np.zeros(ROUTE_CELLS)
    by_route: _Rows = {(route,): labelled.get(("route", route), absent) for route in routes}
    by_group: _Rows = {
        (group, value): labelled.get(("group", group, value), absent)
        for group, group_values in groups.items()
        for value in group_values
    }
    by_arm: _Rows = {labels[1:]: row for labels, row in labelled.items() if labels[0] == "arm"}
    classes = len(STATUS_CLASSES)
    yield _counter(
        "requests", "Requests answered, by route and class of status.", ["route", "status"],
        _spread(by_route, slice(classes), STATUS_CLASSES),
    )  # fmt: skip
    yield _histogram(
        "request_seconds", "From a request's head read to its answer sent, by route.", ["route"], SECONDS,
        [(labels, row[classes:]) for labels, row in by_route.items()],
    )  # fmt: skip
    for name, text, label_names, rows in (
        ("group_queries", "Queries answered, by LONGTAIL_GROUPS.", ["group", "value"], by_group),
        ("arm_answers", "Answers that arms of an experiment are compared by.", ["run", "arm"], by_arm),
    ):
        yield _counter(name, text, label_names, [(labels, row[0]) for labels, row in rows.items()])
    for name, text, label_names, rows, columns in (
        (
            "group_exposures", "Labels answered, by LONGTAIL_GROUPS and frequency bucket.", ["group", "value"],
            by_group, slice(1, 5),
        ),
        (
            "arm_exposures", "Labels in these answers, by frequency bucket.", ["run", "arm"], by_arm, slice(1, 5)
        ),
        (
            "arm_choices", "Labels chosen from these answers, by frequency bucket.", ["run", "arm"], by_arm, slice(5, 9)
        ),
    ):  # fmt: skip
        yield _counter(name, text, [*label_names, "bucket"], _spread(rows, columns, BUCKET_NAMES))


def _spread(rows: _Rows, columns: slice, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, row in rows.items():
        yield from (((*labels, name), float(count)) for name, count in zip(names, row[columns], strict=True))


def _counter(
    name: str, text: str, label_names: Sequence[str], samples: Iterable[tuple[tuple[str, ...], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"longtail_{name}", text, labels=label_names)
    for labels, count in samples:
        family.add_metric(labels, float(count))
    return family


def _histogram(
    name: str,
    text: str,
    label_names: Sequence[str],
    bounds: Sequence[float],
    samples: Iterable[tuple[tuple[str, ...], Array]],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"longtail_{name}", text, labels=label_names)
    texts = [floatToGoString(bound) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]
    for labels, cells in samples:
        cumulated = np.cumsum(cells[:-1]).tolist()
        family.add_metric(labels, list(zip(texts, cumulated, strict=True)), float(cells[-1]))
        if bounds[0] < 0:  # the family leaves out the count, as well as the sum, which may fall
            family.add_sample(f"{family.name}_count", dict(zip(label_names, labels, strict=True)), cumulated[-1])
    return family


def collect_release(
    release: str | None, forecast: ForecastSettings | None, cooccurrence_until: float | None
) -> Iterator[Metric]:
    """Yield the series of the release in service."""
    release_info = [] if release is None else [((release,), 1.0)]
    yield _gauge("release_info", "The release being served, as a label; its value is 1.", ("release",), release_info)
    age = [] if forecast is None else [((), time.time() - forecast.until)]
    yield _gauge("prior_age_seconds", "Since the last pair that the forecast knows.", (), age)
    nats = {} if forecast is None else forecast.nats
    text = "Mean log-probability of the latest pairs, by the prior before them."
    yield _gauge("prior_nats", text, ("kind",), (((kind,), value) for kind, value in nats.items()))
    age = [] if cooccurrence_until is None else [((), time.time() - cooccurrence_until)]
    text = "Since the last pair that the term of co-occurrence knows."
    yield _gauge("cooccurrence_age_seconds", text, (), age)


def _gauge(name: str, text: str, label_names: tuple[str, ...], samples: Iterable[_Sample]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"longtail_{name}", text, labels=label_names)
    for labels, figure in samples:
        family.add_metric(labels, figure)
    return family


def collect_report(report: Mapping[str, Any] | None, label_counts: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the series computed at the scrape; undefined figures are NaN.

    Args:
        report: the report of GET /v1/monitoring; None before a release is in service.
        label_counts: numbers of labels that are added, hidden and available.
    """
    windows = {window: None if report is None else report["windows"][window] for window in WINDOWS}
    by_bucket = [(bucket, window) for window in WINDOWS for bucket in BUCKET_NAMES]
    by_source = [(source, bucket, window) for window in WINDOWS for source in SOURCES for bucket in KINDS]
    yield _gauge(
        "exposure_share", "Share of the judged answers' labels in the bucket.", ("bucket", "window"),
        ((labels, _figure(windows[labels[1]], "judged", "shares", labels[0])) for labels in by_bucket),
    )  # fmt: skip
    yield _gauge(
        "exposure_baseline_share", "Share of calibration answers' labels in the bucket, at the same λ.",
        ("bucket", "window"),
        ((labels, _figure(windows[labels[1]], "judged", "promised", labels[0])) for labels in by_bucket),
    )  # fmt: skip
    covered = [(labels, _figure(windows[labels[1]], "exposures", labels[0], "coverage")) for labels in by_bucket]
    covered += [(("all", window), _figure(figures, "coverage")) for window, figures in windows.items()]
    text = "Share of ids in requests and feedback that the release does not know."
    kinds = [(kind, window) for window in WINDOWS for kind in ID_KINDS]
    yield _gauge(
        "ids_unknown_share", text, ("list", "window"),
        ((labels, _figure(windows[labels[1]], "ids", labels[0], "share")) for labels in kinds),
    )  # fmt: skip
    text = "Share of the bucket's labels that were answered at all."
    yield _gauge("coverage", text, ("bucket", "window"), covered)
    for name, text, figure in (
        ("online_recall", "Share of the labels interacted with that the answer held.", "value"),
        ("online_positives", "Labels interacted with.", "positives"),
    ):
        samples = ((labels, _figure(windows[labels[2]], "recall", *labels[:2], figure)) for labels in by_source)
        yield _gauge(name, text, ("source", "bucket", "window"), samples)
    for name, (text, path) in _OF_WINDOW.items():
        yield _gauge(
            name, text, ("window",), (((window,), _figure(figures, *path)) for window, figures in windows.items())
        )
    text = "Gini coefficient of the labels' exposures of today and yesterday (UTC)."
    yield _gauge("gini", text, (), [((), _figure(report, "gini"))])
    severities = dict.fromkeys(SIGNALS, math.nan if report is None else 0.0)
    # The worst last, so that it overwrites the others.
    for finding in reversed([] if report is None else report["verdict"]["findings"]):
        severities[finding["signal"]] = _SEVERITIES[finding["severity"]]
    text = "Worst finding of a signal: 0 none, 1 watch, 2 act; NaN: too few answers."
    yield _gauge("verdict", text, ("signal",), (((signal,), value) for signal, value in severities.items()))
    for name, text in (
        ("added", "Labels added since the release was built."),
        ("hidden", "Labels of the release that are hidden."),
        ("available", "Labels that answers may have now: not hidden, and within their lifetimes."),
    ):
        yield GaugeMetricFamily(f"longtail_labels_{name}", text, value=label_counts[name])


def _figure(figures: Any, *path: str) -> float:
    for name in path:
        if figures is None:
            return math.nan
        figures = figures[name]
    return math.nan if figures is None else float(figures)
