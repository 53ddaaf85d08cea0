"""The report of the experiment that runs, as GET /v1/experiments shows it, and as Prometheus gauges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array
from longtail.serving.monitoring.arm_counts import ArmCounts
from longtail.serving.monitoring.release_figures import ReleaseFigures
from longtail.serving.monitoring.sequential import (
    ALPHA,
    SRM_ALPHA,
    Interval,
    Rate,
    difference_interval,
    rate_interval,
    sample_ratio_evidence,
)
from longtail.serving.monitoring.series import iso
from longtail.serving.monitoring.windows import ratio

LEFT_OUT = ("own_settings", "named", "unavailable")
_ALL = (*BUCKET_NAMES, "all")

ExposuresOf = Callable[[str, dict[str, Any]], tuple[ReleaseFigures, Array] | None]
"""Of a run and an arm: how often it answered each label of its release, and that release's figures."""


@dataclass(frozen=True, slots=True)
class Design:
    """What is compared.

    Attributes:
        experiment: name, run, unit, traffic and arms; None: no experiment runs.
        others: in the file, and not active.
        refused: what is wrong with the file, so that the one before is in force; None: nothing.
    """

    experiment: dict[str, Any] | None
    others: Sequence[str] = ()
    refused: str | None = None

    @property
    def run(self) -> str | None:
        """Of the experiment that runs."""
        return None if self.experiment is None else str(self.experiment["run"])

    @property
    def releases(self) -> set[str]:
        """That arms name."""
        return {arm["release"] for arm in (self.experiment or {"arms": []})["arms"]} - {None}


def experiments_json(
    design: Design, counts: Mapping[str, ArmCounts], exposures_of: ExposuresOf | None = None
) -> dict[str, Any]:
    """The report, but for the request's id.

    Args:
        design: what is compared.
        counts: of the run's arms, by name.
        exposures_of: None leaves coverage undefined.
    """
    report: dict[str, Any] = {"experiment": None, "others": list(design.others), "refused": design.refused}
    if design.experiment is None:
        return report
    described = design.experiment
    of_arms = [counts.get(arm["name"], ArmCounts()) for arm in described["arms"]]
    begun = [of_arm.since for of_arm in of_arms if of_arm.since is not None]
    alpha = ALPHA / (len(of_arms) - 1)
    arms = []
    for place, (arm, of_arm) in enumerate(zip(described["arms"], of_arms, strict=True)):
        shown = None if exposures_of is None else exposures_of(described["run"], arm)
        figures = _arm_json(of_arm, shown)
        difference = None
        if place:
            difference = difference_interval(of_arm.hits_per_answer, of_arms[0].hits_per_answer, alpha=alpha)
        arms.append({**arm, **figures, "difference": _difference_json(difference)})
    report["experiment"] = {
        **{name: described[name] for name in ("name", "run", "unit", "traffic")},
        "since": iso(min(begun)) if begun else None,
        "confidence": 1 - ALPHA,
        "arms": arms,
        "sample_ratio": _sample_ratio_json(described["arms"], of_arms),
    }
    return report


def _arm_json(counts: ArmCounts, shown: tuple[ReleaseFigures, Array] | None) -> dict[str, Any]:
    exposed = sum(counts.counts[bucket] for bucket in BUCKET_NAMES)
    coverages: list[float] | None = None
    if shown is not None:
        figures, exposures_S = shown
        coverages = figures.counted.coverage_by_bucket(exposures_S)
    hits = counts.hits_per_answer
    recall = {name: counts.recall(bucket) for bucket, name in enumerate(BUCKET_NAMES)} | {"all": counts.recall()}
    return {
        "units": counts.counts["units"],
        "answers": counts.counts["answers"],
        "left_out": {why: counts.counts[why] for why in LEFT_OUT},
        "exposures": {
            name: {
                "count": counts.counts[name],
                "share": ratio(counts.counts[name], exposed),
                "coverage": None if coverages is None else coverages[bucket],
            }
            for bucket, name in enumerate(BUCKET_NAMES)
        },
        "coverage": None if shown is None else shown[0].counted.coverage(shown[1]),
        "hits_per_answer": {"hits": int(hits.hits), **_interval_json(rate_interval(hits))},
        "recall": {name: _recall_json(rate) for name, rate in recall.items()},
    }


