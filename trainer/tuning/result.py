"""What a study found: its trials, the best of them, and the Pareto front.

Legend: `N` trials, `A` axes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from longtail.bundle.arrays import Bools, Float64
from longtail.trainer.config import Recipe
from longtail.trainer.config.tune import maximised, objectives_of
from longtail.trainer.errors import TrainerError
from longtail.trainer.tuning.ranges import Ranges
from longtail.trainer.tuning.study import FOUND, Study, reason_of, values_of
from longtail.trainer.tuning.trial import Found

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Trial:
    """One trial that has ended.

    Attributes:
        number: from 1, in the order of trials.
        state: `complete`; `pruned`, ended early by its validations; `refused` by the recipe, its data or a crash.
        values: by key of the recipe.
        found: on valid; None unless complete.
        missed: by how much it lies outside of all constraints together; 0 within.
        validated: the recipe's metric at every validation that was reported.
        reason: why it was refused; None if it was not.
    """

    number: int
    state: Literal["complete", "pruned", "refused"]
    values: dict[str, Any]
    found: Found | None
    missed: float
    validated: list[float]
    reason: str | None

    @property
    def figures(self) -> dict[str, float]:
        """Every metric on valid by name; none unless complete."""
        return {} if self.found is None else self.found.metrics


@dataclass(frozen=True)
class TuneResult:
    """What `tune` found on valid.

    Attributes:
        recipe: that of the best trial, to `fit`.
        best: the trial of the best objective, the first where there are several, of those within the constraints; the
            nearest to them where there is none.
        front: the trials on the Pareto front, by the first axis, best first: no other is as good on every axis and
            better on one. Axes are the objectives, of trials within the constraints; with one objective, it and the
            constrained metrics, of all trials.
        axes: names of these metrics.
        trials: all, in order.
    """

    recipe: Recipe
    best: Trial
    front: list[Trial]
    axes: list[str]
    trials: list[Trial]


def read_result(study: Study, ranges: Ranges) -> TuneResult:
    """What a study has so far.

    Raises:
        TrainerError: none of its trials is complete.
    """
    trials = [_trial(number, frozen, ranges) for number, frozen in enumerate(study.finished, 1)]
    complete = [trial for trial in trials if trial.found is not None]
    if not complete:
        reasons = [f"trial {trial.number}: {trial.reason}" for trial in trials if trial.reason is not None]
        raise TrainerError(f"tune: expected trials that can be trained, found none of {len(trials)}; {reasons[0]}")
    objectives = objectives_of(ranges.tune, ranges.recipe.evaluation)
    least = min(trial.missed for trial in complete)
    nearest = [trial for trial in complete if trial.missed <= least + 1e-12]
    best = max(nearest, key=lambda trial: tuple(better_is_more(trial, objectives)))
    axes, among = objectives, nearest
    if len(objectives) == 1:
        axes = [*objectives, *(name for name in ranges.tune.constraints if name not in objectives)]
        among = complete
    front: list[Trial] = []
    if len(axes) > 1:
        on_front = non_dominated(np.array([better_is_more(trial, axes) for trial in among]))
        front = [trial for trial, there in zip(among, on_front, strict=True) if there]
        front.sort(key=lambda trial: better_is_more(trial, axes), reverse=True)
    return TuneResult(ranges.recipe_of(best.values), best, front, axes, trials)


def better_is_more(trial: Trial, metrics: list[str]) -> list[float]:
    """A complete trial's figures, those negated that are minimised."""
    return [trial.figures[name] if maximised(name) else -trial.figures[name] for name in metrics]


def non_dominated(figures_NA: Float64) -> Bools:
    """Whether no other row is at least as high everywhere and higher somewhere, bool [N]."""
    as_high_NN = (figures_NA[:, None] >= figures_NA[None]).all(axis=2)
    higher_NN = (figures_NA[:, None] > figures_NA[None]).any(axis=2)
    dominated_N: Bools = np.any(as_high_NN & higher_NN, axis=0)
    return ~dominated_N


def figures_in_words(found: Found | None, ranges: Ranges) -> str:
    """The objectives and the constrained metrics of a trial, with the constraints, and its λ and μ."""
    if found is None:
        return "nothing"
    bounds = ranges.tune.constraints
    names = dict.fromkeys([*objectives_of(ranges.tune, ranges.recipe.evaluation), *bounds])
    each = [f"{name} {found.metrics[name]:.4f}{f' ({bounds[name]})' if name in bounds else ''}" for name in names]
    return f"{', '.join(each)} at {found.setting}"


def value_in_words(value: Any) -> str:
    """A value of a recipe, short: `uniform(negatives = 512)` of a table with a name."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and "name" in value:
        inside = ", ".join(f"{key} = {value_in_words(each)}" for key, each in value.items() if key != "name")
        return f"{value['name']}({inside})" if inside else str(value["name"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _trial(number: int, frozen: optuna.trial.FrozenTrial, ranges: Ranges) -> Trial:
    found = Found(**frozen.user_attrs[FOUND]) if frozen.state.name == "COMPLETE" else None
    bounds = ranges.tune.constraints.items()
    missed = 0.0 if found is None else sum(bound.missed(found.metrics[name]) for name, bound in bounds)
    states: dict[str, Literal["complete", "pruned", "refused"]]
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "refused"}
    validated = [value for _, value in sorted(frozen.intermediate_values.items())]
    values = values_of(frozen.params, ranges)
    return Trial(number, states[frozen.state.name], values, found, missed, validated, reason_of(frozen))
