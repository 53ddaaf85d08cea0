"""`[tune]`: the ranges, objectives and constraints of `longtail-train tune`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from longtail.bundle import BUCKET_NAMES
from longtail.trainer.config.base import Section
from longtail.trainer.config.sections import EvaluationConfig

_BY_BUCKET = ("recall", "exposure", "coverage", "balanced_error")


class RangeConfig(Section):
    """List the values of one key: `{ low = 0.05, high = 0.5, log = true }` or `{ choices = ["unit", "importance"] }`.

    If `low` and `high` are whole, only whole numbers are tried; write `low = 0.0` for a share. Values in steps are
    choices: `{ choices = [32, 64, 96] }`.
    """

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    """Samples uniformly in the logarithm, which suits rates and temperatures; by default uniformly in the value."""
    choices: list[Any] | None = Field(default=None, min_length=1)
    """A list of values of the key. A value may be a table: `{ name = "uniform", negatives = 512 }`."""

    def _problems(self) -> Iterator[str]:
        low, high = self.low, self.high
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                yield "expected choices alone, or low and high, received choices and others"
        elif low is None or high is None:
            yield f"expected choices, or low and high, received {', '.join(self.model_fields_set) or 'none'}"
        elif low >= high:
            yield f"expected low < high, received {low} and {high}"
        elif self.log and low <= 0:
            yield f"log: expected low > 0, received {low}"

    @property
    def integers(self) -> bool:
        """Return whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def contains(self, value: object) -> bool:
        """Return whether a value is a number between `low` and `high`."""
        if self.low is None or self.high is None or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high


class TuneConfig(Section):
    """Configure `longtail-train tune`. Trials are measured on valid, as `fit` does; no trial reads test."""

    ranges: dict[str, RangeConfig] = Field(min_length=1)
    """Ranges by the key that `--set` takes, in quotes: `"model.temperature" = { low = 0.05, high = 0.5, log = true }`.
    Keys that change the measurement itself are not allowed: `name`, `seed`, `data`, `evaluation` and `tune`."""
    trials: int = Field(default=20, ge=1)
    """Total number of trials; earlier runs, pruned and refused trials count too. Optuna's
    tree-structured Parzen estimator suggests values, after ten random trials."""
    objectives: list[str] = Field(default_factory=list)
    """Metrics on valid such as `recall@20/tail`, with k from `evaluation.ks`; by default `evaluation.metric`.
    `balanced_error`, `gini` and `popularity` are minimised. `best.toml` is the trial with the best first objective;
    Optuna's `study.best_trials` is the Pareto front."""
    constraints: dict[str, float] = Field(default_factory=dict)
    """Limits of metrics: `"recall@20/tail" = 0.02` is a least value; `balanced_error`, `gini` and `popularity` have a
    largest one. The best trial is the best within all limits. If no trial is, the nearest is chosen, with a warning."""

    def problems(self, evaluation: EvaluationConfig) -> Iterator[str]:
        """Yield objectives and constraints whose metrics are not measured."""
        if len(set(self.objectives)) < len(self.objectives):
            yield f"tune.objectives: expected distinct metrics, received {self.objectives}"
        metrics = measured_metrics(evaluation)
        for key, names in (("objectives", self.objectives), ("constraints", self.constraints)):
            if unknown := [name for name in names if name not in metrics]:
                yield f"tune.{key}: expected metrics among {', '.join(metrics)}, received {unknown[0]!r}"


def measured_metrics(evaluation: EvaluationConfig) -> list[str]:
    """List the metrics that are measured at every λ and μ."""
    plain = ["recall", "ndcg", "precision", "hit_rate", "mrr", "coverage", "gini", "balanced_error", "popularity"]
    plain += ["psp", "psndcg"] if evaluation.propensity else []
    plain += [metric.name for metric in evaluation.metrics]
    by_bucket = [(metric, f"/{bucket}") for metric in _BY_BUCKET for bucket in BUCKET_NAMES]
    return [f"{name}@{k}{end}" for k in evaluation.ks for name, end in [*((name, "") for name in plain), *by_bucket]]


def maximised(metric: str) -> bool:
    """Return whether an objective of this metric is maximised."""
    return metric.partition("@")[0] not in ("balanced_error", "gini", "popularity")
