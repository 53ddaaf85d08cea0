"""One verdict over every signal, by bucket, worst first: what an operator should know before any figure.

Each signal is judged over the last hour, or over the last day where the hour has too few answers to tell; load over
the last five minutes. A figure is called off its promise where both hold:

- it is: its 99.9 % interval and the promise's own exclude that the two are equal [Newcombe 1998], for this is asked
  every few seconds, of every bucket, so that one chance in twenty would come up all the time;
- it matters: a quarter more or a fifth less is to be watched, twice or half calls for action. Of a PSI the field's
  0.1 and 0.25 [Siddiqi 2006], above what chance gives it: (1/n + 1/m)·χ² of its cells less one, of n queries against m
  [Yurdakul & Naranjo 2020].

Where the first is open, and the figure could as well be twice or half its promise, it is unknown, not steady.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.drift import drift_findings
from longtail.serving.monitoring.findings import (
    FLOOR,
    HALF,
    LESS,
    SEVERITIES,
    SIGNALS,
    WORDS,
    Z_USUAL,
    Evidence,
    Finding,
    Severity,
    Signal,
    Z,
    differ,
)
from longtail.serving.monitoring.offline import ALL, OfflineRecall
from longtail.serving.monitoring.windows import wilson

_FEW_FAILURES = 5


def judge(evidence: Evidence) -> dict[str, Any]:
    """`verdict` of GET /v1/monitoring: severity and sentence of the worst finding, and all findings, worst first."""
    found = sorted(
        _findings(evidence),
        key=lambda one: (-SEVERITIES.index(one.severity), SIGNALS.index(one.signal), -one.weight),
    )
    severity = found[0].severity if found else "unknown"
    headline = found[0].sentence if severity != "steady" else _all_well(evidence)
    return {"severity": severity, "headline": headline, "findings": [one.report_json() for one in found]}


def severities(verdict: Mapping[str, Any]) -> dict[Signal, Severity]:
    """The worst severity of every signal that the verdict has a finding of."""
    worst: dict[Signal, Severity] = {}
    for finding in verdict["findings"]:
        worst.setdefault(finding["signal"], finding["severity"])
    return worst


def _findings(evidence: Evidence) -> Iterator[Finding]:
    for signal, sentence in evidence.troubles.items():
        yield Finding(signal, "act", sentence)
    yield from _records(evidence)
    yield from _load(evidence.windows["5m"])
    yield from drift_findings(evidence)
    for source in ("shadow", "feedback"):
        yield from _recall(evidence, source)
    if evidence.age_days is not None and evidence.stale_days is not None:
        late = evidence.age_days > evidence.stale_days
        sentence = f"The release's training data is {_days(evidence.age_days)} old"
        limit = f"; more than {_days(evidence.stale_days)} is stale" if late else ""
        yield Finding(
            "stale_release", "watch" if late else "steady", f"{sentence}{limit}.",
            observed=evidence.age_days, expected=evidence.stale_days,
        )  # fmt: skip


def _recall(evidence: Evidence, source: Literal["shadow", "feedback"]) -> Iterator[Finding]:
    signal: Signal = "shadow_recall" if source == "shadow" else "feedback_recall"
    for kind in (ALL, *BUCKET_NAMES):
        hour, day = (_recall_in(evidence, source, signal, window, kind) for window in ("1h", "24h"))
        if hour is not None and (hour.severity != "steady" or _rules_out_half(hour)):
            yield hour
        elif day is not None:
            yield day


def _recall_in(
    evidence: Evidence, source: Literal["shadow", "feedback"], signal: Signal, window: str, kind: str
) -> Finding | None:
    figures = evidence.windows[window]
    labels = sum(of["count"] for of in figures["exposures"].values())
    k = evidence.shadow_k if source == "shadow" else labels / figures["queries"] if figures["queries"] else 0
    measured, found = evidence.offline.recall_within(k), figures["recall"][source][kind]
    if measured is None or kind not in measured[1] or not found["positives"]:
        return None
    cutoff, promised = measured[0], measured[1][kind]
    value = found["value"]
    low, high = wilson(found["hits"], found["positives"], Z) or (0.0, 1.0)
    off = value < promised.value and differ((value, low, high), _widened(promised))
    ratio = max(value, FLOOR) / max(promised.value, FLOOR)
    severity: Severity = "act" if off and ratio <= HALF else "watch" if off and ratio <= LESS else "steady"
    who = "organic choices" if source == "shadow" else "choices after an answer"
    whose = "" if kind == ALL else f" of {kind} labels"
    promise = "where the evaluation promised" if severity != "steady" else "promised"
    sentence = (
        f"Recall{whose} among {who} is {value:.3f} in {WORDS[window]}, {found['hits']:,} of {found['positives']:,}, "
        f"{promise} {promised.value:.3f} (recall@{cutoff}{_interval(promised)})."
    )
    bucket = None if kind == ALL else kind
    return Finding(
        signal, severity, sentence, bucket, window, value, promised.value, low, high, weight=promised.value - value
    )


def _rules_out_half(finding: Finding) -> bool:
    """Whether a recall that is not off its promise says so, rather than that there are too few positives to tell."""
    return finding.low is not None and finding.expected is not None and finding.low > HALF * finding.expected


def _records(evidence: Evidence) -> Iterator[Finding]:
    figures = evidence.windows["24h"]
    dropped = figures["dropped"]
    if dropped:
        severity: Severity = "act" if dropped > 0.01 * figures["queries"] else "watch"
        yield Finding(
            "records", severity,
            f"{dropped:,} answers of {WORDS['24h']} were not kept for feedback: the disk was slower than they came.",
            None, "24h", dropped, 0.0,
        )  # fmt: skip
    elif "records" not in evidence.troubles and figures["queries"]:
        yield Finding("records", "steady", f"Every answer of {WORDS['24h']} was kept.", None, "24h", 0.0, 0.0)


def _load(figures: Mapping[str, Any]) -> Iterator[Finding]:
    requests = figures["requests"]
    arrived = requests["count"] + requests["shed"]
    told: tuple[tuple[Signal, int, float, str, str], ...] = (
        ("errors", requests["errors"], 0.01, "broke (5xx)", "broke"),
        ("shed", requests["shed"], 0.05, "found the queue full and were refused (429)", "was refused"),
    )
    for signal, failed, most, what, well in told if arrived else ():
        share = failed / arrived
        severity: Severity = "act" if failed >= _FEW_FAILURES and share > most else "watch" if failed else "steady"
        sentence = f"{failed:,} of {arrived:,} requests in {WORDS['5m']} {what}."
        steady = f"None of {arrived:,} requests in {WORDS['5m']} {well}."
        yield Finding(signal, severity, sentence if failed else steady, None, "5m", share, 0.0)


def _all_well(evidence: Evidence) -> str:
    hour = evidence.windows["1h"]
    window = "1h" if hour["queries"] else "24h"
    queries = evidence.windows[window]["queries"]
    return f"The answers are what the release promised: {queries:,} queries in {WORDS[window]}."


def _widened(recall: OfflineRecall) -> tuple[float, float, float]:
    """An offline recall with its 95 % interval made one of 99.9 %."""
    if recall.low is None or recall.high is None:
        return recall.value, recall.value, recall.value
    wider = Z / Z_USUAL
    return (
        recall.value,
        recall.value - wider * (recall.value - recall.low),
        recall.value + wider * (recall.high - recall.value),
    )


def _interval(recall: OfflineRecall) -> str:
    return "" if recall.low is None or recall.high is None else f", {recall.low:.3f}–{recall.high:.3f}"


def _days(days: float) -> str:
    whole = int(days)
    if not whole:
        return "less than a day"
    return "a day" if whole == 1 else f"{whole} days"
