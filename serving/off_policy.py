"""`longtail-serve off-policy`: what other λ would have brought, from answers that explored, without trying them.

For a query and a λ' the answer T is known: the release answers again. Which of its labels would have been chosen is
known of those that were shown, and they were shown with known propensities P. So

    v(λ') = 1/n · Σ over answers Σ over their shown labels of 1[in T] · r / P,    r = 1 if it was chosen, else 0

estimates the labels chosen per answer at λ' [Horvitz, Thompson 1952, "A generalization of sampling without
replacement"], without bias as far as

- whether a label is chosen depends neither on its place nor on its neighbours: the document-based click model and the
  item estimator of [Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay, Wen 2018, "Offline evaluation of ranking
  policies with click models"];
- P > 0. Slots of T whose labels the log could not show bring nothing here. Their share is no guess: 1[in T] / P, added
  up over shown labels, estimates the slots that are **covered**. Below `COVERED` the log cannot tell, unless λ' is
  better without them.

The **difference** is to the same queries at their own λ without exploring, so that labels of both answers cancel out.
Those answers are covered, by the way that slots are explored. **Recall** is v(λ') of what all labels that the log could
show would have brought, Σ r / P. **Exposures** need no choices: they are counted.

**Bounds** are those of `longtail-serve experiments` (`compare.py`), of sums by unit, which hold at every look; all λ'
of a report share the error. Two things differ, since an answer's term may be hundreds of choices. ρ there is in squared
hits; here in the mean square of a shown label's coefficient. And rare labels of a large coefficient add nothing to the
variance until one of them is chosen: V is at least what it would be if all labels with a coefficient were chosen at the
same rate. Bounds also allow for slots that are not covered, by the lower bound of their share: each may bring as much
as a covered one, by its upper bound, or one choice where none is sure to be covered.

Legend: `S` labels that answers showed, `U` units, `G` settings: the answers' own λ, then every λ' of the grid.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Bools, Float64, Int8, Int64
from longtail.index import Releases
from longtail.serving.compare import ALPHA, Rate, boundary
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import Query
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.events.folder import kept_since
from longtail.serving.events.reader import IN_WINDOW, ONCE, events_of
from longtail.state import Place, read_label_changes

COVERED = 0.95
"""Share of the slots that must be covered, by the lower bound, for the log to tell."""
Interval = dict[str, float]
"""A figure and the bounds that hold at every look: `value`, `low`, `high`."""
_AT_ONCE = 512
"""Queries of a search."""
_ALWAYS = 1 - 1e-6
"""Propensity from which on chance had no say."""
_ANSWERS = f"""
WITH once AS ({ONCE}),
answered AS (
    SELECT DISTINCT ON (answer) * FROM once WHERE kind = 'answer' AND len(labels) > 0 AND {IN_WINDOW}
),
each AS (
    SELECT answer, unnest(labels) AS label FROM once
    WHERE kind = 'choice' AND ($event IS NULL OR event = $event)
),
chosen AS (SELECT answer, list(DISTINCT label) AS chosen FROM each GROUP BY answer)
SELECT answered.release, unit, labels, propensities, buckets, features, options, chosen
FROM answered LEFT JOIN chosen USING (answer) ORDER BY time, answer
"""
"""A label that was clicked and bought is one label chosen."""
_OTHER_RELEASE = "of other releases"
_NOT_EXPLORED = "that did not explore"
_NOT_KNOWN = "whose query is not kept (LONGTAIL_RECORD_FEATURES, or too long)"
_REFUSED = "whose query the release does not take at every λ"
_CHANGED = "that the release does not answer so any more"


class OffPolicyError(ServingError):
    """A log that says nothing about other λ, or a report that cannot be drawn."""


@dataclass(frozen=True, slots=True)
class Log:
    """Labels that answers showed, and what the same queries are answered at other λ."""

    at_G: tuple[float | None, ...]
    """λ of each setting; None: each answer's own."""
    propensities_S: Float64
    chosen_S: Float64
    """1 where a label was chosen, else 0."""
    buckets_S: Int8
    unit_S: Int64
    held_GS: Bools
    """Whether each setting's answer holds the label."""
    answers_U: Float64
    slots_GU: Float64
    """Labels of each setting's answers."""
    exposures_GB: Int64
    """The same by bucket."""
    changed_G: Int64
    """Answers that hold other labels than at their own λ."""
    left_out: Mapping[str, int]
    """Answers left out, by why."""


