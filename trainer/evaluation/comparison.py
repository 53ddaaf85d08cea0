"""Compare a model with baselines on the same requests.

Legend: `N` rows of a task, `K` list length.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtail.bundle import Interval
from longtail.bundle.arrays import Float64, Int32
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.evaluation.baselines import (
    BASELINES,
    READINGS,
    BaselineMethod,
    FromHistory,
    Interactions,
    Scores,
    Settings,
    popularity,
    recent_popularity,
    skip_reason,
    top_labels,
)
from longtail.trainer.evaluation.metrics import LabelFacts, interval_of_difference
from longtail.trainer.evaluation.task import Task
from longtail.trainer.metric_registry import parse_k
from longtail.trainer.threads import map_in_threads

_READING_SCORES, _READING_QUERIES = 1e8, 1000
"""Scores that are computed for each reading of histories: few enough for seconds, but of at least so many queries."""


@dataclass(frozen=True)
class Comparison:
    """Hold figures of a model and its baselines.

    Attributes:
        task: number of queries that are answered, and of requests if there are more, in words.
        seconds: time that each took to learn and answer; not stored in a bundle, whose bytes must be reproducible.
        best: the baseline with the highest `metric`.
        differences: model minus baseline, paired by query, by baseline and metric at the k of `metric`.
        subject: name of the model in sentences.
    """

    metric: str
    task: str
    model: dict[str, Interval]
    baselines: dict[str, dict[str, Interval]]
    settings: dict[str, Settings]
    seconds: dict[str, float]
    best: str
    differences: dict[str, dict[str, Interval]]
    notes: list[str]
    subject: str = "the model"

    @property
    def difference(self) -> Interval:
        """Return the model's metric less that of the best baseline."""
        return self.differences[self.best][self.metric]

    @property
    def behind(self) -> bool:
        """Return whether the model is worse beyond chance."""
        return (self.difference.high or 0.0) < 0

    @property
    def sentence(self) -> str:
        """Return the verdict in words."""
        ours, theirs = self.model[self.metric].value, self.baselines[self.best][self.metric].value
        figures = (
            f"{self.metric} {ours:.4f} against {theirs:.4f} on the same {self.task}, a difference of "
            f"{self.difference.value:+.4f} [{self.difference.low:+.4f}, {self.difference.high:+.4f}]"
        )
        if self.behind:
            return f"{self.subject.capitalize()} is behind {self.best}: {figures}."
        if (self.difference.low or 0.0) > 0:
            return f"{self.subject.capitalize()} is ahead of {self.best}, the best baseline: {figures}."
        return f"No clear difference between {self.subject} and {self.best}, the best baseline: {figures}."

    def record(self) -> dict[str, Any]:
        """Return the comparison's entry in `metrics.json`."""
        return {
            "baselines": {
                name: {metric: interval.model_dump() for metric, interval in metrics.items()}
                for name, metrics in self.baselines.items()
            },
            "baseline_settings": self.settings,
            "baseline_notes": self.notes,
            "against_baselines": {
                name: {metric: interval.model_dump() for metric, interval in metrics.items()}
                for name, metrics in self.differences.items()
            },
            "against_best_baseline": {
                "baseline": self.best,
                "metric": self.metric,
                "difference": self.difference.model_dump(),
                "in_words": self.sentence,
            },
        }


