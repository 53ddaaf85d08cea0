"""`[tune]`: what `longtail-train tune` tries, what it looks for, and what it holds trials to."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Section
from longtail.trainer.config.sections import EvaluationConfig

Number = int | float

LESS_IS_BETTER = ("balanced_error", "gini", "popularity")
"""Metrics that an objective minimises; all others it maximises."""

_BY_BUCKET = ("recall", "exposure", "coverage", "balanced_error")


class RangeConfig(Section):
    """Values of one key: `{ low = 0.05, high = 0.5, log = true }`, or `{ choices = ["unit", "importance"] }`.

    Whole numbers are tried where `low` and `high` are whole: for a share write `low = 0.0`.
    """

    low: Number | None = None
    high: Number | None = None
    step: Number | None = Field(default=None, gt=0)
    """Only `low`, `low + step`, … up to `high`."""
    log: bool = False
    """Equal ratios are equally likely, as suits rates and temperatures; by default equal differences."""
    choices: list[Any] | None = Field(default=None, min_length=1)
    """Any values that the key may have, tables among them: `{ name = "uniform", negatives = 512 }`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("low", "high", "step") if getattr(self, name) is not None] + ["log"] * self.log
        if self.choices is not None:
            if given:
                raise ValueError(f"expected choices alone, or low and high, received choices beside {', '.join(given)}")
            if any(choice in self.choices[:at] for at, choice in enumerate(self.choices)):
                raise ValueError(f"choices: expected distinct values, received {self.choices}")
            return self
        if self.low is None or self.high is None:
            raise ValueError(f"expected choices, or low and high, received {', '.join(given) or 'none of them'}")
        if self.low >= self.high:
            raise ValueError(f"expected low < high, received {self.low} and {self.high}")
        if self.log and (self.step is not None or self.low <= 0):
            raise ValueError(f"log: expected no step and low > 0 beside it, received {self.step} and {self.low}")
        if self.step is not None:
            if self.whole and not isinstance(self.step, int):
                raise ValueError(f"step: expected a whole number between whole low and high, received {self.step}")
            low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step))
            if (high - low) % step:
                raise ValueError(f"step: expected one that leads from {low} to {high}, received {step}")
        return self

    @property
    def whole(self) -> bool:
        """Whether whole numbers alone are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class BoundConfig(Section):
    """Limits of a metric on valid: `{ at_least = 0.02 }`, `{ at_most = 0.9 }`, or both."""

    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise ValueError("expected at_least or at_most, received neither")
        return self

    def missed(self, value: float) -> float:
        """By how much a value lies outside; 0 within."""
        below = 0.0 if self.at_least is None else self.at_least - value
        above = 0.0 if self.at_most is None else value - self.at_most
        return max(below, above, 0.0)

    def __str__(self) -> str:
        limits = (("≥", self.at_least), ("≤", self.at_most))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


class TuneConfig(Section):
    """What `longtail-train tune` tries: every trial is a training of the recipe with some values drawn anew.

    Trials are measured on valid, at the λ and μ that each chooses there as `fit` does; none evaluates test.
    """

    ranges: dict[str, RangeConfig] = Field(min_length=1)
    """By any key that `--set` takes, in quotes: `"model.temperature" = { low = 0.05, high = 0.5, log = true }`. Not
    those that decide what is measured: `name`, `seed`, `evaluation.…`, `tune.…`, `data.split.…`, `data.valid` and
    `data.test`; of the other keys of `data` none that changes the validation pairs or the catalogue."""
    trials: int = Field(default=20, ge=1)
    """How many, those of earlier runs of the same study, pruned and refused ones included."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """What trials are drawn by, beside what the earlier ones found. The trainings' own is `seed` of the recipe."""
    sampler: Literal["tpe", "random"] = "tpe"
    """`tpe`: Optuna's tree-structured Parzen estimator; its first ten trials are random. It minds constraints, and
    takes several objectives. `random`: all of them are."""
    pruner: Literal["median", "none"] | None = None
    """`median`: ends a trial whose best validation so far is below the median of what complete trials had at the same
    one, after five of them; it needs `evaluation.metric` as the one objective. By default `median` where that is so
    and there are no constraints, which it knows nothing of; else `none`."""
    objectives: list[str] = Field(default_factory=list)
    """Metrics on valid: `recall@20`, `ndcg@20`, `recall@20/tail`, `coverage@20`, …, the k one of `evaluation.ks`; by
    default `evaluation.metric`. `balanced_error`, `gini` and `popularity` are minimised, all others maximised. Of
    several, the report has the Pareto front."""
    constraints: dict[str, BoundConfig] = Field(default_factory=dict)
    """Limits of further metrics: `"recall@20/tail" = { at_least = 0.02 }`. The best trial is the best of those within;
    where there is none, the nearest, with a warning."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.objectives)) < len(self.objectives):
            raise ValueError(f"objectives: expected distinct metrics, received {self.objectives}")
        return self


def check_tune(tune: TuneConfig, evaluation: EvaluationConfig) -> None:
    """Refuse metrics that are not measured, and a pruner that could not judge by the objective.

    Raises:
        ValueError: with what was expected.
    """
    known = measured_metrics(evaluation)
    for where, names in (("objectives", tune.objectives), ("constraints", tune.constraints)):
        for name in names:
            if name not in known:
                plain, by_bucket = "|".join(_plain(evaluation)), "|".join(_BY_BUCKET)
                raise ValueError(
                    f"tune.{where}: expected {plain} @ one of {evaluation.ks}, or {by_bucket} @ one of them / "
                    f"{'|'.join(BUCKET_NAMES)}, received {name!r}"
                )
    if tune.pruner == "median" and objectives_of(tune, evaluation) != [evaluation.metric]:
        raise ValueError(
            f"tune.pruner: expected none, or the objective {evaluation.metric} alone, which epochs are validated by, "
            f"received 'median' with {', '.join(tune.objectives)}"
        )


def objectives_of(tune: TuneConfig, evaluation: EvaluationConfig) -> list[str]:
    """The metrics that trials are compared by."""
    return tune.objectives or [evaluation.metric]


def prunes(tune: TuneConfig, evaluation: EvaluationConfig) -> bool:
    """Whether trials may be ended early."""
    if tune.pruner is None:
        return objectives_of(tune, evaluation) == [evaluation.metric] and not tune.constraints
    return tune.pruner == "median"


def measured_metrics(evaluation: EvaluationConfig) -> list[str]:
    """Names of the metrics that every point of a curve has."""
    return [
        name
        for k in evaluation.ks
        for name in (
            *(f"{metric}@{k}" for metric in _plain(evaluation)),
            *(f"{metric}@{k}/{bucket}" for metric in _BY_BUCKET for bucket in BUCKET_NAMES),
        )
    ]


def _plain(evaluation: EvaluationConfig) -> list[str]:
    ours = ["recall", "ndcg", "precision", "hit_rate", "mrr", "coverage", "gini", "balanced_error", "popularity"]
    scored = ["psp", "psndcg"] if evaluation.propensity else []
    return [*ours, *scored, *(metric.name for metric in evaluation.metrics)]


def maximised(metric: str) -> bool:
    """Whether an objective of this metric is maximised."""
    return metric.partition("@")[0] not in LESS_IS_BETTER