def estimate(
    coefficients_S: Float64,
    chosen_S: Float64,
    unit_S: Int64,
    trials_U: Float64,
    *,
    expected_S: Float64 | None = None,
    alpha: float = ALPHA,
) -> Interval | None:
    """Estimate Σ coefficient · chosen per trial, with bounds that hold at every look but for a chance `alpha`.

    Args:
        coefficients_S: 1 / P of shown labels that count, 0 of others.
        chosen_S: 1 where a label was chosen, else 0.
        unit_S: place of each label's unit in `trials_U`.
        trials_U: answers, or Σ `expected_S` · chosen.
        expected_S: coefficients of the trials, if these depend on chance.

    Returns:
        None of no trials.
    """
    rate = Rate(_by_unit(unit_S, coefficients_S * chosen_S, len(trials_U)), trials_U)
    value = rate.value
    if value is None:
        return None
    residuals_S = coefficients_S if expected_S is None else coefficients_S - value * expected_S
    counted_S = residuals_S != 0
    labels, squares = np.count_nonzero(counted_S), float(residuals_S @ residuals_S)
    if not labels:
        return {"value": value, "low": value, "high": value}
    scale = math.sqrt(squares / labels)
    variance = max(rate.variance, float(chosen_S[counted_S].mean()) * squares)
    reach = scale * boundary(variance / scale**2, alpha) / rate.trials
    return {"value": value, "low": value - reach, "high": value + reach}


def _by_unit(unit_S: Int64, values_S: Float64, units: int) -> Float64:
    sums_U: Float64 = np.bincount(unit_S, values_S, units).astype(np.float64, copy=False)
    return sums_U


def read_log(
    retriever: Retriever,
    folder: Path,
    window: tuple[float, float],
    at: Sequence[float],
    *,
    event: str | None = None,
    unit: str | None = None,
) -> Log:
    """Read answers that explored, and answer their queries at every λ.

    Args:
        at: other λ.
        window: from and up to when, in seconds since 1970.
        event: which choices count, such as `purchase`; None: all.
        unit: feature whose value is the unit; None: the experiment's, else all features.

    Raises:
        StateError: events that cannot be read.
        OffPolicyError: no answer is left.
    """
    left_out = Counter[str]()
    units: dict[Any, int] = {}
    parts: dict[str, list[Any]] = {name: [] for name in ("propensities", "chosen", "buckets", "unit", "held", "slots")}
    exposures_GB = np.zeros((len(at) + 1, len(BUCKET_NAMES)), np.int64)
    changed_G = np.zeros(len(at) + 1, np.int64)
    with events_of(folder) as connection:
        params = {"since": window[0], "until": window[1], "event": event}
        for batch in connection.sql(_ANSWERS, params=params).to_arrow_reader(_AT_ONCE):
            kept = [(row, query) for row in batch.to_pylist() if (query := _query(row, retriever, at, left_out))]
            answers_G = [_answers(retriever, [query for _, query in kept], each) for each in (None, *at)]
            for place, (row, query) in enumerate(kept):
                answer_G = [answers[place] for answers in answers_G]
                if not _shown_always(row, query) <= answer_G[0].keys():
                    left_out[_CHANGED] += 1
                    continue
                features = json.loads(row["features"])
                key = json.dumps(features[unit]) if unit in features else row["unit"] or row["features"]
                chosen = set(row["chosen"] or ())
                parts["propensities"] += row["propensities"]
                parts["buckets"] += row["buckets"]
                parts["chosen"] += [label in chosen for label in row["labels"]]
                parts["unit"] += [units.setdefault(key, len(units))] * len(row["labels"])
                held_GK = [[label in answer for label in row["labels"]] for answer in answer_G]
                parts["held"].append(np.array(held_GK, np.bool_))
                parts["slots"].append((units[key], *map(len, answer_G)))
                changed_G += [answer.keys() != answer_G[0].keys() for answer in answer_G]
                for counts_B, answer in zip(exposures_GB, answer_G, strict=True):
                    counts_B += np.bincount([*answer.values()], minlength=len(BUCKET_NAMES))
    if not units:
        why = "".join(f"; left out: {count:,} answers {what}" for what, count in left_out.items())
        raise OffPolicyError(
            f"{folder}: expected answers of release {retriever.name} that explored, found none{why}; queries explore "
            "with `explore`, and LONGTAIL_ANSWER_SHARE keeps their answers"
        )
    unit_N, *slots_GN = np.array(parts["slots"], np.int64).T
    return Log(
        at_G=(None, *at),
        propensities_S=np.array(parts["propensities"], np.float64),
        chosen_S=np.array(parts["chosen"], np.float64),
        buckets_S=np.array(parts["buckets"], np.int8),
        unit_S=np.array(parts["unit"], np.int64),
        held_GS=np.concatenate(parts["held"], axis=1),
        answers_U=np.bincount(unit_N).astype(np.float64),
        slots_GU=np.stack([np.bincount(unit_N, slots_N) for slots_N in slots_GN]),
        exposures_GB=exposures_GB,
        changed_G=changed_G,
        left_out=left_out,
    )


