"""Judge all signals in one verdict, which an operator should read before any figure.

A signal is judged over the last hour, or over the last day if the hour has too few answers; load over five minutes.
Only answers that the client did not restrict to some labels are compared with the baseline. A figure deviates from its
promise if

- the difference is significant: the 99.9 % interval of the difference excludes 0 [Newcombe 1998]. Every bucket is
  tested every few seconds, so at 95 % false alarms would be permanent. Intervals are exact binomial ones with the
  number of queries as the number of observations, because the labels of one answer are correlated;
- and the difference matters: a quarter more or a fifth less is to be watched, twice or half calls for action. For PSI
  the limits are the usual 0.1 and 0.25 [Siddiqi 2006], above the value expected by chance, (1/n + 1/m)·χ² for n queries
  against m [Yurdakul & Naranjo 2020].

If the difference is not significant, but the interval includes twice or half the promise, the signal is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.baseline import ALL, OfflineFigures
from longtail.serving.monitoring.intervals import binomial_interval

Severity = Literal["steady", "unknown", "watch", "act"]
Signal = Literal[
    "label_log", "refused_release", "engine", "experiments", "records", "errors", "shed", "organic_recall",
    "feedback_recall", "share_drift", "score_drift", "stale_release",
]  # fmt: skip
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
SIGNALS: tuple[Signal, ...] = get_args(Signal)
"""Signals in the order in which equally severe findings are listed."""

_SURE, _USUAL, _WIDER = 0.999, 0.95, 3.290526731491926 / 1.959963984540054
"""Confidences, and the ratio of the widths of normal intervals at 99.9 % and 95 %."""
_MORE, _LESS, _TWICE, _HALF = 1.25, 0.8, 2.0, 0.5
_FLOOR, _MINUTE_SHARE, _NEAR_SHARE = 1e-4, 1e-3, 5e-3
_STALE_DAYS = 30.0
_CHI_SQUARE = 27.877164871256568
"""99.9 % quantile of χ² with 9 degrees of freedom, for ten deciles of scores."""
_WORDS = {"5m": "the last 5 minutes", "1h": "the last hour", "24h": "the last 24 hours"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one signal in one bucket, or in all (None); `low` and `high` bound the observation."""

    signal: Signal
    severity: Severity
    sentence: str
    bucket: str | None = None
    window: str | None = None
    observed: float | None = None
    expected: float | None = None
    low: float | None = None
    high: float | None = None


def judge(
    report: Mapping[str, Any],
    offline: OfflineFigures,
    troubles: Mapping[Signal, str],
    *,
    organic_k: int = 20,
    age_days: float | None = None,
) -> dict[str, Any]:
    """Create `verdict` of GET /v1/monitoring: worst severity, sentence, and findings, worst first.

    Args:
        troubles: sentences about present problems, by signal.
        organic_k: number of labels retrieved for an organic interaction.
        age_days: age of the training data.
    """
    windows, day = report["windows"], report["windows"]["24h"]
    found = [Finding(signal, "act", sentence) for signal, sentence in troubles.items()]
    found += _counted(windows["5m"]["requests"], day, age_days)
    if not day["queries"]:
        found.append(
            Finding("share_drift", "unknown", f"No queries in {_WORDS['24h']}: there is nothing to judge yet.")
        )
    elif report["baseline"] is None:
        sentence = "No baseline: this release was not evaluated offline. Train with a validation split to see drift."
        found.append(Finding("share_drift", "unknown", sentence))
    hour, of_day = (dict(_judged(report, name, windows[name], offline, organic_k)) for name in ("1h", "24h"))
    for key, of_hour in hour.items():
        of_both = of_day[key] if of_hour is None or of_hour.severity == "unknown" else of_hour
        if of_both is not None and of_both.severity != "steady":
            found.append(of_both)
    found.sort(key=lambda one: (-SEVERITIES.index(one.severity), SIGNALS.index(one.signal), -_gap(one)))
    well = f"The answers are what the release promised: {day['queries']:,} queries in {_WORDS['24h']}."
    return {
        "severity": found[0].severity if found else "steady",
        "headline": found[0].sentence if found else well,
        "findings": [asdict(one) for one in found],
    }


def _counted(load: Mapping[str, Any], day: Mapping[str, Any], age_days: float | None) -> Iterator[Finding]:
    """Judge the signals that are exact numbers, not estimates."""
    if dropped := day["dropped"]:
        severity: Severity = "act" if dropped > 0.01 * day["queries"] else "watch"
        sentence = f"{dropped:,} events of {_WORDS['24h']} were not kept: LONGTAIL_EVENTS takes none, or too slowly."
        yield Finding("records", severity, sentence, None, "24h", dropped, 0.0)
    arrived = load["count"] + load["shed"]
    of_load: tuple[tuple[Signal, float, str], ...] = (
        ("errors", 0.01, "broke (5xx)"), ("shed", 0.05, "found the queue full and were refused (429)"),
    )  # fmt: skip
    for signal, most, what in of_load:
        if failed := load[signal]:
            severity = "act" if failed >= 5 and failed > most * arrived else "watch"
            sentence = f"{failed:,} of {arrived:,} requests in {_WORDS['5m']} {what}."
            yield Finding(signal, severity, sentence, None, "5m", failed / arrived, 0.0)
    if age_days is not None and age_days > _STALE_DAYS:
        sentence = f"The release's training data is {age_days:.0f} days old; more than {_STALE_DAYS:g} is stale."
        yield Finding("stale_release", "watch", sentence, observed=age_days, expected=_STALE_DAYS)


