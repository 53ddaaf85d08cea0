"""Create the report of GET /v1/monitoring.

The metrics are the trainer's [METHODS §7], over answers instead of test queries. Legend: `M` minutes with traffic.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.bundle.exposure import Counts, psi
from longtail.bundle.frequency import TAIL
from longtail.serving.monitoring.baseline import AnswerBaseline
from longtail.serving.monitoring.counters import (
    DIAL_CENTRES,
    DIALS,
    KINDS,
    LATENCY_BINS,
    LATENCY_EDGES,
    MINUTES,
    ExposedLabels,
    sum_by_minute,
    sum_counts,
)
from longtail.serving.monitoring.intervals import binomial_interval
from longtail.serving.monitoring.records import ID_KINDS, RESTRICTIONS, SOURCES

WINDOWS = {"5m": 5, "1h": 60, "24h": MINUTES}
"""Lengths of the windows in minutes."""


def make_report(
    release: str,
    baseline: AnswerBaseline | None,
    labels: ExposedLabels,
    rows: npt.NDArray[np.void],
    timestamp: float,
) -> dict[str, Any]:
    """Create the report without verdict and numbers of labels.

    Args:
        labels: exposures of the release's labels.
        rows: rows of all workers over the last day, from `Counters.read_day`.
        timestamp: seconds since 1970.
    """
    release_rows = rows[rows["release"] == release.encode()]
    begin = 60.0 * float(release_rows["minute"].min()) if len(release_rows) else timestamp
    windows = {}
    for window, minutes in WINDOWS.items():
        first_minute = int(timestamp // 60) - minutes + 1
        counts = sum_counts(release_rows[release_rows["minute"] >= first_minute])
        windows[window] = {
            "seconds": 60 * minutes,
            **_window_json(counts, labels.measure_coverage(first_minute)),
            "recall": {
                source: {kind: _recall_json(*pair) for kind, pair in zip(KINDS, _count_recall(counts, i), strict=True)}
                for i, source in enumerate(SOURCES)
            },
            "requests": {
                "count": int(counts["requests"]),
                # A release that is younger than the window has had less time.
                "per_second": float(counts["requests"] / max(timestamp - max(begin, 60 * first_minute), 1.0)),
                "p50_ms": latency_ms(counts["latency"], 0.5),
                "p99_ms": latency_ms(counts["latency"], 0.99),
                "shed": int(counts["shed"]),
                "errors": int(counts["errors"]),
            },
        }
    hour_minute = int(timestamp // 60) - WINDOWS["1h"] + 1
    before_hour = sum_counts(rows[(rows["minute"] < hour_minute) | (rows["release"] != release.encode())])
    return {
        "release": release,
        "since": _iso(begin),
        "now": _iso(timestamp),
        "baseline": None if baseline is None else baseline.report_json(),
        "windows": windows,
        "gini": labels.gini(timestamp),
        "ids_before": _ids_json(before_hour),
        "series": _series(rows, timestamp),
    }


def _window_json(counts: np.void, coverage: tuple[list[float], float]) -> dict[str, Any]:
    exposures, judged, queries = counts["exposures"], counts["judged_exposures"], float(counts["queries"])
    promised = counts["promised"][: len(BUCKET_NAMES)]
    return {
        "queries": int(queries),
        **{name: _ratio(counts[name], queries) for name in DIALS},
        "dials": dict(zip(DIALS, map(_dial_json, counts["dials"]), strict=True)),
        "restricted": dict(zip(("queries", *RESTRICTIONS), counts["restricted"].astype(int).tolist(), strict=True)),
        "floored": dict(zip(("queries", "unmet"), counts["floored"].astype(int).tolist(), strict=True)),
        "exposures": {
            name: {"count": int(count), "share": _ratio(count, exposures.sum()), "coverage": bucket_coverage}
            for name, count, bucket_coverage in zip(BUCKET_NAMES, exposures.tolist(), coverage[0], strict=True)
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
                source: dict(zip(KINDS, map(_promised_json, counts["judged_recall"][i]), strict=True))
                for i, source in enumerate(SOURCES)
            },
        },
        "ids": _ids_json(counts),
        "psi": {
            "buckets": _exposure_psi(counts),
            "scores": _psi(counts["judged_scores"], counts["promised"][len(BUCKET_NAMES) :]),
        },
        "dropped": int(counts["dropped"]),
    }


def _exposure_psi(counts: np.void) -> float | None:
    """Compute the PSI of head, torso, and tail with new.

    The baseline has no labels that were added since the build.
    """
    observed, promised = (
        np.append(exposures[:TAIL], exposures[TAIL:].sum())
        for exposures in (counts["judged_exposures"], counts["promised"][: len(BUCKET_NAMES)])
    )
    return _psi(observed, promised)


def _psi(observed: Array, promised: Array) -> float | None:
    total = promised.sum()
    return psi(observed, (promised / total).tolist()) if total else None


def _count_recall(counts: np.void, source: int) -> list[tuple[int, int]]:
    positives, hits = (np.append(counts[name][source], counts[name][source].sum()) for name in ("positives", "hits"))
    return list(zip(positives.astype(int).tolist(), hits.astype(int).tolist(), strict=True))


def _promised_json(counts: Array) -> dict[str, Any]:
    positives, hits, *promised = counts.tolist()
    low, high = (_ratio(bound, positives) for bound in promised[1:])
    return {
        "positives": int(positives), "hits": int(hits), "promised": _ratio(promised[0], positives), "low": low,
        "high": high,
    }  # fmt: skip


def _ids_json(counts: np.void) -> dict[str, Any]:
    return {
        kind: {"senders": senders, "ids": ids, "unknown": unknown, "share": _ratio(unknown, ids)}
        for kind, (senders, ids, unknown) in zip(ID_KINDS, counts["ids"].astype(int).tolist(), strict=True)
    }


def _recall_json(positives: int, hits: int) -> dict[str, Any]:
    low, high = binomial_interval(hits / positives, positives, 0.95) if positives else (None, None)
    return {"positives": positives, "hits": hits, "value": _ratio(hits, positives), "low": low, "high": high}


def _series(rows: npt.NDArray[np.void], timestamp: float) -> dict[str, Any]:
    """Compute figures by minute over all releases, oldest first.

    The last minute is incomplete. A minute has the name and the drift of the release with most traffic in it.
    """
    newest = int(timestamp // 60)
    names: dict[int, str] = {}
    drifts: dict[int, float | None] = {}
    # Ascending, so that the release with most traffic names a minute last.
    for row in rows[np.argsort(rows["counts"]["queries"] + rows["counts"]["requests"], kind="stable")]:
        minute, name = int(row["minute"]), row["release"].decode("ascii", "replace")
        names[minute] = name
        drifts[minute] = _exposure_psi(row["counts"])
    minutes = sorted(names)
    counts_M = sum_by_minute(rows, timestamp)[np.array(minutes, np.int64) - (newest - MINUTES + 1)]
    exposures_M, queries_M = counts_M["exposures"], counts_M["queries"]
    seconds_M = [60.0 if minute < newest else max(timestamp - 60 * minute, 1.0) for minute in minutes]
    recall_M = [[_count_recall(counts, source) for source in range(len(SOURCES))] for counts in counts_M]
    return {
        "step_seconds": 60,
        "at": [_iso(minute * 60) for minute in minutes],
        "queries": queries_M.astype(int).tolist(),
        "share": {
            name: list(map(_ratio, exposures_M[:, bucket], exposures_M.sum(axis=1)))
            for bucket, name in enumerate(BUCKET_NAMES)
        },
        "psi": [drifts[minute] for minute in minutes],
        "recall": {
            source: {
                kind: [_ratio(*recall[i][bucket][::-1]) for recall in recall_M] for bucket, kind in enumerate(KINDS)
            }
            for i, source in enumerate(SOURCES)
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


def _iso(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def latency_ms(bins: Counts, quantile: float) -> float | None:
    """Return a quantile in ms, at most 10 s; None without observations."""
    cumulated = np.cumsum(bins)
    if not cumulated[-1]:
        return None
    rank = quantile * float(cumulated[-1])
    cell = min(int(np.searchsorted(cumulated, rank)), LATENCY_BINS - 1)
    inside = (rank - float(cumulated[cell] - bins[cell])) / float(bins[cell]) if bins[cell] else 1.0
    if cell == 0:
        return 0.1 * inside
    if cell == LATENCY_BINS - 1:
        return 10_000.0
    # The bins have one width on a logarithmic scale, so the quantile is interpolated there.
    low, high = np.log(LATENCY_EDGES[cell - 1 : cell + 1])
    return float(np.exp(low + inside * (high - low)) * 1000)


def _dial_json(bins: Array) -> list[dict[str, Any]]:
    return [{"at": float(DIAL_CENTRES[i]), "queries": int(bins[i])} for i in np.flatnonzero(bins)]