def _query(row: Mapping[str, Any], retriever: Retriever, at: Sequence[float], left_out: Counter[str]) -> Query | None:
    """Return the query of an answer; None, and counted, of one that says nothing about the release at other λ."""
    if row["release"] != retriever.name:
        left_out[_OTHER_RELEASE] += 1
    elif row["features"] is None or row["options"] is None:
        left_out[_NOT_KNOWN] += 1
    elif not any((options := json.loads(row["options"])).get("explore", {}).values()):
        left_out[_NOT_EXPLORED] += 1
    else:
        try:
            query = Query.model_validate({**options, "features": json.loads(row["features"]), "display": False})
            for end in (min(at), max(at)):
                retriever.check_options(query.model_copy(update={"bias_removal": end}))
            return query
        except (ValidationError, InvalidRequestError):
            left_out[_REFUSED] += 1
    return None


def _answers(retriever: Retriever, queries: Sequence[Query], at: float | None) -> list[dict[str, int]]:
    """Answer queries without exploring, at their own λ or another: buckets by label."""
    if not queries:
        return []
    other = {} if at is None else {"bias_removal": at}
    found = retriever.retrieve([query.model_copy(update={"explore": {}, **other}) for query in queries])
    ids, buckets = retriever.catalogue.ids_of(found.rows_N).to_pylist(), found.buckets_N.tolist()
    starts = [0, *found.ends_B[:-1]]
    return [
        dict(zip(ids[start:end], buckets[start:end], strict=True))
        for start, end in zip(starts, found.ends_B, strict=True)
    ]


def _shown_always(row: Mapping[str, Any], query: Query) -> set[str]:
    """Return labels that the answer without exploring holds, unless the release or its labels changed."""
    explored = {BUCKET_NAMES.index(bucket) for bucket in query.explore}
    shown = zip(row["labels"], row["propensities"], row["buckets"], strict=True)
    return {label for label, propensity, bucket in shown if propensity >= _ALWAYS and bucket not in explored}


def off_policy(
    releases: str | Path,
    folder: Path,
    window: tuple[float, float],
    at: Sequence[float] = (),
    *,
    release: str | None = None,
    state: Place | None = None,
    event: str | None = None,
    unit: str | None = None,
) -> dict[str, Any]:
    """Estimate what a release would bring at other λ, from its answers that explored.

    Args:
        folder: of events.
        window: from and up to when, in seconds since 1970.
        at: other λ; by default those of the release's offline curve, or from 0 to 1 by tenths.
        release: which; CURRENT by default.
        state: the service's, whose added and hidden labels count as they are now.
        event, unit: as of `read_log`.

    Returns:
        The report, as JSON.

    Raises:
        OffPolicyError: no published release, a λ beyond its limits, or nothing in the log.
        StateError: events that cannot be read.
        LongtailIndexError, BundleError, UnservableReleaseError: what is wrong with the release.
    """
    found = Releases(releases)
    name = found.current() if release is None else release
    if name is None:
        raise OffPolicyError(f"{releases}: expected a published release, found none: name one with --release")
    retriever = load_release(found, name)
    with suppress(FileNotFoundError):
        retriever = retriever.with_changes([*read_label_changes(state or found.root / ".state").records()])
    dial = retriever.manifest.bias_removal
    grid = sorted({*at} or {point.bias_removal for point in dial.curve} or {tenth / 10 for tenth in range(11)})
    if at and not dial.minimum <= grid[0] <= grid[-1] <= dial.maximum:
        raise OffPolicyError(f"--at: expected {dial.minimum} <= λ <= {dial.maximum}, received {[*at]}")
    grid = [each for each in grid if dial.minimum <= each <= dial.maximum]
    whole, (since, until) = kept_since(folder), window
    log = read_log(retriever, folder, window, grid, event=event, unit=unit)
    return {
        "release": name,
        "since": _iso(max(since, whole)) if max(since, whole) else None,
        "until": _iso(until),
        "cut": whole > since,
        "answers": int(log.answers_U.sum()),
        "units": len(log.answers_U),
        "chosen": int(log.chosen_S.sum()),
        "left_out": dict(log.left_out),
        "confidence": 1 - ALPHA,
        "settings": settings_of(log),
    }