def _recall_json(rate: Rate) -> dict[str, Any]:
    interval = rate_interval(rate, highest=1.0)
    return {"positives": int(rate.trials), "hits": int(rate.hits), **_interval_json(interval)}


def _interval_json(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"value": None, "low": None, "high": None}
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _difference_json(difference: Interval | None) -> dict[str, Any] | None:
    return None if difference is None else {**_interval_json(difference), "real": difference.leaves_out_zero}


def _sample_ratio_json(arms: Sequence[dict[str, Any]], counts: Sequence[ArmCounts]) -> dict[str, Any]:
    units, shares = [of_arm.counts["units"] for of_arm in counts], [arm["share"] for arm in arms]
    evidence = sample_ratio_evidence(units, shares)
    return {
        "expected": {arm["name"]: arm["share"] for arm in arms},
        "found": {arm["name"]: ratio(count, sum(units)) for arm, count in zip(arms, units, strict=True)},
        "evidence": evidence if math.isfinite(evidence) else 1e300,
        "mismatch": evidence >= 1 / SRM_ALPHA,
    }


def experiment_metrics(report: Mapping[str, Any] | None) -> Iterator[Metric]:
    """The series of METRICS.md about experiments; none has a value while no experiment runs, but the first.

    Args:
        report: as `experiments_json`; None: it cannot be read.
    """
    refused = math.nan if report is None else float(report["refused"] is not None)
    yield GaugeMetricFamily(
        "longtail_experiments_refused",
        "1 if experiments.toml cannot be used: the one before is in force.",
        value=refused,
    )
    families = {
        name: GaugeMetricFamily(f"longtail_experiment_{name}", text, labels=["experiment", "arm", *labels])
        for name, (text, labels) in {
            "answers": ("Answers in an arm's figures.", []),
            "units": ("Different units that they were given to.", []),
            "left_out": ("Answers in an arm that are in no figures.", ["why"]),
            "available": ("1 if the arm answers, 0 if its units get the default.", []),
            "exposure_share": ("Share of the arm's answered labels that are in the bucket.", ["bucket"]),
            "coverage": ("Share of the bucket's labels that the arm answered at all.", ["bucket"]),
            "recall": ("Share of the labels chosen that the arm's answer held.", ["bucket"]),
            "hits_per_answer": ("Labels chosen from an answer of the arm, per answer.", []),
            "difference": ("Hits per answer beyond those of the first arm, and the bounds of it.", ["bound"]),
            "real": ("1 if that difference is not 0, at whatever look.", []),
        }.items()
    }
    evidence = GaugeMetricFamily(
        "longtail_experiment_sample_ratio_evidence", "That units are not divided as the shares say; an e-value.",
        labels=["experiment"],
    )  # fmt: skip
    experiment = None if report is None else report["experiment"]
    if experiment is not None:
        evidence.add_metric([experiment["name"]], experiment["sample_ratio"]["evidence"])
        for arm in experiment["arms"]:
            for name, labels, value in _samples(arm):
                families[name].add_metric(
                    [experiment["name"], arm["name"], *labels], math.nan if value is None else float(value)
                )
    yield from (*families.values(), evidence)


def _samples(arm: Mapping[str, Any]) -> Iterator[tuple[str, list[str], float | None]]:
    yield "answers", [], arm["answers"]
    yield "units", [], arm["units"]
    yield "available", [], arm["unavailable"] is None
    yield "hits_per_answer", [], arm["hits_per_answer"]["value"]
    for why, count in arm["left_out"].items():
        yield "left_out", [why], count
    for bucket in BUCKET_NAMES:
        yield "exposure_share", [bucket], arm["exposures"][bucket]["share"]
        yield "coverage", [bucket], arm["exposures"][bucket]["coverage"]
    yield "coverage", ["all"], arm["coverage"]
    for bucket in _ALL:
        yield "recall", [bucket], arm["recall"][bucket]["value"]
    if arm["difference"] is not None:
        for bound in ("value", "low", "high"):
            yield "difference", [bound], arm["difference"][bound]
        yield "real", [], arm["difference"]["real"]