def compare(
    task: Task,
    ours_NK: Int32,
    facts: LabelFacts,
    data: Interactions,
    config: EvaluationConfig,
    *,
    tuning: tuple[Task, Interactions] | None,
) -> tuple[Comparison | None, list[str]]:
    """Run the recipe's baselines, tuned on validation queries.

    Returns:
        The comparison and no lines; or, if no baseline ran, None and a line for each baseline that was left out.
    """
    notes: list[str] = []
    metrics: dict[str, dict[str, Interval]] = {}
    used: dict[str, Settings] = {}
    seconds: dict[str, float] = {}
    lists: dict[str, Int32] = {}
    for name in choose_baselines(config, data):
        if reason := skip_reason(name, data):
            notes.append(f"{name} was left out: {reason}.")
            continue
        baseline = BASELINES[name]
        settings = baseline.settings
        grid = baseline.tuned and bool(baseline.settings_to_try(data))
        if tuning is not None:
            settings = tuned(baseline, *tuning, config.metric, facts, grid=grid)
        elif baseline.reads(data):
            notes.append(f"{name} was not tuned, for want of validation data: it reads all pairs of a history alike.")
        elif grid:
            notes.append(f"{name} was not tuned, for want of validation data.")
        began = time.monotonic()
        lists[name] = top_labels(task, data, baseline.fit(data, settings))
        seconds[name] = time.monotonic() - began
        metrics[name], used[name] = task.metrics(lists[name], facts), settings
    if not metrics:
        return None, notes
    by_history = [name for name in metrics if BASELINES[name].fit not in (popularity, recent_popularity)]
    if (newcomers := int((task.past.lengths(task.rows_N) == 0).sum())) and by_history:
        notes.append(
            f"{newcomers:,} of the {task.description} have no history: {', '.join(by_history)} answer them by "
            "popularity."
        )
    best = max(metrics, key=lambda name: metrics[name][config.metric].value)
    k = parse_k(config.metric)
    ours = task.ratios(k, ours_NK, facts)
    differences = {name: _differences(task, ours, task.ratios(k, lists[name], facts)) for name in metrics}
    model = task.metrics(ours_NK, facts)
    return Comparison(config.metric, task.description, model, metrics, used, seconds, best, differences, notes), []


def choose_baselines(config: EvaluationConfig, data: Interactions) -> list[str]:
    """List the recipe's baselines; by default without `attribute share` where labels have no column for it."""
    default = "baselines" not in config.model_fields_set and not data.columns
    return [name for name in config.baselines if not (default and name == "attribute share")]


def _differences(
    task: Task, ours: Mapping[str, tuple[Float64, Float64]], theirs: Mapping[str, tuple[Float64, Float64]]
) -> dict[str, Interval]:
    """Compute model minus baseline for metrics with equal denominators."""
    differences = dict[str, Interval]()
    for name, (ours_N, over_N) in ours.items():
        theirs_N, same_N = theirs[name]
        if name.startswith(("exposure@", "popularity@")) or not np.array_equal(over_N, same_N):
            continue
        if name.startswith("recall@") and "/" in name:  # a bucket may have few pairs, or none that is found
            differences[name] = interval_of_difference(*map(task.bootstrap.per_query, (ours_N, theirs_N, over_N)))
        else:
            differences[name] = task.bootstrap.interval(ours_N - theirs_N, over_N)
    return differences


def tuned(
    baseline: BaselineMethod, task: Task, data: Interactions, metric: str, facts: LabelFacts, *, grid: bool = True
) -> Settings:
    """Choose the settings of the highest metric on validation; of equals, the first.

    Histories are read in each of `READINGS` by one fit. With `grid`, the baseline's grid comes next, at the best
    reading, then the readings again. Readings, and a grid by the data's columns, are compared on fewer queries among
    many labels.
    """
    queries = int(max(_READING_QUERIES, _READING_SCORES // data.labels))
    sample = task.select_rows(np.random.default_rng(data.seed).permutation(len(task.rows_N)) < queries)

    def value(task: Task, scores: Scores) -> float:
        numerator_N, denominator_N = task.ratio(metric, top_labels(task, data, scores), facts)
        return float(numerator_N.sum() / max(denominator_N.sum(), 1))

    def best_reading(settings: Settings) -> Settings:
        scores = baseline.fit(data, settings) if baseline.reads(data) else None
        if not isinstance(scores, FromHistory):
            return settings
        values = map_in_threads(lambda reading: value(sample, scores.read(reading)), READINGS)
        return settings | READINGS[int(np.argmax(values))]

    settings, to_try = best_reading(baseline.settings), baseline.settings_to_try(data)
    if not grid or not to_try:
        return settings
    judged_by = task if baseline.grid_of is None else sample
    best = max(to_try, key=lambda others: value(judged_by, baseline.fit(data, settings | others)))
    return best_reading(settings | best)
