"""Create the report of GET /v1/monitoring, also as Prometheus gauges: three windows, and the day by minute.

The metrics are the trainer's [METHODS §7], over answers instead of test queries. Legend: `M` minutes with traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.core import GaugeMetricFamily, Metric

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.bundle.exposure import psi
from longtail.bundle.frequency import TAIL
from longtail.serving.monitoring.baseline import Baseline
from longtail.serving.monitoring.intervals import binomial_interval
from longtail.serving.monitoring.records import ID_KINDS, RESTRICTIONS, SOURCES
from longtail.serving.monitoring.ring import DIALS, KINDS, MINUTES, ShownLabels, by_minute, dial_json, latency_ms, total
from longtail.serving.monitoring.verdict import SIGNALS

WINDOWS = {"5m": 5, "1h": 60, "24h": MINUTES}
"""Lengths of the windows in minutes."""
_SEVERITIES = {"unknown": math.nan, "watch": 1.0, "act": 2.0}
_OF_WINDOW = {
    "exposure_psi": ("Population stability index of exposures by bucket against the baseline.", ("psi", "buckets")),
    "score_psi": ("The same of scores by decile.", ("psi", "scores")),
    "bias_removal_mean": ("Mean λ of the queries.", ("bias_removal",)),
    "popularity_weight_mean": ("Mean μ of the queries.", ("popularity_weight",)),
    "cooccurrence_mean": ("Mean ω of the queries.", ("cooccurrence",)),
    "popularity": ("Mean training pairs of the answered labels.", ("popularity",)),
}
_Sample = tuple[tuple[str, ...], float]


def make_report(
    release: str,
    baseline: Baseline | None,
    shown: ShownLabels,
    rows: npt.NDArray[np.void],
    now: float,
) -> dict[str, Any]:
    """Create the report without the verdict and the numbers of labels.

    Args:
        shown: counts of the release's shown labels.
        rows: rows of all workers over the last day, from `MinuteRing.read`.
        now: seconds since 1970.
    """
    own = rows[rows["release"] == release.encode()]
    since = 60.0 * float(own["minute"].min()) if len(own) else now
    windows = {}
    for name, minutes in WINDOWS.items():
        first = int(now // 60) - minutes + 1
        counts = total(own[own["minute"] >= first])
        windows[name] = {
            "seconds": 60 * minutes,
            **_window_json(counts, shown.coverage_since(first)),
            "recall": {
                source: {name: _recall_json(*pair) for name, pair in zip(KINDS, _recall_of(counts, place), strict=True)}
                for place, source in enumerate(SOURCES)
            },
            "requests": {
                "count": int(counts["requests"]),
                "per_second": float(counts["requests"] / max(now - max(since, 60 * first), 1.0)),
                "p50_ms": latency_ms(counts["latency"], 0.5),
                "p99_ms": latency_ms(counts["latency"], 0.99),
                "shed": int(counts["shed"]),
                "errors": int(counts["errors"]),
            },
        }
    return {
        "release": release,
        "since": _iso(since),
        "now": _iso(now),
        "baseline": None if baseline is None else baseline.report_json(),
        "windows": windows,
        "gini": shown.gini(now),
        "ids_before": _ids_before(rows, release, now),
        "series": _series(rows, now),
    }


def _ids_before(rows: npt.NDArray[np.void], release: str, now: float) -> dict[str, Any]:
    """Return the ids of the last day that are not of the last hour of the release in service."""
    first = int(now // 60) - WINDOWS["1h"] + 1
    counts = total(rows[(rows["minute"] < first) | (rows["release"] != release.encode())])
    return dict(zip(ID_KINDS, map(_ids_json, counts["ids"].astype(int).tolist()), strict=True))


def _window_json(counts: np.void, coverage: tuple[list[float], float]) -> dict[str, Any]:
    exposures, judged, queries = counts["exposures"], counts["judged_exposures"], float(counts["queries"])
    promised = counts["promised"][: len(BUCKET_NAMES)]
    return {
        "queries": int(queries),
        **{name: _ratio(counts[name], queries) for name in DIALS},
        "dials": dict(zip(DIALS, map(dial_json, counts["dials"]), strict=True)),
        "restricted": dict(zip(("queries", *RESTRICTIONS), counts["restricted"].astype(int).tolist(), strict=True)),
        "floored": dict(zip(("queries", "unmet"), counts["floored"].astype(int).tolist(), strict=True)),
        "exposures": {
            name: {"count": int(count), "share": _ratio(count, exposures.sum()), "coverage": covered}
            for name, count, covered in zip(BUCKET_NAMES, exposures.tolist(), coverage[0], strict=True)
        },
        "coverage": coverage[1],
        "popularity": _ratio(counts["popularity"], exposures.sum()),
        "judged": {
            "queries": int(counts["judged_queries"]),
            "labels": int(judged.sum()),
            "shares": {
                name: _ratio(count, judged.sum()) for name, count in zip(BUCKET_NAMES, judged.tolist(), strict=True)
            },
            "promised": {
                name: _ratio(count, promised.sum()) for name, count in zip(BUCKET_NAMES, promised.tolist(), strict=True)
            },
            "scores": counts["judged_scores"].astype(int).tolist(),
            "recall": {
                source: dict(zip(KINDS, map(_promised_json, counts["judged_recall"][place]), strict=True))
                for place, source in enumerate(SOURCES)
            },
        },
        "ids": dict(zip(ID_KINDS, map(_ids_json, counts["ids"].astype(int).tolist()), strict=True)),
        "psi": {
            "buckets": _exposure_psi(counts),
            "scores": _psi(counts["judged_scores"], counts["promised"][len(BUCKET_NAMES) :]),
        },
        "dropped": int(counts["dropped"]),
    }


def _exposure_psi(counts: np.void) -> float | None:
    """Compute the PSI of head, torso, and tail together with new.

    The baseline has no labels that were added since the build.
    """
    found, expected = counts["judged_exposures"], counts["promised"][: len(BUCKET_NAMES)]
    return _psi(*(np.append(of[:TAIL], of[TAIL:].sum()) for of in (found, expected)))


def _psi(found: Array, promised: Array) -> float | None:
    """Compute the PSI of counts against the baseline's counts for the same depths; None without a baseline."""
    total = promised.sum()
    return psi(found, (promised / total).tolist()) if total else None


