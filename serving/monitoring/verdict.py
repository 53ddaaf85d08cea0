"""One verdict over every signal: what an operator should know before any figure.

A signal is judged over the last hour, or the last day where the hour has too few answers; load over five minutes. Only
answers that the client did not restrict to some labels are held against the baseline. A figure is off its promise where

- the 99.9 % intervals of both exclude that they are equal [Newcombe 1998]: the question is put every few seconds, of
  every bucket, so that one chance in twenty would come up all the time. Intervals are exact binomial ones of as many
  observations as there were queries, for the labels of one answer are alike;
- it matters: a quarter more or a fifth less is to be watched, twice or half calls for action; of a PSI the field's 0.1
  and 0.25 [Siddiqi 2006], above what chance gives: (1/n + 1/m)·χ² of n queries against m [Yurdakul & Naranjo 2020].

Where the first is open, and the figure could as well be twice or half its promise, it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, get_args

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.baseline import ALL, OfflineFigures
from longtail.serving.monitoring.ring import WIDTH

Severity = Literal["steady", "unknown", "watch", "act"]
Signal = Literal[
    "label_log", "refused_release", "engine", "experiments", "records", "errors", "shed", "organic_recall",
    "feedback_recall", "share_drift", "score_drift", "coverage_loss", "dials", "stale_release",
]  # fmt: skip
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
SIGNALS: tuple[Signal, ...] = get_args(Signal)
"""In the order in which those of one severity are listed."""

_SURE, _USUAL, _WIDER = 0.999, 0.95, 3.290526731491926 / 1.959963984540054
"""Confidence of intervals, and how much wider a normal one of the first is."""
_MORE, _LESS, _TWICE, _HALF = 1.25, 0.8, 2.0, 0.5
_FLOOR, _MINUTE_SHARE, _NEAR_SHARE = 1e-4, 1e-3, 5e-3
_STALE_DAYS = 30.0
_CHI_SQUARE = 27.877164871256568
"""99.9 % quantile of 9 degrees of freedom: ten deciles of scores."""
_WORDS = {"5m": "the last 5 minutes", "1h": "the last hour", "24h": "the last 24 hours"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one signal says of one bucket, or of all (None); `low` and `high` bound what was observed."""

    signal: Signal
    severity: Severity
    sentence: str
    bucket: str | None = None
    window: str | None = None
    observed: float | None = None
    expected: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is judged: windows and baseline of the report, and what else is known of the release and the service."""

    windows: Mapping[str, Mapping[str, Any]]
    baseline: Mapping[str, Any] | None
    offline: OfflineFigures
    bucket_sizes: Mapping[str, int]
    added: int = 0
    """Labels added since the release was built."""
    troubles: Mapping[Signal, str] = field(default_factory=dict)
    """Sentences on what is broken now."""
    organic_k: int = 20
    """Labels retrieved for an organic interaction."""
    age_days: float | None = None
    """Age of the training data in days; None if unknown."""


def judge(evidence: Evidence) -> dict[str, Any]:
    """Return `verdict` of GET /v1/monitoring: the worst severity, its sentence, and what is not steady, worst first."""
    found = sorted(
        _findings(evidence), key=lambda one: (-SEVERITIES.index(one.severity), SIGNALS.index(one.signal), -_gap(one))
    )
    queries = evidence.windows["24h"]["queries"]
    well = f"The answers are what the release promised: {queries:,} queries in {_WORDS['24h']}."
    return {
        "severity": found[0].severity if found else "steady",
        "headline": found[0].sentence if found else well,
        "findings": [asdict(one) for one in found],
    }


def _findings(evidence: Evidence) -> Iterator[Finding]:
    for signal, sentence in evidence.troubles.items():
        yield Finding(signal, "act", sentence)
    yield from _counted(evidence)
    baseline = evidence.baseline
    judges: list[Callable[[str], Finding | None]] = [
        partial(_recall, evidence, source, of) for source in ("organic", "feedback") for of in (ALL, *BUCKET_NAMES)
    ]
    if not evidence.windows["24h"]["queries"]:
        yield Finding("share_drift", "unknown", f"No queries in {_WORDS['24h']}: there is nothing to judge yet.")
    elif baseline is None:
        sentence = "No baseline: this release was not evaluated offline. Train with a validation split to see drift."
        yield Finding("share_drift", "unknown", sentence)
    else:
        judges += [partial(judge, evidence, baseline, of) for judge in (_share, _coverage) for of in BUCKET_NAMES]
        judges += [partial(_dial, evidence, baseline, dial) for dial in ("bias_removal", "popularity_weight")]
        judges.append(partial(_scores, evidence, baseline))
    for one in judges:
        found = one("1h")
        if found is None or found.severity == "unknown":
            found = one("24h")
        if found is not None and found.severity != "steady":
            yield found


def _counted(evidence: Evidence) -> Iterator[Finding]:
    """Findings on what is a number, and no estimate."""
    day, load = evidence.windows["24h"], evidence.windows["5m"]["requests"]
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
    if (age := evidence.age_days) is not None and age > _STALE_DAYS:
        sentence = f"The release's training data is {age:.0f} days old; more than {_STALE_DAYS:g} is stale."
        yield Finding("stale_release", "watch", sentence, observed=age, expected=_STALE_DAYS)


def _share(evidence: Evidence, baseline: Mapping[str, Any], bucket: str, window: str) -> Finding | None:
    judged = evidence.windows[window]["unrestricted"]
    promised = judged["promised"][bucket]
    queries, share = judged["queries"], judged["shares"][bucket]
    if bucket == "new" and (evidence.added or not (share or promised)):
        return None  # labels added since have no promise, and take their share from the others
    if share is None:
        return _too_few("share_drift", bucket, window, queries)
    low, high = _interval(share, queries)
    off = _differ((share, low, high), (promised, *_interval(promised, baseline["queries"])))
    ratio = max(share, _FLOOR) / max(promised, _FLOOR)
    severity: Severity = "steady"
    if off and not _HALF < ratio < _TWICE and max(share, promised) >= _MINUTE_SHARE:
        severity = "act"
    elif off and not _LESS < ratio < _MORE:
        severity = "watch"
    elif not off:
        near, far = _interval(share, queries, _USUAL)
        tells = _HALF * promised < near and (far < _TWICE * promised or _TWICE * promised >= 1)
        if not tells and max(promised - near, far - promised) >= _NEAR_SHARE:
            return _too_few("share_drift", bucket, window, queries)
    times = f", {ratio:.1f} times as much" if ratio >= 1 else f", {100 * ratio:.0f} % of it"
    sentence = (
        f"{bucket.capitalize()} gets {_percent(share)} of the answers in {_WORDS[window]} where the release promised "
        f"{_percent(promised) + times if promised else 'none'}."
    )
    return Finding("share_drift", severity, sentence, bucket, window, share, promised, low, high)


def _coverage(evidence: Evidence, baseline: Mapping[str, Any], bucket: str, window: str) -> Finding | None:
    """Coverage only grows with answers, so it is lost where more of them cover less than the baseline did."""
    figures = evidence.windows[window]
    promised = figures["unrestricted"]["coverage"][bucket]
    if not promised or figures["unrestricted"]["queries"] < baseline["queries"]:
        return None
    covered, size = figures["exposures"][bucket]["coverage"], evidence.bucket_sizes[bucket]
    # Numbers of labels covered, whose variance is Poisson's at most.
    if covered > _LESS * promised or (promised - covered) * size <= 3.29 * math.sqrt((promised + covered) * size):
        return None
    severity: Severity = "act" if covered <= _HALF * promised else "watch"
    sentence = (
        f"{_percent(covered)} of the {bucket} labels are in any answer of {_WORDS[window]}, where as many answers to "
        f"held-out queries had {_percent(promised)}."
    )
    return Finding("coverage_loss", severity, sentence, bucket, window, covered, promised)


def _scores(evidence: Evidence, baseline: Mapping[str, Any], window: str) -> Finding:
    figures = evidence.windows[window]
    index, queries = figures["psi"]["scores"], figures["unrestricted"]["queries"]
    by_chance = _CHI_SQUARE * (1 / max(queries, 1) + 1 / max(baseline["queries"], 1))
    if index is None or 0.1 <= index <= by_chance:
        return _too_few("score_drift", None, window, queries)
    sentence = (
        f"Scores are not distributed as those of held-out queries in {_WORDS[window]} (PSI {index:.2f}): other "
        "queries, features or dials than those it was measured with."
    )
    severity: Severity = "act" if index > 0.25 else "watch" if index > 0.1 else "steady"
    return Finding("score_drift", severity, sentence, None, window, index, 0.25 if index > 0.25 else 0.1)


def _dial(evidence: Evidence, baseline: Mapping[str, Any], dial: str, window: str) -> Finding | None:
    """Judge whether queries ask for the λ and μ that everything else is compared at."""
    counted, usual = evidence.windows[window]["dials"][dial], baseline[dial]
    queries = sum(one["queries"] for one in counted)
    apart = [one for one in counted if abs(one["at"] - usual) > WIDTH / 2 + 1e-6]
    if not apart:
        return None
    share, most = sum(one["queries"] for one in apart) / queries, max(apart, key=lambda one: one["queries"])
    low, high = _interval(share, queries)
    sentence = (
        f"{_percent(share)} of the queries in {_WORDS[window]} ask for another {'λ' if dial == 'bias_removal' else 'μ'}"
        f" than the {usual:.2f} that the release was measured at, most of them for {most['at']:.2f} "
        f"({_percent(most['queries'] / queries)}): shares and scores move with it."
    )
    return Finding("dials", "watch" if low > 0.1 else "steady", sentence, None, window, share, 0.0, low, high)


def _recall(evidence: Evidence, source: str, kind: str, window: str) -> Finding | None:
    figures = evidence.windows[window]
    labels = sum(of["count"] for of in figures["exposures"].values())
    k = evidence.organic_k if source == "organic" else labels / max(figures["queries"], 1)
    measured, found = evidence.offline.recall_within(k), figures["recall"][source][kind]
    if measured is None or kind not in measured[1] or not found["positives"]:
        return None
    cutoff, (promised, promised_low, promised_high) = measured[0], measured[1][kind]
    value, between = found["value"], ""
    low, high = _interval(value, found["positives"])
    wide = (promised, promised, promised)
    if promised_low is not None and promised_high is not None:
        between = f", {promised_low:.3f}–{promised_high:.3f}"
        wide = (promised, promised + _WIDER * (promised_low - promised), promised + _WIDER * (promised_high - promised))
    off, ratio = value < promised and _differ((value, low, high), wide), value / max(promised, _FLOOR)
    severity: Severity = "act" if off and ratio <= _HALF else "watch" if off and ratio <= _LESS else "steady"
    if severity == "steady" and low <= _HALF * promised and window == "1h":
        severity = "unknown"  # the day may tell
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
    sentence = f"Too few answers to judge {what}: {counted}."
    return Finding(signal, "unknown", sentence, bucket, window)


def _gap(finding: Finding) -> float:
    """Measure how far a figure is from its promise; a share that is missing counts like one that is gained."""
    observed, expected = finding.observed or 0.0, finding.expected or 0.0
    return (observed - expected) * math.log(max(observed, _FLOOR) / max(expected, _FLOOR))


def _differ(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Return whether two proportions (value, low, high) differ, by their difference's interval [Newcombe 1998, 10]."""
    (upper, upper_low, _), (lower, _, lower_high) = (one, other) if one[0] > other[0] else (other, one)
    return upper - lower > math.hypot(upper - upper_low, lower_high - lower)


@lru_cache(256)
def _interval(share: float, trials: float, confidence: float = _SURE) -> tuple[float, float]:
    """Compute the exact binomial interval of a share [Clopper & Pearson 1934]; hits need not be whole."""
    hits, aside = share * trials, (1 - confidence) / 2
    low = 0.0 if hits <= 0 else _bisect(lambda p: _beta(p, hits, trials - hits + 1) < aside)
    high = 1.0 if hits >= trials else _bisect(lambda p: _beta(p, hits + 1, trials - hits) < 1 - aside)
    return low, high


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


def _beta(x: float, a: float, b: float) -> float:
    """Compute the regularised incomplete beta function I_x(a, b), 0 < x < 1, by Lentz's method [DLMF 8.17.22]."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 100_000):
        m, odd = divmod(step, 2)
        term = (-(a + m) * (a + b + m) if odd else m * (b - m)) * x / ((a + step - 1) * (a + step))
        d = 1 / ((1 + term * d) or 1e-300)
        c = (1 + term / c) or 1e-300
        value *= c * d
        if abs(c * d - 1) < 1e-10:
            break
    return math.exp(log_front) / a / value


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.01 or not share else 2}f} %"
