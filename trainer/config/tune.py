"""`[tune]`: what `longtail-train tune` tries, what it looks for, and what it holds trials to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Section
from longtail.trainer.config.sections import EvaluationConfig

_BY_BUCKET = ("recall", "exposure", "coverage", "balanced_error")


class RangeConfig(Section):
    """Values of one key: `{ low = 0.05, high = 0.5, log = true }`, or `{ choices = ["unit", "importance"] }`.

    Whole numbers are tried where `low` and `high` are whole: for a share write `low = 0.0`.
    """

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = Field(default=None, gt=0)
    """Only `low`, `low + step`, … up to `high`."""
    log: bool = False
    """Equal ratios are equally likely, as suits rates and temperatures; by default equal differences."""
    choices: list[Any] | None = Field(default=None, min_length=1)
    """Any values that the key may have, tables among them: `{ name = "uniform", negatives = 512 }`."""

    def _problems(self) -> Iterator[str]:
        low, high, step = self.low, self.high, self.step
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                yield "expected choices alone, or low and high, received choices and others"
        elif low is None or high is None:
            yield f"expected choices, or low and high, received {', '.join(self.model_fields_set) or 'none'}"
        elif low >= high:
            yield f"expected low < high, received {low} and {high}"
        elif self.log and (step is not None or low <= 0):
            yield f"log: expected low > 0 and no step, received {low} and {step}"
        elif self.whole and isinstance(step, float):
            yield f"step: expected a whole number between whole low and high, received {step}"

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class BoundConfig(Section):
    """Limits of a metric on valid: `{ at_least = 0.02 }`, `{ at_most = 0.9 }`, or both."""

    at_least: float | None = None
    at_most: float | None = None

    def _problems(self) -> Iterator[str]:
        if self.at_least is None and self.at_most is None:
            yield "expected at_least or at_most, received neither"

    def missed(self, value: float) -> float:
        """Compute by how much a value lies outside; 0 within."""
        below = 0.0 if self.at_least is None else self.at_least - value
        above = 0.0 if self.at_most is None else value - self.at_most
        return max(below, above, 0.0)

    def __str__(self) -> str:
        limits = (("≥", self.at_least), ("≤", self.at_most))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


class TuneConfig(Section):
    """Ranges and limits of `longtail-train tune`, whose trials are measured on valid as `fit` does; none reads test."""

    ranges: dict[str, RangeConfig] = Field(min_length=1)
    """By any key that `--set` takes, in quotes: `"model.temperature" = { low = 0.05, high = 0.5, log = true }`; but for
    those that decide what is measured: `name`, `seed`, `evaluation`, `tune`, the split and the catalogue."""
    trials: int = Field(default=20, ge=1)
    """Number of trials, with those of earlier runs, pruned and refused ones."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the search; trainings use the recipe's own `seed`."""
    sampler: Literal["tpe", "random"] = "tpe"
    """`tpe`: Optuna's tree-structured Parzen estimator, after ten random trials. `random`: all trials are."""
    prune: bool = True
    """Ends a trial whose best validation is below the median of five complete trials or more at the same one; only with
    `evaluation.metric` as the one objective and no constraints, which validations do not show."""
    objectives: list[str] = Field(default_factory=list)
    """Metrics on valid such as `recall@20/tail`, the k one of `evaluation.ks`; by default `evaluation.metric`.
    `balanced_error`, `gini` and `popularity` are minimised. With several, `front/` has the Pareto front's recipes."""
    constraints: dict[str, BoundConfig] = Field(default_factory=dict)
    """Limits of metrics: `"recall@20/tail" = { at_least = 0.02 }`. The best trial is the best of those within; where
    there is none, the nearest, with a warning."""

    def problems(self, evaluation: EvaluationConfig) -> Iterator[str]:
        """Yield metrics that are not measured."""
        if len(set(self.objectives)) < len(self.objectives):
            yield f"tune.objectives: expected distinct metrics, received {self.objectives}"
        known = measured_metrics(evaluation)
        for where, names in (("objectives", self.objectives), ("constraints", self.constraints)):
            if unknown := [name for name in names if name not in known]:
                yield f"tune.{where}: expected metrics among {', '.join(known)}, received {unknown[0]!r}"


def measured_metrics(evaluation: EvaluationConfig) -> list[str]:
    """List the metrics that every point of a curve has."""
    plain = ["recall", "ndcg", "precision", "hit_rate", "mrr", "coverage", "gini", "balanced_error", "popularity"]
    plain += ["psp", "psndcg"] if evaluation.propensity else []
    plain += [metric.name for metric in evaluation.metrics]
    by_bucket = [(metric, f"/{bucket}") for metric in _BY_BUCKET for bucket in BUCKET_NAMES]
    return [f"{name}@{k}{end}" for k in evaluation.ks for name, end in [*((name, "") for name in plain), *by_bucket]]


def maximised(metric: str) -> bool:
    """Return whether an objective of this metric is maximised."""
    return metric.partition("@")[0] not in ("balanced_error", "gini", "popularity")
