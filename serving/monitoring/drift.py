"""Whether the answers are what held-out queries get: shares by bucket, scores, coverage, and the dials asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.dial_bins import WIDTH
from longtail.serving.monitoring.findings import (
    FLOOR,
    HALF,
    LESS,
    MORE,
    TWICE,
    WORDS,
    Z_USUAL,
    Evidence,
    Finding,
    Severity,
    Signal,
    Z,
    differ,
    percent,
    too_few,
)
from longtail.serving.monitoring.windows import wilson

Baseline = Mapping[str, Any]
"""`baseline` of the report."""

_MINUTE_SHARE, _NEAR_SHARE = 1e-3, 5e-3
_SHIFTED, _DRIFTED = 0.1, 0.25
_CHI_SQUARE = {2: 13.815510557964274, 9: 27.877164871256568}
"""99.9 % quantiles by degrees of freedom."""
_OTHER_DIALS = 0.1


def drift_findings(evidence: Evidence) -> Iterator[Finding]:
    """One finding for every signal and bucket, over the last hour, or the last day where the hour cannot tell."""
    baseline, day = evidence.baseline, evidence.windows["24h"]
    if not day["queries"]:
        yield Finding("share_drift", "unknown", f"No queries in {WORDS['24h']}: there is nothing to judge yet.")
        return
    if baseline is None:
        sentence = "No baseline: this release was not evaluated offline. Train with a validation split to see drift."
        yield Finding("share_drift", "unknown", sentence)
        return
    judges: list[Callable[[str], Finding | None]] = [
        *(partial(_share, evidence, baseline, bucket) for bucket in BUCKET_NAMES),
        partial(_stability, evidence, baseline, "share_drift", "buckets", 2),
        partial(_stability, evidence, baseline, "score_drift", "scores", 9),
        *(partial(_coverage, evidence, baseline, bucket) for bucket in BUCKET_NAMES),
        partial(_dials, evidence, baseline),
    ]
    for judge in judges:
        hour = judge("1h")
        found = judge("24h") if hour is None or hour.severity == "unknown" else hour
        if found is not None:
            yield found


def _share(evidence: Evidence, baseline: Baseline, bucket: str, window: str) -> Finding | None:
    figures = evidence.windows[window]["exposures"][bucket]
    share, promised = figures["share"], baseline["shares"][bucket]
    if bucket == "new" and (evidence.added or not (share or promised)):
        return None  # labels added since have no promise, and take their share from the others
    if share is None:
        return too_few("share_drift", window, evidence, bucket)
    low, high = wilson(share * figures["telling"], figures["telling"], Z) or (0.0, 1.0)
    rests_on = baseline["telling"][bucket] if baseline["telling"] else 0
    off = differ((share, low, high), (promised, *(wilson(promised * rests_on, rests_on, Z) or (promised, promised))))
    ratio = max(share, FLOOR) / max(promised, FLOOR)
    severity: Severity = "steady"
    if off and (ratio >= TWICE or ratio <= HALF) and max(share, promised) >= _MINUTE_SHARE:
        severity = "act"
    elif off and (ratio >= MORE or ratio <= LESS):
        severity = "watch"
    elif not off and not _narrow(share, promised, figures["telling"]):
        severity = "unknown"
    finding = Finding(
        "share_drift", severity, "", bucket, window, share, promised, low, high,
        weight=(share - promised) * math.log(ratio),
    )  # fmt: skip
    name = bucket.capitalize()
    if severity == "unknown":
        return replace(too_few("share_drift", window, evidence, bucket, finding), weight=finding.weight)
    if severity == "steady":
        sentence = f"{name} gets {percent(share)} of the answers in {WORDS[window]}, promised {percent(promised)}."
    else:
        sentence = (
            f"{name} gets {percent(share)} of the answers in {WORDS[window]} where the release promised "
            f"{percent(promised) + _times(ratio) if promised else 'none'}."
        )
    return replace(finding, sentence=sentence)


def _narrow(share: float, promised: float, telling: float) -> bool:
    """Whether the 95 % interval of a share rules out that it is twice or half its promise, or much else."""
    low, high = wilson(share * telling, telling, Z_USUAL) or (0.0, 1.0)
    near = promised - low < _NEAR_SHARE and high - promised < _NEAR_SHARE
    return near or (HALF * promised < low and (high < TWICE * promised or TWICE * promised >= 1))


def _stability(evidence: Evidence, baseline: Baseline, signal: Signal, of: str, freedom: int, window: str) -> Finding:
    figures = evidence.windows[window]
    index, queries = figures["psi"][of], figures["queries"]
    if index is None:
        return too_few(signal, window, evidence)
    # Scores of one answer are alike, and so are its labels: queries count, not labels.
    by_chance = _CHI_SQUARE[freedom] * (1 / max(queries, 1) + (1 / baseline["queries"] if baseline["queries"] else 0))
    bound = _DRIFTED if index > _DRIFTED else _SHIFTED
    finding = Finding(signal, "steady", "", None, window, index, bound, weight=0.0 if of == "scores" else -1.0)
    what = "Scores are" if of == "scores" else "Shares of head, torso and tail are"
    if index < _SHIFTED:
        sentence = f"{what} distributed as those of held-out queries in {WORDS[window]} (PSI {index:.2f})."
        return replace(finding, expected=_SHIFTED, sentence=sentence)
    if index <= by_chance:
        return too_few(signal, window, evidence, finding=finding)
    why = ": other queries, features or dials than those it was measured with" if of == "scores" else ""
    sentence = f"{what} not distributed as those of held-out queries in {WORDS[window]} (PSI {index:.2f}){why}."
    return replace(finding, severity="act" if index > _DRIFTED else "watch", sentence=sentence)


def _coverage(evidence: Evidence, baseline: Baseline, bucket: str, window: str) -> Finding | None:
    """Coverage only grows with answers, so it is lost where more of them cover less than the baseline did."""
    figures, place = evidence.windows[window], BUCKET_NAMES.index(bucket)
    size = evidence.bucket_sizes[place]
    each = 1.0 if evidence.counted is None else size / max(evidence.counted[place], 1)
    labels = sum(of["count"] for of in figures["exposures"].values())
    if not baseline["coverage"] or labels < baseline["queries"] * baseline["k"]:
        return None
    covered, promised = figures["exposures"][bucket]["coverage"], baseline["coverage"][bucket]
    if not promised:
        return None
    # Counts of labels covered, Poisson at most; of a part that stands for all, as many times as wide, and of the
    # promise's width, for a part may have found none.
    spread = promised + (covered if each == 1 else each * max(promised, covered))
    off = (promised - covered) * size > Z * math.sqrt(spread * size)
    ratio = covered / promised
    severity: Severity = "act" if off and ratio <= HALF else "watch" if off and ratio <= LESS else "steady"
    words = "where as many" if severity != "steady" else "as many"
    return Finding(
        "coverage_loss", severity,
        f"{percent(covered)} of the {bucket} labels are in any answer of {WORDS[window]}, {words} answers to held-out "
        f"queries had {percent(promised)}.",
        bucket, window, covered, promised, weight=promised - covered,
    )  # fmt: skip


def _dials(evidence: Evidence, baseline: Baseline, window: str) -> Finding | None:
    """Whether queries ask for the λ and μ that everything else is held against."""
    counted = evidence.windows[window]["dials"]
    others = []
    for dial, symbol in (("bias_removal", "λ"), ("popularity_weight", "μ")):
        total, usual = sum(one["queries"] for one in counted[dial]), baseline[dial]
        others.append((0.0, symbol, usual, 0.0, 0.0))
        apart = [one for one in counted[dial] if abs(one["at"] - usual) > WIDTH / 2 + 1e-6]
        if apart:
            most = max(apart, key=lambda one: one["queries"])
            share = sum(one["queries"] for one in apart) / total
            others.append((share, symbol, usual, most["at"], most["queries"] / total))
    share, symbol, usual, most_at, most_share = max(others)
    queries = evidence.windows[window]["queries"]
    if not queries:
        return None
    low, high = wilson(share * queries, queries, Z) or (0.0, 1.0)
    severity: Severity = "watch" if low > _OTHER_DIALS else "steady"
    if share == 0:
        sentence = f"Every query in {WORDS[window]} asks for the λ and μ that the release was measured at."
    else:
        sentence = (
            f"{percent(share)} of the queries in {WORDS[window]} ask for another {symbol} than the {usual:.2f} that "
            f"the release was measured at, most of them for {most_at:.2f} ({percent(most_share)}): shares and scores "
            "move with it."
        )
    return Finding("dials", severity, sentence, None, window, share, 0.0, low, high)


def _times(ratio: float) -> str:
    if ratio >= 1:
        return f", {ratio:.1f} times as much"
    return f", {100 * ratio:.0f} % of it"
