"""Estimate the choices that other λ would have brought, from answers that explored (`longtail-serve off-policy`).

For a query and a λ' the answer T is computed by the release again. Whether a label of T would have been chosen is only
known for labels that were shown, but these were shown with known propensities P. So

    v(λ') = 1/n · Σ over answers Σ over their shown labels of 1[in T] · r / P,    r = 1 if it was chosen, else 0

estimates the number of chosen labels per answer at λ' [Horvitz, Thompson 1952, "A generalization of sampling without
replacement"]. The estimate is unbiased if

- the choice of a label depends neither on its position nor on its neighbours: the document-based click model and the
  item estimator of [Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay, Wen 2018, "Offline evaluation of ranking
  policies with click models"];
- P > 0. Slots of T with labels that the log could not show contribute nothing to the estimate; the other slots are
  **covered**. Which slots are covered is known: exploration draws from a bucket's best labels, and the event has their
  number.

The **difference** is taken to the answers for the same queries at their own λ without exploration, so that labels in
both answers cancel out. **Recall** is v(λ') divided by the same sum over all labels that the log could show, Σ r / P.
**Exposures** do not depend on choices, and are counted.

**Bounds** are those of `longtail-serve experiments` (`compare.py`), for sums by unit, and hold at every look. Both
bounds of a figure, over all settings, share the error. Two things differ, because the term of one answer may be worth
hundreds of choices. First, ρ is measured there in squared hits, here in the mean square of a shown label's coefficient.
Second, rare labels with a large coefficient add nothing to the estimated variance until one of them is chosen, so V is
at least the variance that would result if all labels with a coefficient were chosen at the same rate. A slot that is
not covered brings between 0 and 1 choices. So each such slot raises the upper bound by 1, and such a slot of the own
answer that λ' lacks lowers the lower bound of the difference. If these bounds contain 0, and less than `COVERED` of the
slots of either answer are covered, the log cannot decide.

Legend: `S` labels that answers showed, `U` units, `G` settings: the answers' own λ, then every λ' of the grid.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from longtail.bundle import BUCKET_NAMES, LabelRecord, Patch
from longtail.bundle.arrays import Bools, Float64, Int8, Int64
from longtail.bundle.report_table import ReportTable
from longtail.index import open_releases
from longtail.serving.compare import ALPHA, Rate, boundary, format_bounds, format_seconds
from longtail.serving.core.feedback import CANDIDATES
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import BucketName, RetrieveQuery
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.events.folder import kept_since
from longtail.serving.events.reader import open_events
from longtail.state import LabelStore, StateLocation

COVERED = 0.95
"""Share of the slots that must be covered for bounds around 0 to mean `not yet`."""
Interval = dict[str, float]
"""A figure and the bounds that hold at every look: `value`, `low`, `high`."""
_AT_ONCE = 512
"""Queries in one search."""
_ANSWERS = """
SELECT answers.release, epoch(answers.time) AS time, answers.unit, labels, answers.propensities, answers.buckets,
    answers.features, answers.options, chosen
FROM answers LEFT JOIN (
    SELECT answer, list(DISTINCT label) AS chosen FROM choices
    WHERE kind = 'choice' AND ($event IS NULL OR event = $event) GROUP BY answer
) USING (answer)
WHERE len(labels) > 0 AND answers.time >= to_timestamp($since) ORDER BY time, answer
"""
"""Query for answers and chosen labels. A label that was both clicked and bought counts as one chosen label."""
_OTHER_RELEASE = "of other releases"
_NOT_EXPLORED = "that did not explore"
_FLOORED = "with floors (at_least), beyond which slots are drawn"
_NOT_KNOWN = "whose query is not kept (LONGTAIL_RECORD_FEATURES, or too long)"
_NO_CANDIDATES = "whose candidates are not recorded, from before 0.1.0"
_REFUSED = "whose query the release does not take at every λ"
_OLDER = "from before the newest label change"
_CHANGED = "that the release does not answer so any more"


class OffPolicyError(ServingError):
    """A log that allows no estimate for other λ."""


@dataclass(frozen=True, slots=True)
class ExplorationLog:
    """Hold shown labels, and answers to the same queries at other λ."""

    lambda_G: tuple[float | None, ...]
    """λ of each setting; None: the λ that each answer was served with."""
    propensities_S: Float64
    chosen_S: Float64
    """1 if a label was chosen, else 0."""
    buckets_S: Int8
    unit_S: Int64
    held_GS: Bools
    """Whether each setting's answer contains the label."""
    answers_U: Float64
    exposures_GB: Int64
    """Slots of each setting's answers, by bucket."""
    open_G: Int64
    """Number of slots that are not covered."""
    gained_G: Int64
    """Slots that are not covered, with labels that the own answer lacks."""
    lost_G: Int64
    """Slots of the own answer that are not covered, with labels that the setting's answer lacks."""
    changed_G: Int64
    """Number of answers that differ from the answer at their own λ."""
    without_unit: int
    """Answers that lack the feature whose value is the unit."""
    left_out: Mapping[str, int]
    """Numbers of skipped answers, by reason."""