def settings_of(log: Log) -> list[dict[str, Any]]:
    """Estimate every figure of every setting; the bounds of one figure hold together, over all λ and looks."""
    alpha = ALPHA / (2 * (len(log.at_G) - 1))
    weights_S, answers_U = 1 / log.propensities_S, log.answers_U
    slots_G = (log.slots_GU.sum(axis=1) / answers_U.sum()).tolist()

    def recall(held_S: Float64 | Bools, among_S: Bools) -> Interval | None:
        demand_S = weights_S * among_S
        demand_U = _by_unit(log.unit_S, demand_S * log.chosen_S, len(answers_U))
        held_S = demand_S * held_S
        found = estimate(held_S, log.chosen_S, log.unit_S, demand_U, expected_S=demand_S, alpha=alpha)
        return found and _within(found, 0.0, 1.0)

    settings: list[dict[str, Any]] = []
    for at, held_S, slots_U, slots, counts_B, changed in zip(
        log.at_G, log.held_GS, log.slots_GU, slots_G, log.exposures_GB, log.changed_G, strict=True
    ):
        coefficients_S = weights_S * held_S
        covered = _found(estimate(coefficients_S, np.ones_like(weights_S), log.unit_S, slots_U, alpha=alpha))
        chosen = _found(estimate(coefficients_S, log.chosen_S, log.unit_S, answers_U, alpha=alpha))
        sure = min(max(covered["low"], 0.0), 1.0)
        most = min(1.0, max(chosen["high"], 0.0) / (sure * slots)) if sure else 1.0
        beyond = (1 - sure) * slots * most
        setting: dict[str, Any] = {
            "bias_removal": at,
            "changed": int(changed),
            "exposures": dict(zip(BUCKET_NAMES, (counts_B / max(counts_B.sum(), 1)).tolist(), strict=True)),
            "covered": {"value": min(covered["value"], 1.0), "low": sure},
            "chosen_per_answer": _within(chosen | {"high": chosen["high"] + beyond}, 0.0, math.inf),
            "recall": {"all": recall(held_S, np.ones_like(held_S))}
            | {name: recall(held_S, log.buckets_S == bucket) for bucket, name in enumerate(BUCKET_NAMES)},
        }
        if settings:
            change_S = weights_S * (held_S.astype(np.float64) - log.held_GS[0])
            change = _found(estimate(change_S, log.chosen_S, log.unit_S, answers_U, alpha=alpha))
            change["high"] += beyond
            unsure = "cannot tell" if sure < COVERED else "worse" if change["high"] < 0 else "not yet"
            # Slots that are not covered can only add to what is better.
            says = "better" if change["low"] > 0 else unsure
            setting |= {"difference": change, "says": says if changed else "the same"}
        settings.append(setting)
    return settings


def _found(figure: Interval | None) -> Interval:
    assert figure is not None, "of answers with labels"
    return figure


def _within(figure: Interval, low: float, high: float) -> Interval:
    return {name: min(max(value, low), high) for name, value in figure.items()}


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


_COLUMNS = ("λ", *BUCKET_NAMES, "covered", "chosen/answer", "recall", "difference", "")


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Write a report for people, line by line."""
    yield f"{report['release']}, from {report['since'] or 'its beginning'} to {report['until']}"
    counts = (f"{report[name]:,}" for name in ("answers", "units", "chosen"))
    yield "{} answers that explored, of {} units; {} labels chosen".format(*counts)
    rows = cells(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"in brackets: bounds that hold at every look and for all λ together, with {report['confidence']:.0%}"
    yield f"cannot tell: less than {COVERED:.0%} of the slots are sure to hold what the log could show, and without the"
    yield "others λ is no better"
    for what, count in report["left_out"].items():
        yield f"left out: {count:,} answers {what}"
    if report["cut"]:
        yield f"events from before {report['since']} are not kept: of answers from before, this is one look"


def cells(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Write the table of a report: its columns, then a row for every setting."""
    return [_COLUMNS, *map(_row, report["settings"])]


def _row(setting: Mapping[str, Any]) -> tuple[str, ...]:
    difference, recall = setting.get("difference"), setting["recall"]["all"]
    return (
        _named(setting),
        *(f"{share:.1%}" for share in setting["exposures"].values()),
        f"{setting['covered']['value']:.1%} (≥ {setting['covered']['low']:.1%})",
        _bounds(setting["chosen_per_answer"]),
        "–" if recall is None else _bounds(recall),
        "" if difference is None else _bounds(difference, "+"),
        setting.get("says", ""),
    )


def _named(setting: Mapping[str, Any]) -> str:
    return "own λ" if setting["bias_removal"] is None else f"{setting['bias_removal']:g}"


def _bounds(figure: Mapping[str, float], sign: str = "") -> str:
    value, low, high = (format(figure[name], f"{sign}.4f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