def _judged(
    report: Mapping[str, Any], window: str, figures: Mapping[str, Any], offline: OfflineFigures, organic_k: int
) -> Iterator[tuple[tuple[str, str], Finding | None]]:
    """Judge every estimate of one window, by signal and bucket; None: there is nothing to judge."""
    for source in ("organic", "feedback"):
        labels = sum(of["count"] for of in figures["exposures"].values())
        k = organic_k if source == "organic" else labels / max(figures["queries"], 1)
        for kind in (ALL, *BUCKET_NAMES):
            yield (source, kind), _recall(window, figures["recall"][source][kind], source, kind, offline, k)
    baseline, judged = report["baseline"], figures["unrestricted"]
    if baseline is not None and report["windows"]["24h"]["queries"]:
        for bucket in BUCKET_NAMES:
            share, promised = judged["shares"][bucket], judged["promised"][bucket]
            # Added labels have no promise, and their exposures reduce the shares of the other buckets.
            known = bucket != "new" or (not report["labels"]["added"] and (share or promised))
            found = _share(window, bucket, share, promised, judged["queries"], baseline["queries"]) if known else None
            yield ("share", bucket), found
        yield ("scores", ALL), _scores(window, figures["psi"]["scores"], judged["queries"], baseline["queries"])


def _share(
    window: str, bucket: str, share: float | None, promised: float, queries: int, queries_before: int
) -> Finding:
    if share is None:
        return _too_few("share_drift", bucket, window, queries)
    low, high = binomial_interval(share, queries, _SURE)
    off = _differ((share, low, high), (promised, *binomial_interval(promised, queries_before, _SURE)))
    ratio = max(share, _FLOOR) / max(promised, _FLOOR)
    severity: Severity = "steady"
    if off and not _HALF < ratio < _TWICE and max(share, promised) >= _MINUTE_SHARE:
        severity = "act"
    elif off and not _LESS < ratio < _MORE:
        severity = "watch"
    elif not off:
        near, far = binomial_interval(share, queries, _USUAL)
        tells = _HALF * promised < near and (far < _TWICE * promised or _TWICE * promised >= 1)
        if not tells and max(promised - near, far - promised) >= _NEAR_SHARE:
            return _too_few("share_drift", bucket, window, queries)
    times = f", {ratio:.1f} times as much" if ratio >= 1 else f", {100 * ratio:.0f} % of it"
    sentence = (
        f"{bucket.capitalize()} gets {_percent(share)} of the answers in {_WORDS[window]} where the release promised "
        f"{_percent(promised) + times if promised else 'none'}."
    )
    return Finding("share_drift", severity, sentence, bucket, window, share, promised, low, high)


def _scores(window: str, index: float | None, queries: int, queries_before: int) -> Finding:
    by_chance = _CHI_SQUARE * (1 / max(queries, 1) + 1 / max(queries_before, 1))
    if index is None or 0.1 <= index <= by_chance:
        return _too_few("score_drift", None, window, queries)
    sentence = (
        f"Scores are not distributed as those of held-out queries in {_WORDS[window]} (PSI {index:.2f}): other "
        "queries, features or dials than those it was measured with."
    )
    severity: Severity = "act" if index > 0.25 else "watch" if index > 0.1 else "steady"
    return Finding("score_drift", severity, sentence, None, window, index, 0.25 if index > 0.25 else 0.1)


def _recall(
    window: str, found: Mapping[str, Any], source: str, kind: str, offline: OfflineFigures, k: float
) -> Finding | None:
    measured = offline.recall_within(k)
    if measured is None or kind not in measured[1] or not found["positives"]:
        return None
    cutoff, (promised, promised_low, promised_high) = measured[0], measured[1][kind]
    value, between = found["value"], ""
    low, high = binomial_interval(value, found["positives"], _SURE)
    wide = (promised, promised, promised)
    if promised_low is not None and promised_high is not None:
        between = f", {promised_low:.3f}–{promised_high:.3f}"
        wide = (promised, promised + _WIDER * (promised_low - promised), promised + _WIDER * (promised_high - promised))
    off, ratio = value < promised and _differ((value, low, high), wide), value / max(promised, _FLOOR)
    severity: Severity = "act" if off and ratio <= _HALF else "watch" if off and ratio <= _LESS else "steady"
    if severity == "steady" and low <= _HALF * promised and window == "1h":
        severity = "unknown"  # the longer window may decide
    sentence = (
        f"Recall{'' if kind == ALL else f' of {kind} labels'} among "
        f"{'organic choices' if source == 'organic' else 'choices from answers'} is {value:.3f} in {_WORDS[window]}, "
        f"{found['hits']:,} of {found['positives']:,}, where the evaluation promised {promised:.3f} (recall@{cutoff}"
        f"{between})."
    )
    signal: Signal = "organic_recall" if source == "organic" else "feedback_recall"
    return Finding(signal, severity, sentence, None if kind == ALL else kind, window, value, promised, low, high)


def _too_few(signal: Signal, bucket: str | None, window: str, queries: int) -> Finding:
    counted = f"{queries or 'no'} unrestricted {'query' if queries == 1 else 'queries'} in {_WORDS[window]}"
    what = f"{bucket}'s share" if bucket else "the scores"
    return Finding(signal, "unknown", f"Too few answers to judge {what}: {counted}.", bucket, window)


def _gap(finding: Finding) -> float:
    """Measure the deviation of a figure from its promise; losing a share counts like gaining it."""
    observed, expected = finding.observed or 0.0, finding.expected or 0.0
    return (observed - expected) * math.log(max(observed, _FLOOR) / max(expected, _FLOOR))


def _differ(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Return whether two proportions (value, low, high) differ significantly [Newcombe 1998, method 10]."""
    (upper, upper_low, _), (lower, _, lower_high) = (one, other) if one[0] > other[0] else (other, one)
    return upper - lower > math.hypot(upper - upper_low, lower_high - lower)


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.01 or not share else 2}f} %"