def estimate(
    coefficients_S: Float64,
    chosen_S: Float64,
    unit_S: Int64,
    trials_U: Float64,
    *,
    expected_S: Float64 | None = None,
    alpha: float = ALPHA,
) -> Interval | None:
    """Estimate Σ coefficient · chosen per trial, with bounds.

    Args:
        coefficients_S: 1 / P of shown labels that count, 0 for others.
        chosen_S: 1 if a label was chosen, else 0.
        unit_S: position of each label's unit in `trials_U`.
        trials_U: number of answers, or Σ `expected_S` · chosen.
        expected_S: coefficients of the trials, if the trials are random.
        alpha: probability that one of the two bounds ever excludes the truth.

    Returns:
        None without trials; infinite bounds if all coefficients are 0.
    """
    rate = Rate(_by_unit(unit_S, coefficients_S * chosen_S, len(trials_U)), trials_U)
    value = rate.value
    if value is None:
        return None
    residuals_S = coefficients_S if expected_S is None else coefficients_S - value * expected_S
    counted_S = residuals_S != 0
    labels, squares = np.count_nonzero(counted_S), float(residuals_S @ residuals_S)
    if not labels:
        return {"value": value, "low": -math.inf, "high": math.inf}
    scale = math.sqrt(squares / labels)
    # Never less than as if labels were chosen independently: few hits show no variance yet.
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
    lambdas: Sequence[float],
    *,
    event: str | None = None,
    unit: str | None = None,
    changes: Sequence[LabelRecord] = (),
) -> ExplorationLog:
    """Read answers that explored, and answer their queries at every λ.

    Args:
        retriever: the release with its label changes.
        folder: folder of events.
        window: start and end of the answers' times, in seconds since 1970.
        lambdas: other λ.
        event: name of the choices to count, such as `purchase`; None: all.
        unit: feature whose value is the unit. For answers without it, and by default, the unit is the experiment's, or
            all features together.
        changes: label changes. Answers older than the newest change are skipped; patches matter only where answers
            follow from columns.

    Raises:
        StateError: the events cannot be read.
        OffPolicyError: no answer is left, or neither the release nor an answer has the feature.
    """
    left_out, without_unit = Counter[str](), 0
    dates = [(change.at.timestamp(), isinstance(change, Patch)) for change in changes]
    newest = max((at for at, patch in dates if not patch), default=0.0)
    newest_of_columns = max((at for at, _ in dates), default=0.0)
    units: dict[Any, int] = {}
    parts: dict[str, list[Any]] = {name: [] for name in ("propensities", "chosen", "buckets", "unit", "held")}
    unit_N: list[int] = []
    exposures_GB = np.zeros((len(lambdas) + 1, len(BUCKET_NAMES)), np.int64)
    open_G, gained_G, lost_G, changed_G = np.zeros((4, len(lambdas) + 1), np.int64)
    with open_events(folder, *window) as connection:
        params = {"since": window[0], "event": event}
        for batch in connection.sql(_ANSWERS, params=params).to_arrow_reader(_AT_ONCE):
            usable = []
            for row in batch.to_pylist():
                query = _rebuild_query(row, retriever, lambdas, left_out)
                if query is None:
                    continue
                if row["time"] <= (newest_of_columns if retriever.reads_columns(query) else newest):
                    left_out[_OLDER] += 1
                else:
                    usable.append((row, query))
            queries = [query for _, query in usable]
            answers_G = [_answer(retriever, queries, bias_removal) for bias_removal in (None, *lambdas)]
            possible = _find_possible(retriever, usable, answers_G[0])
            for (row, _), (always, covered), *answer_G in zip(usable, possible, *answers_G, strict=True):
                if not always <= {*row["labels"]} <= covered:
                    left_out[_CHANGED] += 1
                    continue
                features = json.loads(row["features"])
                without_unit += unit is not None and unit not in features
                key = json.dumps(features[unit]) if unit in features else row["unit"] or row["features"]
                chosen = set(row["chosen"] or ())
                parts["propensities"] += row["propensities"]
                parts["buckets"] += row["buckets"]
                parts["chosen"] += [label in chosen for label in row["labels"]]
                parts["unit"] += [units.setdefault(key, len(units))] * len(row["labels"])
                held_GK = [[label in answer for label in row["labels"]] for answer in answer_G]
                parts["held"].append(np.array(held_GK, np.bool_))
                unit_N.append(units[key])
                served = answer_G[0].keys()
                open_G += [len(answer.keys() - covered) for answer in answer_G]
                gained_G += [len(answer.keys() - covered - served) for answer in answer_G]
                lost_G += [len(served - covered - answer.keys()) for answer in answer_G]
                changed_G += [answer.keys() != served for answer in answer_G]
                for counts_B, answer in zip(exposures_GB, answer_G, strict=True):
                    counts_B += np.bincount([*answer.values()], minlength=len(BUCKET_NAMES))
    if not units:
        why = "".join(f"; left out: {count:,} answers {what}" for what, count in left_out.items())
        raise OffPolicyError(
            f"{folder}: expected answers of release {retriever.name} that explored, found none{why}; queries explore "
            "with `explore`, and LONGTAIL_ANSWER_SHARE keeps their answers"
        )
    if unit is not None and without_unit == len(unit_N):
        names = [feature.name for feature in retriever.manifest.query_features]
        if unit not in names:
            raise OffPolicyError(f"--unit: expected a feature of queries, such as {names}, received {unit!r}")
    return ExplorationLog(
        lambda_G=(None, *lambdas),
        propensities_S=np.array(parts["propensities"], np.float64),
        chosen_S=np.array(parts["chosen"], np.float64),
        buckets_S=np.array(parts["buckets"], np.int8),
        unit_S=np.array(parts["unit"], np.int64),
        held_GS=np.concatenate(parts["held"], axis=1),
        answers_U=np.bincount(unit_N).astype(np.float64),
        exposures_GB=exposures_GB,
        open_G=open_G,
        gained_G=gained_G,
        lost_G=lost_G,
        changed_G=changed_G,
        without_unit=without_unit,
        left_out=left_out,
    )