def _recall_of(counts: np.void, source: int) -> list[tuple[int, int]]:
    """Return positives and hits of one source, by bucket and in total."""
    positives, hits = (np.append(counts[name][source], counts[name][source].sum()) for name in ("positives", "hits"))
    return list(zip(positives.astype(int).tolist(), hits.astype(int).tolist(), strict=True))


def _promised_json(counts: Array) -> dict[str, Any]:
    """Return positives and hits that have a promise, and the recall promised for them with its 95 % interval."""
    positives, hits, *promised = counts.tolist()
    low, high = (_ratio(bound, positives) for bound in promised[1:])
    return {
        "positives": int(positives), "hits": int(hits), "promised": _ratio(promised[0], positives), "low": low,
        "high": high,
    }  # fmt: skip


def _ids_json(counts: list[int]) -> dict[str, Any]:
    senders, ids, unknown = counts
    return {"senders": senders, "ids": ids, "unknown": unknown, "share": _ratio(unknown, ids)}


def _recall_json(positives: int, hits: int) -> dict[str, Any]:
    """Return positives, hits, recall and its 95 % interval."""
    low, high = binomial_interval(hits / positives, positives, 0.95) if positives else (None, None)
    return {"positives": positives, "hits": hits, "value": _ratio(hits, positives), "low": low, "high": high}


