"""Convert a recipe's ranges to parameters of Optuna, and their values to recipes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import optuna
from pydantic import ValidationError

from longtail.trainer.config import Recipe
from longtail.trainer.config.reading import format_errors, set_value
from longtail.trainer.config.tune import RangeConfig
from longtail.trainer.errors import RecipeError

_FIXED_KEYS = ("name", "seed", "evaluation", "tune", "data")
"""Keys without ranges: trials are compared on the same pairs by the same metrics."""


class SearchSpace:
    """Check a recipe's ranges, suggest values, and create recipes with them.

    Raises:
        RecipeError: the recipe has no section `tune`, or a range has values that are never valid for its key.
    """

    def __init__(self, recipe: Recipe) -> None:
        if recipe.tune is None:
            raise RecipeError("tune: expected a section [tune] with ranges in the recipe, found none")
        ranges = recipe.tune.ranges
        if recipe.model.temperature == "auto" and not {"model", "model.temperature"} & {*ranges}:
            raise RecipeError("tune: expected a number or a range for model.temperature, received 'auto'")
        self.recipe, self.tune = recipe.model_copy(update={"tune": None}), recipe.tune
        self._tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"tune"})
        for key, span in ranges.items():
            self._check_range(key, span)
        self.objectives = self.tune.objectives or [recipe.evaluation.metric]
        self.prunes = self.objectives == [recipe.evaluation.metric] and not self.tune.constraints
        """Whether validations, which measure the metric alone, may stop a trial."""

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Suggest the values of a trial by key."""
        for key, span in self.tune.ranges.items():
            if span.choices is not None:
                trial.suggest_categorical(key, list(self._choices(key)))
            else:
                suggest: Any = trial.suggest_int if span.integers else trial.suggest_float
                suggest(key, span.low, span.high, log=span.log)
        return self.values(trial.params)

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Convert Optuna's parameters to values of the recipe by key."""
        return {key: self._choices(key).get(value, value) for key, value in params.items()}

    def create_recipe(self, values: Mapping[str, Any]) -> Recipe:
        """Create the recipe with some values by key; RecipeError if they are not valid together."""
        try:
            return self._validate(values)
        except ValidationError as error:
            raise RecipeError(format_errors(error.errors())) from error

    def recipe_params(self) -> dict[str, Any]:
        """Return Optuna's parameters of the recipe's values within ranges."""
        params: dict[str, Any] = {}
        for key, span in self.tune.ranges.items():
            node: Any = self.recipe.model_dump(mode="json", by_alias=True)
            for step in key.split("."):
                node = node[int(step)] if isinstance(node, list) else (node or {}).get(step)
            candidates = self._choices(key) if span.choices is not None else {node: node} if span.contains(node) else {}
            for name, value in candidates.items():
                try:
                    if self._validate({key: value}) == self.recipe:
                        params[key] = name
                except (RecipeError, ValidationError):  # valid only together with other keys
                    continue
        return params

    def _choices(self, key: str) -> dict[str | int | float, Any]:
        """Return the choices of a key by their names in Optuna.

        A name is the value itself, or JSON for a list or table.
        """
        choices = self.tune.ranges[key].choices or []
        return {value if isinstance(value, str | int | float) else json.dumps(value): value for value in choices}

    def _validate(self, values: Mapping[str, Any]) -> Recipe:
        tree = copy.deepcopy(self._tree)
        for key in sorted(values, key=lambda key: key.count(".")):
            set_value(tree, key, copy.deepcopy(values[key]))
        return Recipe.model_validate(tree)

    def _check_range(self, key: str, span: RangeConfig) -> None:
        """Refuse values that are wrong for all values of other keys."""
        if key.split(".")[0] in _FIXED_KEYS:
            raise RecipeError(
                f"tune.ranges: expected no range of {', '.join(_FIXED_KEYS)}, which trials have in common, "
                f"received {key!r}"
            )
        nested = {
            name: (inner.choices or [inner.low])[0]
            for name, inner in self.tune.ranges.items()
            if name.startswith(f"{key}.")
        }
        for value in span.choices or [span.low, span.high]:
            try:
                self._validate({key: value, **nested})
            except RecipeError as error:
                raise RecipeError(f"tune.ranges: {error}") from error
            except ValidationError as error:
                problems = [
                    problem for problem in error.errors()
                    if problem["type"] == "extra_forbidden"
                    or f"{'.'.join(map(str, problem['loc']))}.".startswith(f"{key}.")
                ]  # fmt: skip
                if problems:
                    raise RecipeError(f"tune.ranges, {key} = {json.dumps(value)}: {format_errors(problems)}") from error