def _rebuild_query(
    row: dict[str, Any], retriever: Retriever, lambdas: Sequence[float], left_out: Counter[str]
) -> RetrieveQuery | None:
    """Rebuild the query of an answer; for a useless answer count the reason, and return None."""
    if row["release"] != retriever.name:
        left_out[_OTHER_RELEASE] += 1
    elif row["features"] is None or row["options"] is None:
        left_out[_NOT_KNOWN] += 1
    elif not any((options := json.loads(row["options"])).get("explore", {}).values()):
        left_out[_NOT_EXPLORED] += 1
    elif options.get("at_least"):
        left_out[_FLOORED] += 1
    elif (candidates := options.pop(CANDIDATES, None)) is None:
        left_out[_NO_CANDIDATES] += 1
    else:
        row[CANDIDATES] = candidates
        try:
            query = RetrieveQuery.model_validate({**options, "features": json.loads(row["features"]), "display": False})
            # The limits of λ are an interval, so its ends speak for all values.
            for end in (min(lambdas), max(lambdas)):
                retriever.check_options(query.model_copy(update={"bias_removal": end}))
            return query
        except (ValidationError, InvalidRequestError):
            left_out[_REFUSED] += 1
    return None


def _answer(retriever: Retriever, queries: Sequence[RetrieveQuery], bias_removal: float | None) -> list[dict[str, int]]:
    """Answer queries without exploring, at one λ or, if None, at the queries' λ: buckets by label."""
    if not queries:
        return []
    changes: dict[str, Any] = {"explore": {}} | ({} if bias_removal is None else {"bias_removal": bias_removal})
    results = retriever.retrieve([query.model_copy(update=changes) for query in queries])
    ids, buckets = retriever.catalogue.get_ids(results.rows_N).to_pylist(), results.buckets_N.tolist()
    bounds = pairwise([0, *results.ends_B])
    return [dict(zip(ids[start:end], buckets[start:end], strict=True)) for start, end in bounds]


