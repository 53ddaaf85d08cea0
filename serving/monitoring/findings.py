"""What a verdict is made of: the evidence, one finding for each signal and bucket, and when two figures differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longtail.serving.monitoring.offline import OfflineFigures

Severity = Literal["steady", "unknown", "watch", "act"]
Signal = Literal[
    "label_log", "refused_release", "engine", "experiments", "records", "errors", "shed", "shadow_recall",
    "feedback_recall", "share_drift", "score_drift", "coverage_loss", "dials", "stale_release",
]  # fmt: skip
SEVERITIES: tuple[Severity, ...] = ("steady", "unknown", "watch", "act")
SIGNALS: tuple[Signal, ...] = (
    "label_log", "refused_release", "engine", "experiments", "records", "errors", "shed", "shadow_recall",
    "feedback_recall", "share_drift", "score_drift", "coverage_loss", "dials", "stale_release",
)  # fmt: skip
"""In the order in which those of one severity are told."""

Z, Z_USUAL = 3.290526731491926, 1.959963984540054
"""Standard normal quantiles of 99.95 % and 97.5 %: of the intervals here, and of those elsewhere."""
MORE, LESS, TWICE, HALF = 1.25, 0.8, 2.0, 0.5
"""Ratios to a promise: from the inner two on a figure is to be watched, from the outer two on it calls for action."""
FLOOR = 1e-4
"""Share of a bucket that got nothing, so that its ratio to another is finite."""
WORDS = {"5m": "the last 5 minutes", "1h": "the last hour", "24h": "the last 24 hours"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one signal says.

    Attributes:
        signal: which.
        severity: how bad it is.
        sentence: what an operator reads.
        bucket: that it is about; None: all.
        window: that it was judged over; None: it is of now.
        observed, expected: the figure and what it was held against.
        low, high: 99.9 % interval of what was observed.
        weight: which of several of one signal is worse.
    """

    signal: Signal
    severity: Severity
    sentence: str
    bucket: str | None = None
    window: str | None = None
    observed: float | None = None
    expected: float | None = None
    low: float | None = None
    high: float | None = None
    weight: float = field(default=0.0, compare=False)

    def report_json(self) -> dict[str, Any]:
        """As GET /v1/monitoring shows it."""
        names = ("signal", "bucket", "severity", "window", "observed", "expected", "low", "high", "sentence")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is judged.

    Attributes:
        windows: of the report.
        baseline: of the report.
        offline: of the release in service.
        bucket_sizes: labels of each bucket.
        counted: those of them whose exposures are counted; None: all.
        added: labels added since the release was built.
        troubles: sentences on what is broken now, by signal.
        shadow_k: labels retrieved for an organic interaction.
        age_days: of the release's training data; None: not known.
        stale_days: beyond which that is too old; None: never.
    """

    windows: Mapping[str, Mapping[str, Any]]
    baseline: Mapping[str, Any] | None
    offline: OfflineFigures
    bucket_sizes: Sequence[int]
    counted: Sequence[int] | None = None
    added: int = 0
    troubles: Mapping[Signal, str] = field(default_factory=dict)
    shadow_k: int = 20
    age_days: float | None = None
    stale_days: float | None = None


def too_few(
    signal: Signal, window: str, evidence: Evidence, bucket: str | None = None, finding: Finding | None = None
) -> Finding:
    """That a signal cannot be judged.

    Args:
        signal: which.
        window: that it was looked for in.
        evidence: what is judged.
        bucket: that it is about; None: all.
        finding: what was found for want of more, if anything.
    """
    queries = evidence.windows[window]["queries"]
    what = "the scores" if signal == "score_drift" else f"{bucket}'s share" if bucket else "the shares"
    seen = "queries are" if queries != 1 else "query is"
    number = "No" if not queries else f"{queries:,}"
    told = ""
    if finding is not None and bucket is not None and finding.observed is not None and finding.expected is not None:
        told = f" ({percent(finding.observed)}, promised {percent(finding.expected)})"
    sentence = f"Too few answers in {WORDS[window]} to judge {what}{told}: {number} {seen} counted."
    return replace(finding or Finding(signal, "unknown", "", bucket, window), severity="unknown", sentence=sentence)


def differ(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    """Whether two proportions with their intervals differ, by the interval of their difference [Newcombe 1998, 10]."""
    (upper, upper_low, _), (lower, _, lower_high) = (one, other) if one[0] > other[0] else (other, one)
    return upper - lower > math.hypot(upper - upper_low, lower_high - lower)


def percent(share: float) -> str:
    """A share in words, small ones to a hundredth of a percent."""
    digits = 1 if share >= 0.01 or not share else 2
    return f"{100 * share:.{digits}f} %"
