"""Judge all signals in one verdict.

A signal is judged over the last hour, or over the last day if the hour has too few answers; load over five minutes.
Every answer is held against the promise at its own λ and length; answers that the release promises nothing for, such as
those restricted to some labels, are not judged. A figure deviates from its promise if

- the difference is significant: the 99.9 % interval of the difference excludes 0 [Newcombe 1998]. Every bucket is
  tested every few seconds, so at 95 % false alarms would be permanent. Intervals are exact binomial ones with the
  number of queries as the number of observations, because the labels of one answer are correlated;
- and the difference matters: a quarter more or a fifth less is to be watched, twice or half calls for action. For PSI
  the limits are the usual 0.1 and 0.25 [Siddiqi 2006], above the value expected by chance, (1/n + 1/m)·χ² for n queries
  against m [Yurdakul & Naranjo 2020].

If the difference is not significant, but the interval includes twice or half the promise, the signal is unknown.

Unknown ids have no promise. Their share is held against the rest of the last day, and against one half: a release that
does not know most ids that it receives was trained on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from longtail.bundle import BUCKET_NAMES
from longtail.serving.monitoring.baseline import ALL
from longtail.serving.monitoring.intervals import binomial_interval
from longtail.serving.monitoring.records import ID_KINDS, RESTRICTIONS, IdKind

Severity = Literal["steady", "unknown", "watch", "act"]
Signal = Literal[
    "label_log", "refused_release", "engine", "experiments", "records", "clock", "errors", "shed", "evaluation",
    "unknown_ids", "restricted", "floors", "organic_recall", "feedback_recall", "share_drift", "score_drift", "refresh",
    "stale_release",
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
_MOST, _NEARLY_ALL, _JUMP, _LARGE_JUMP = 0.5, 0.9, 0.02, 0.1
"""Shares of unknown ids, and differences to the rest of the day, that are to be watched and that call for action."""
_MOST_QUERIES = 1 << 24
_ID_WORDS: dict[IdKind, str] = {
    "query": "ids in the features of queries", "history": "entries of histories", "feedback": "labels of feedback",
}  # fmt: skip
_SPELLING = "the spelling of the ids that requests send; GET /v1/release has an example of known ones"
_IDS_FIRST = "the unknown ids first, which explain it"
_WATCHED: tuple[Signal, ...] = "clock", "refresh"
"""Present problems with which the release answers on as before, and nothing is lost."""
_LOOK_AT: dict[Signal, str] = {
    "label_log": "the service's log, and whether the state directory or database can be read",
    "refused_release": "the service's log, and longtail-serve check for the release that was published",
    "engine": "the server that holds the index, and the network between",
    "experiments": "experiments.toml, and the service's log, which names the arm",
    "records": "the disk, database or broker of LONGTAIL_EVENTS",
    "clock": "the clock of the machine, and its synchronisation",
    "errors": "the service's log, by the request_id of a failed answer",
    "shed": "the load, LONGTAIL_QUEUE_LIMIT, and the number of workers or replicas",
    "evaluation": "what changed after the evaluation: the counts, log p_n and embeddings of the release do not belong "
    "together; build and publish again, or roll back",
    "unknown_ids": _SPELLING,
    "restricted": "the clients that send buckets, allow or filter: what these leave out is in no answer of theirs",
    "floors": "the columns and buckets that at_least names: too few of their labels may be answered",
    "organic_recall": "the features that clients send with organic feedback, and the age of the training data",
    "feedback_recall": "how clients show the answers, and which answer_id they send back",
    "share_drift": "the features that queries send, and what was retrained or rebuilt: λ, the priors and k of each "
    "answer are accounted for, so that the queries or the release differ from those of the evaluation",
    "score_drift": "the features that queries send, such as ids, missing ones and units: the dials are accounted for",
    "refresh": "the service's log, and the memory of its machine; `longtail-index refresh` does the same by hand",
    "stale_release": "the job that trains and publishes",
}
"""Where the cause of a signal is to be looked for."""
_WORDS = {"5m": "the last 5 minutes", "1h": "the last hour", "24h": "the last 24 hours"}


@dataclass(frozen=True, slots=True)
class SignalFinding:
    """Result of one signal in one bucket, or in all (None)."""

    signal: Signal
    severity: Severity
    sentence: str
    bucket: str | None = None
    window: str | None = None
    observed: float | None = None
    expected: float | None = None
    low: float | None = None
    high: float | None = None
    look_at: str | None = None
    enough: int | None = None
    """Queries of the window with which an unknown signal could be judged."""


def judge(
    report: Mapping[str, Any], troubles: Mapping[Signal, str], *, age_days: float | None = None
) -> dict[str, Any]:
    """Create `verdict` of GET /v1/monitoring, worst finding first.

    Args:
        troubles: sentences about present problems, by signal.
        age_days: age of the training data.
    """
    windows, day = report["windows"], report["windows"]["24h"]
    findings = [SignalFinding(name, "watch" if name in _WATCHED else "act", text) for name, text in troubles.items()]
    findings += _judge_counts(windows["5m"]["requests"], day, age_days)
    findings += _judge_evaluation(report["baseline"])
    findings += _judge_unknown_ids(report)
    findings += _judge_restricted(windows["1h"], day)
    findings += _judge_floors(windows["1h"]["floored"])
    if sentence := _explain_silence(report):
        findings.append(SignalFinding("share_drift", "unknown", sentence))
    hour, of_day = (dict(_judge_window(report, name, windows[name])) for name in ("1h", "24h"))
    for key, finding_of_hour in hour.items():
        is_unknown = finding_of_hour is None or finding_of_hour.severity == "unknown"
        finding = of_day[key] if is_unknown else finding_of_hour
        if finding is not None and finding.severity != "steady":
            findings.append(finding)
    findings.sort(
        key=lambda finding: (
            -SEVERITIES.index(finding.severity),
            finding.signal != "restricted",  # why there are too few answers to judge
            -(finding.enough or 0),
            SIGNALS.index(finding.signal),
            finding.observed is not None,  # what is broken now, before what was counted
            -_measure_gap(finding),
        )
    )
    explained = [_add_advice(finding, findings) for finding in findings]
    queries, judged = day["queries"], day["judged"]["queries"]
    counted = f"{queries:,} queries" if judged == queries else f"{judged:,} of {queries:,} queries have a promise"
    well = f"The answers are what the release promised: {counted} in {_WORDS['24h']}."
    return {
        "severity": explained[0].severity if explained else "steady",
        "headline": _write_headline(explained[0]) if explained else well,
        "findings": [asdict(finding) for finding in explained],
    }


def _write_headline(worst: SignalFinding) -> str:
    return worst.sentence if worst.look_at is None else f"{worst.sentence} Look at {worst.look_at}."


def _add_advice(finding: SignalFinding, findings: Sequence[SignalFinding]) -> SignalFinding:
    if finding.severity not in ("watch", "act"):
        return finding
    moved = finding.signal in ("organic_recall", "share_drift", "score_drift")
    caused = moved and any(other_finding.signal == "unknown_ids" for other_finding in findings)
    return replace(finding, look_at=_IDS_FIRST if caused else _LOOK_AT[finding.signal])


def _explain_silence(report: Mapping[str, Any]) -> str | None:
    day = report["windows"]["24h"]
    if not day["queries"]:
        return f"No queries of this release in {_WORDS['24h']}: there is nothing to judge yet."
    if report["baseline"] is None:
        return "No baseline: this release was not evaluated offline. Train with a validation split to see drift."
    if not day["judged"]["queries"]:
        return (
            f"None of the {day['queries']:,} queries of this release in {_WORDS['24h']} has a promise: all are for "
            "similar labels, or set buckets, allow, filter, explore, at_least, mmr, max_per, or weights other than "
            "the default of μ, ω or priors, or too many labels have come or ended by their lifetimes since the release "
            "was loaded."
        )
    return None


def _judge_evaluation(baseline: Mapping[str, Any] | None) -> Iterator[SignalFinding]:
    """Judge answers to held-out queries against the evaluation.

    Yields at most one finding, at the λ where the shares differ most. Permuted counts show at λ = 0 best, where they
    rank nothing and only name the buckets.
    """
    differences: list[tuple[float, SignalFinding]] = []
    for evaluated in () if baseline is None else baseline["evaluated"]:
        for bucket in BUCKET_NAMES:
            share, promised = evaluated["now"][bucket], evaluated["shares"][bucket]
            ratio = max(share, _FLOOR) / max(promised, _FLOOR)
            if _HALF < ratio < _TWICE:
                continue
            queries = baseline["queries"] if baseline is not None else 0
            share_bounds, promised_bounds = (
                (figure, *binomial_interval(figure, queries, _SURE)) for figure in (share, promised)
            )
            if _differ(share_bounds, promised_bounds):
                sentence = (
                    f"The release answers its held-out queries unlike its evaluation: {bucket} gets {_percent(share)} "
                    f"at λ = {evaluated['bias_removal']:g}, k = {evaluated['k']}, where the evaluation had "
                    f"{_percent(promised)}."
                )
                finding = SignalFinding("evaluation", "act", sentence, bucket, None, share, promised, *share_bounds[1:])
                differences.append((abs(share - promised), finding))
    if differences:
        yield max(differences, key=lambda difference: difference[0])[1]


def _judge_unknown_ids(report: Mapping[str, Any]) -> Iterator[SignalFinding]:
    for kind in ID_KINDS:
        minutes, hour = (report["windows"][name]["ids"][kind] for name in ("5m", "1h"))
        before_hour = report["ids_before"][kind]
        counts = ("senders", "ids", "unknown")
        before_minutes = {name: before_hour[name] + hour[name] - minutes[name] for name in counts}
        of_minutes = _judge_ids(kind, "5m", minutes, before_minutes)
        finding = of_minutes if of_minutes is not None else _judge_ids(kind, "1h", hour, before_hour)
        if finding is not None:
            yield finding


def _judge_ids(kind: IdKind, window: str, ids: Mapping[str, Any], before: Mapping[str, Any]) -> SignalFinding | None:
    if not ids["unknown"]:
        return None
    share = ids["unknown"] / ids["ids"]
    usual = before["unknown"] / before["ids"] if before["ids"] else 0.0
    low, high = binomial_interval(share, ids["senders"], _SURE)
    severity: Severity = "steady"
    if before["senders"] and share - usual >= _JUMP and share >= _MORE * usual:
        bounds = binomial_interval(usual, before["senders"], _SURE)
        if _differ((share, low, high), (usual, *bounds)):
            severity = "act" if share >= _TWICE * usual and share - usual >= _LARGE_JUMP else "watch"
    if low >= _MOST and severity != "act":
        severity = "act" if share >= _NEARLY_ALL else "watch"
    if severity == "steady":
        return None
    compared = f", {_percent(usual)} in the rest of the day" if before["senders"] else ""
    sentence = (
        f"{_percent(share)} of the {_ID_WORDS[kind]} are unknown to the release in {_WORDS[window]}, "
        f"{ids['unknown']:,} of {ids['ids']:,}{compared}."
    )
    return SignalFinding(
        "unknown_ids", severity, sentence, None, window, share, usual if before["senders"] else None, low, high
    )


def _judge_restricted(hour: Mapping[str, Any], day: Mapping[str, Any]) -> Iterator[SignalFinding]:
    queries, restricted = hour["queries"], hour["restricted"]
    if not restricted["queries"]:
        return
    share, queries_before = restricted["queries"] / queries, day["queries"] - queries
    usual = (day["restricted"]["queries"] - restricted["queries"]) / queries_before if queries_before else None
    low, high = binomial_interval(share, queries, _SURE)
    severity: Severity = "unknown" if low > _MOST else "steady"
    if usual is not None and share - usual >= _LARGE_JUMP:
        before = (usual, *binomial_interval(usual, queries_before, _SURE))
        severity = "watch" if _differ((share, low, high), before) else severity
    if severity != "steady":
        by_option = ", ".join(f"by {name} {restricted[name]:,}" for name in RESTRICTIONS if restricted[name])
        compared = "" if usual is None else f"; {_percent(usual)} in the rest of the day"
        sentence = (
            f"{restricted['queries']:,} of {queries:,} queries in {_WORDS['1h']} are restricted, so that nothing is "
            f"promised for their answers: {by_option}{compared}."
        )
        yield SignalFinding("restricted", severity, sentence, None, "1h", share, usual, low, high)


def _judge_floors(floored: Mapping[str, int]) -> Iterator[SignalFinding]:
    if not floored["unmet"]:
        return
    share = floored["unmet"] / floored["queries"]
    low, high = binomial_interval(share, floored["queries"], _SURE)
    if low >= _JUMP:
        counts = f"{floored['unmet']:,} of {floored['queries']:,}"
        sentence = f"{counts} answers with floors in {_WORDS['1h']} do not meet them all."
        yield SignalFinding("floors", "watch", sentence, None, "1h", share, 0.0, low, high)


def _judge_counts(load: Mapping[str, Any], day: Mapping[str, Any], age_days: float | None) -> Iterator[SignalFinding]:
    if dropped := day["dropped"]:
        severity: Severity = "act" if dropped > 0.01 * day["queries"] else "watch"
        sentence = f"{dropped:,} events of {_WORDS['24h']} were not kept: LONGTAIL_EVENTS takes none, or too slowly."
        yield SignalFinding("records", severity, sentence, None, "24h", dropped, 0.0)
    arrived = load["count"] + load["shed"]
    of_load: tuple[tuple[Signal, float, str], ...] = (
        ("errors", 0.01, "broke (5xx)"), ("shed", 0.05, "found the queue full and were refused (429)"),
    )  # fmt: skip
    for signal, most, what in of_load:
        if failed := load[signal]:
            severity = "act" if failed >= 5 and failed > most * arrived else "watch"
            sentence = f"{failed:,} of {arrived:,} requests in {_WORDS['5m']} {what}."
            yield SignalFinding(signal, severity, sentence, None, "5m", failed / arrived, 0.0)
    if age_days is not None and age_days > _STALE_DAYS:
        sentence = f"The release's training data is {age_days:.0f} days old; more than {_STALE_DAYS:g} is stale."
        yield SignalFinding("stale_release", "watch", sentence, observed=age_days, expected=_STALE_DAYS)


def _judge_window(
    report: Mapping[str, Any], window: str, figures: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], SignalFinding | None]]:
    judged, answers = figures["judged"], figures["queries"]
    for source in ("organic", "feedback"):
        for kind in (ALL, *BUCKET_NAMES):
            yield (source, kind), _judge_recall(window, judged["recall"][source][kind], source, kind)
    baseline = report["baseline"]
    if baseline is not None and report["windows"]["24h"]["judged"]["queries"]:
        for bucket in BUCKET_NAMES:
            share, promised = judged["shares"][bucket], judged["promised"][bucket]
            # Added labels have no promise, and their exposures reduce the shares of the other buckets.
            is_judged = bucket != "new" or (not report["labels"]["added"] and (share or promised))
            finding = (
                _judge_share(window, bucket, share, promised, judged["queries"], baseline["queries"], answers)
                if is_judged
                else None
            )
            yield ("share", bucket), finding
        yield ("scores", ALL), _judge_scores(
            window, figures["psi"]["scores"], judged["queries"], baseline["queries"], answers
        )  # fmt: skip


def _judge_share(
    window: str, bucket: str, share: float | None, promised: float, queries: int, queries_before: int, answers: int
) -> SignalFinding:
    if share is None:
        return _too_few("share_drift", bucket, window, queries, None, answers)
    low, high = binomial_interval(share, queries, _SURE)
    off = _differ((share, low, high), (promised, *binomial_interval(promised, queries_before, _SURE)))
    ratio = max(share, _FLOOR) / max(promised, _FLOOR)
    severity: Severity = "steady"
    if off and not _HALF < ratio < _TWICE and max(share, promised) >= _MINUTE_SHARE:
        severity = "act"
    elif off and not _LESS < ratio < _MORE:
        severity = "watch"
    elif not off and not _is_decisive(share, promised, queries):
        # By two digits, so that the cache of this long computation is hit.
        return _too_few("share_drift", bucket, window, queries, _count_decisive(float(f"{promised:.2g}")), answers)
    times = f", {ratio:.1f} times as much" if ratio >= 1 else f", {100 * ratio:.0f} % of it"
    covered = "answers" if queries == answers else f"{queries:,} of {answers:,} answers that the promise covers"
    sentence = (
        f"{bucket.capitalize()} gets {_percent(share)} of the {covered} in {_WORDS[window]} where the release promised "
        f"{_percent(promised) + times if promised else 'none'}."
    )
    return SignalFinding("share_drift", severity, sentence, bucket, window, share, promised, low, high)


def _is_decisive(share: float, promised: float, queries: int) -> bool:
    """Return whether this number of queries excludes half and twice the promise."""
    near, far = binomial_interval(share, queries, _USUAL)
    is_clear = _HALF * promised < near and (far < _TWICE * promised or _TWICE * promised >= 1)
    return is_clear or max(promised - near, far - promised) < _NEAR_SHARE


@lru_cache(1024)
def _count_decisive(promised: float) -> int:
    """Compute how many queries judge a bucket with certainty."""
    enough = 1
    while enough < _MOST_QUERIES and not _is_decisive(promised, promised, enough):
        enough *= 2
    fewer = enough // 2
    while enough - fewer > max(enough // 20, 1):
        middle = (fewer + enough) // 2
        fewer, enough = (fewer, middle) if _is_decisive(promised, promised, middle) else (middle, enough)
    return enough


def _judge_scores(window: str, index: float | None, queries: int, queries_before: int, answers: int) -> SignalFinding:
    by_chance = _CHI_SQUARE * (1 / max(queries, 1) + 1 / max(queries_before, 1))
    if index is None or 0.1 <= index <= by_chance:
        least = 0.1 if index is None else index
        chance_before = _CHI_SQUARE / max(queries_before, 1)
        enough = math.ceil(_CHI_SQUARE / (least - chance_before)) if least > chance_before else None
        return _too_few("score_drift", None, window, queries, enough, answers)
    sentence = (
        f"Scores are not distributed as those of held-out queries at the same λ in {_WORDS[window]} "
        f"(PSI {index:.2f}): other queries or features than those it was measured with."
    )
    severity: Severity = "act" if index > 0.25 else "watch" if index > 0.1 else "steady"
    return SignalFinding("score_drift", severity, sentence, None, window, index, 0.25 if index > 0.25 else 0.1)


def _judge_recall(window: str, recall: Mapping[str, Any], source: str, kind: str) -> SignalFinding | None:
    if not recall["positives"]:
        return None
    value, promised = recall["hits"] / recall["positives"], recall["promised"]
    low, high = binomial_interval(value, recall["positives"], _SURE)
    between, wide = "", (promised, promised, promised)
    if recall["low"] < promised or recall["high"] > promised:
        between = f" ({recall['low']:.3f}–{recall['high']:.3f})"
        wide = (
            promised, promised + _WIDER * (recall["low"] - promised), promised + _WIDER * (recall["high"] - promised),
        )  # fmt: skip
    off, ratio = value < promised and _differ((value, low, high), wide), value / max(promised, _FLOOR)
    severity: Severity = "act" if off and ratio <= _HALF else "watch" if off and ratio <= _LESS else "steady"
    if severity == "steady" and low <= _HALF * promised and window == "1h":
        severity = "unknown"  # the longer window may decide
    sentence = (
        f"Recall{'' if kind == ALL else f' of {kind} labels'} among "
        f"{'organic choices' if source == 'organic' else 'choices from answers'} is {value:.3f} in {_WORDS[window]}, "
        f"{recall['hits']:,} of {recall['positives']:,}, where the evaluation promised "
        f"{promised:.3f}{between} at the same λ."
    )
    signal: Signal = "organic_recall" if source == "organic" else "feedback_recall"
    return SignalFinding(signal, severity, sentence, None if kind == ALL else kind, window, value, promised, low, high)


def _too_few(
    signal: Signal, bucket: str | None, window: str, queries: int, enough: int | None, answers: int
) -> SignalFinding:
    counted = f"{queries or 'no'} {'query' if queries == 1 else 'queries'} in {_WORDS[window]}"
    if queries != answers:
        counted = f"the promise covers {queries:,} of {answers:,} answers in {_WORDS[window]}"
    what = f"{bucket}'s share" if bucket else "the scores"
    if enough is not None:
        # As many queries were not enough here, so more than these must come.
        enough = max(enough, 2 * queries) if enough <= queries else enough
        digit = 10 ** max(len(str(enough)) - 2, 0)
        enough = math.ceil(enough / digit) * digit
        counted += f"; about {enough:,} would do"
    sentence = f"Too few answers of this release to judge {what}: {counted}."
    return SignalFinding(signal, "unknown", sentence, bucket, window, enough=enough)


def _measure_gap(finding: SignalFinding) -> float:
    observed, expected = finding.observed or 0.0, finding.expected or 0.0
    return (observed - expected) * math.log(max(observed, _FLOOR) / max(expected, _FLOOR))


def _differ(share: tuple[float, float, float], other_share: tuple[float, float, float]) -> bool:
    """Return whether proportions (value, low, high) differ [Newcombe 1998, method 10]."""
    (upper, upper_low, _), (lower, _, lower_high) = (
        (share, other_share) if share[0] > other_share[0] else (other_share, share)
    )
    return upper - lower > math.hypot(upper - upper_low, lower_high - lower)


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.01 or not share else 2}f} %"