def _series(rows: npt.NDArray[np.void], now: float) -> dict[str, Any]:
    """Compute figures of the minutes with traffic over all releases, oldest first.

    The last minute is incomplete. A minute has the name and the drift of the release with most traffic in it.
    """
    first = int(now // 60) - MINUTES + 1
    names: dict[int, str] = {}
    drifts: dict[int, float | None] = {}
    for row in rows[np.argsort(rows["counts"]["queries"] + rows["counts"]["requests"], kind="stable")]:
        minute, name = int(row["minute"]), row["release"].decode("ascii", "replace")
        names[minute] = name
        drifts[minute] = _exposure_psi(row["counts"])
    minutes = sorted(names)
    counts_M = by_minute(rows, now)[np.array(minutes, np.int64) - first]
    exposures_M, queries_M = counts_M["exposures"], counts_M["queries"]
    seconds_M = [60.0 if minute < int(now // 60) else max(now - 60 * minute, 1.0) for minute in minutes]
    recall_M = [[_recall_of(counts, of) for of in range(len(SOURCES))] for counts in counts_M]
    return {
        "step_seconds": 60,
        "at": [_iso(minute * 60) for minute in minutes],
        "queries": queries_M.astype(int).tolist(),
        "share": {
            name: list(map(_ratio, exposures_M[:, bucket], exposures_M.sum(axis=1)))
            for bucket, name in enumerate(BUCKET_NAMES)
        },
        "psi": [drifts.get(minute) for minute in minutes],
        "recall": {
            source: {
                name: [_ratio(*counts[of][bucket][::-1]) for counts in recall_M] for bucket, name in enumerate(KINDS)
            }
            for of, source in enumerate(SOURCES)
        },
        "bias_removal": list(map(_ratio, counts_M["bias_removal"], queries_M)),
        "requests_per_second": list(map(_ratio, counts_M["requests"], seconds_M)),
        "p50_ms": [latency_ms(bins, 0.5) for bins in counts_M["latency"]],
        "p99_ms": [latency_ms(bins, 0.99) for bins in counts_M["latency"]],
        "shed": counts_M["shed"].astype(int).tolist(),
        "release": [names[minute] for minute in minutes],
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def _iso(at: float) -> str:
    """Format seconds since 1970 as ISO 8601, UTC, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def report_metrics(report: Mapping[str, Any] | None, labels: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the series that are computed at the scrape, NaN where a figure is undefined.

    Args:
        report: the report of GET /v1/monitoring; None before a release is in service.
        labels: numbers of labels that are added, hidden and available.
    """

    def gauge(name: str, text: str, names: tuple[str, ...], samples: Iterable[_Sample]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"longtail_{name}", text, labels=names)
        for values, figure in samples:
            family.add_metric(values, figure)
        return family

    windows = {window: None if report is None else report["windows"][window] for window in WINDOWS}
    by_bucket = [(bucket, window) for window in WINDOWS for bucket in BUCKET_NAMES]
    by_source = [(source, bucket, window) for window in WINDOWS for source in SOURCES for bucket in KINDS]
    yield gauge(
        "exposure_share", "Share of the judged answers' labels in the bucket.", ("bucket", "window"),
        ((of, _at(windows[of[1]], "judged", "shares", of[0])) for of in by_bucket),
    )  # fmt: skip
    yield gauge(
        "exposure_baseline_share", "The same share of calibration queries, at the same λ.", ("bucket", "window"),
        ((of, _at(windows[of[1]], "judged", "promised", of[0])) for of in by_bucket),
    )  # fmt: skip
    covered = [(of, _at(windows[of[1]], "exposures", of[0], "coverage")) for of in by_bucket]
    covered += [(("all", window), _at(figures, "coverage")) for window, figures in windows.items()]
    text = "Share of ids in requests and feedback that the release does not know."
    kinds = [(kind, window) for window in WINDOWS for kind in ID_KINDS]
    yield gauge(
        "ids_unknown_share", text, ("list", "window"),
        ((of, _at(windows[of[1]], "ids", of[0], "share")) for of in kinds),
    )  # fmt: skip
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
    for finding in reversed(
        [] if report is None else report["verdict"]["findings"]
    ):  # the worst last, so that it overwrites the others
        found[finding["signal"]] = _SEVERITIES[finding["severity"]]
    text = "Worst finding of a signal: 0 none, 1 watch, 2 act; NaN: too few answers."
    yield gauge("verdict", text, ("signal",), (((signal,), value) for signal, value in found.items()))
    for name, text in (
        ("added", "Labels added since the release was built."),
        ("hidden", "Labels of the release that are hidden."),
        ("available", "Labels that answers may have now: not hidden, and within their lifetimes."),
    ):
        yield GaugeMetricFamily(f"longtail_labels_{name}", text, value=labels[name])


def _at(figures: Any, *path: str) -> float:
    """Return the number at the end of a path of keys; NaN if a value on the path is None."""
    for name in path:
        if figures is None:
            return math.nan
        figures = figures[name]
    return math.nan if figures is None else float(figures)