def _find_possible(
    retriever: Retriever, usable: Sequence[tuple[Mapping[str, Any], RetrieveQuery]], served: Sequence[Mapping[str, int]]
) -> list[tuple[set[str], set[str]]]:
    """Find the certain and the possible labels of each answer.

    Args:
        served: the answers without exploration.
    """
    possible: list[tuple[set[str], set[str]]] = [(set(), set()) for _ in usable]
    for bucket, name in enumerate(BUCKET_NAMES):
        drawing, queries = [], []
        for i, (row, query) in enumerate(usable):
            count = row["buckets"].count(bucket)
            if drawn := query.explore.get(cast(BucketName, name), 0):
                candidates = max(row[CANDIDATES], drawn)
                queries.append(query.model_copy(update={"buckets": [name], "k": query.k + candidates}))
                drawing.append((i, max(count - drawn, 0), candidates))
            else:
                certain_labels = [label for label, label_bucket in served[i].items() if label_bucket == bucket][:count]
                for labels in possible[i]:
                    labels.update(certain_labels)
        for (i, certain, candidates), best in zip(drawing, map(list, _answer(retriever, queries, None)), strict=True):
            always, covered = possible[i]
            always.update(best[:certain])
            covered.update(best[: certain + candidates])
    return possible


def off_policy(
    releases: str | Path,
    folder: Path,
    window: tuple[float, float],
    lambdas: Sequence[float] = (),
    *,
    release: str | None = None,
    state: StateLocation | None = None,
    event: str | None = None,
    unit: str | None = None,
) -> dict[str, Any]:
    """Estimate a release's choices at other λ from explored answers.

    Args:
        folder: folder of events.
        window: start and end of the answers' times, in seconds since 1970.
        lambdas: other λ; by default those of the release's offline curve, or 0 to 1 in tenths.
        release: name of the release; None: CURRENT.
        state: state of the service, whose added and hidden labels apply as they are now.
        event, unit: see `read_log`.

    Returns:
        The report, as JSON.

    Raises:
        OffPolicyError: no release is published, a λ exceeds the limits, there is no such unit, or the log is empty.
        StateError: the events cannot be read.
        StoreError: the label changes cannot be read.
        LongtailIndexError, BundleError, UnservableReleaseError: the release cannot be used.
    """
    directory = open_releases(releases)
    name = directory.current() if release is None else release
    if name is None:
        raise OffPolicyError(f"{releases}: expected a published release, found none; use the path of one")
    store = LabelStore(state or directory.root / ".state")
    try:
        changes = store.read_from().records
    finally:
        store.close()
    retriever = load_release(directory, name).with_changes(changes)
    dial = retriever.manifest.bias_removal
    grid = sorted({*lambdas} or {point.bias_removal for point in dial.curve} or {tenth / 10 for tenth in range(11)})
    if lambdas and not dial.minimum <= grid[0] <= grid[-1] <= dial.maximum:
        raise OffPolicyError(f"--at: expected {dial.minimum} <= λ <= {dial.maximum}, received {[*lambdas]}")
    grid = [bias_removal for bias_removal in grid if dial.minimum <= bias_removal <= dial.maximum]
    oldest, (since, until) = kept_since(folder), window
    cut, since = oldest > since, max(oldest, since)
    log = read_log(retriever, folder, (since, until), grid, event=event, unit=unit, changes=changes)
    return {
        "release": name,
        "since": format_seconds(since) if since else None,
        "until": format_seconds(until),
        "cut": cut,
        "answers": int(log.answers_U.sum()),
        "units": len(log.answers_U),
        "chosen": int(log.chosen_S.sum()),
        "without_unit": log.without_unit,
        "left_out": dict(log.left_out),
        "confidence": 1 - ALPHA,
        "settings": estimate_settings(log),
    }


def estimate_settings(log: ExplorationLog) -> list[dict[str, Any]]:
    """Estimate the figures of every setting; a figure's bounds hold jointly for all λ and looks."""
    # Divided by two for both bounds, and by the settings, because all hold jointly.
    alpha = ALPHA / (2 * len(log.lambda_G))
    weights_S, answers_U = 1 / log.propensities_S, log.answers_U
    answers = answers_U.sum()

    def recall(held_S: Float64 | Bools, among_S: Bools) -> Interval | None:
        demand_S = weights_S * among_S
        demand_U = _by_unit(log.unit_S, demand_S * log.chosen_S, len(answers_U))
        held_S = demand_S * held_S
        figure = estimate(held_S, log.chosen_S, log.unit_S, demand_U, expected_S=demand_S, alpha=alpha)
        return figure and _clip(figure, 0.0, 1.0)

    settings: list[dict[str, Any]] = []
    for g, (bias_removal, held_S, counts_B) in enumerate(zip(log.lambda_G, log.held_GS, log.exposures_GB, strict=True)):
        slots = counts_B.sum()
        most = float(slots / answers)
        chosen = _require(estimate(weights_S * held_S, log.chosen_S, log.unit_S, answers_U, alpha=alpha))
        chosen["high"] += float(log.open_G[g] / answers)
        setting: dict[str, Any] = {
            "bias_removal": bias_removal,
            "changed": int(log.changed_G[g]),
            "exposures": dict(zip(BUCKET_NAMES, (counts_B / max(slots, 1)).tolist(), strict=True)),
            "covered": 1 - float(log.open_G[g] / max(slots, 1)),
            "chosen_per_answer": _clip(chosen, 0.0, most),
            "recall": {"all": recall(held_S, np.ones_like(held_S))}
            | {name: recall(held_S, log.buckets_S == bucket) for bucket, name in enumerate(BUCKET_NAMES)},
        }
        if settings and not log.changed_G[g]:
            setting |= {"difference": {"value": 0.0, "low": 0.0, "high": 0.0}, "says": "the same"}
        elif settings:
            change_S = weights_S * (held_S.astype(np.float64) - log.held_GS[0])
            change = _require(estimate(change_S, log.chosen_S, log.unit_S, answers_U, alpha=alpha))
            change["low"] -= float(log.lost_G[g] / answers)
            change["high"] += float(log.gained_G[g] / answers)
            change = _clip(change, -float(log.exposures_GB[0].sum() / answers), most)
            unsure = "cannot tell" if min(settings[0]["covered"], setting["covered"]) < COVERED else "not yet"
            says = "better" if change["low"] > 0 else "worse" if change["high"] < 0 else unsure
            setting |= {"difference": change, "says": says}
        settings.append(setting)
    return settings


def _require(figure: Interval | None) -> Interval:
    assert figure is not None, "of answers with labels"
    return figure


def _clip(figure: Interval, low: float, high: float) -> Interval:
    return {name: min(max(value, low), high) for name, value in figure.items()}


_COLUMNS = ("λ", *BUCKET_NAMES, "covered", "chosen/answer", "recall", "difference", "")


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Write a report for people, line by line."""
    yield f"{report['release']}, from {report['since'] or 'its beginning'} to {report['until']}"
    counts = (f"{report[name]:,}" for name in ("answers", "units", "chosen"))
    yield "{} answers that explored, of {} units; {} labels chosen".format(*counts)
    yield from settings_table(report).lines()
    yield f"in brackets: bounds of a column hold at every look for all λ together, with {report['confidence']:.0%};"
    yield "a slot that is not covered brings nothing or one label chosen"
    yield f"cannot tell: bounds around 0, and less than {COVERED:.0%} of the slots covered, here or at own λ"
    if report["without_unit"]:
        yield f"without the feature of --unit: {report['without_unit']:,} answers, by the experiment's or all features"
    for what, count in report["left_out"].items():
        yield f"left out: {count:,} answers {what}"
    if report["cut"]:
        yield f"events from before {report['since']} are not kept: of answers from before, this is one look"


def settings_table(report: Mapping[str, Any]) -> ReportTable:
    """Create the table of a report, with a row for every setting."""
    return ReportTable(_COLUMNS, [*map(_row, report["settings"])])


def _row(setting: Mapping[str, Any]) -> tuple[str, ...]:
    difference, recall = setting.get("difference"), setting["recall"]["all"]
    return (
        "own λ" if setting["bias_removal"] is None else f"{setting['bias_removal']:g}",
        *(f"{share:.1%}" for share in setting["exposures"].values()),
        f"{setting['covered']:.1%}",
        format_bounds(setting["chosen_per_answer"]),
        format_bounds(recall),
        "" if difference is None else format_bounds(difference, "+"),
        setting.get("says", ""),
    )
