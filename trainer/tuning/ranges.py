"""Ranges over a recipe's keys: checks, suggested values, and recipes with these values, without Keras."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from longtail.trainer.config import RangeConfig, Recipe
from longtail.trainer.config.reading import in_words, set_value
from longtail.trainer.errors import RecipeError

if TYPE_CHECKING:
    import optuna

_MEASURED_ALIKE = ("name", "seed", "evaluation", "tune", "data.split", "data.valid", "data.test")
"""Keys without ranges: trials must be measured on the same pairs by the same metrics."""


class Ranges:
    """Hold the ranges of a recipe, checked key by key.

    Raises:
        RecipeError: the recipe has no section `tune`, or a range has values that are never valid for its key.
    """

    def __init__(self, recipe: Recipe) -> None:
        if recipe.tune is None:
            raise RecipeError("tune: expected a section [tune] with ranges in the recipe, found none")
        if recipe.model.temperature == "auto" and not {"model", "model.temperature"} & {*recipe.tune.ranges}:
            raise RecipeError("tune: expected a number or a range for model.temperature, received 'auto'")
        for key in ("model", "model.temperature"):
            if key in recipe.tune.ranges and '"auto"' in json.dumps(recipe.tune.ranges[key].choices):
                raise RecipeError(f"tune.ranges: {key!r}: expected numbers for a temperature, received 'auto'")
        self.recipe, self.tune = recipe.model_copy(update={"tune": None}), recipe.tune
        self._tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"tune"})
        for key, values in self.tune.ranges.items():
            self._check(key, values)

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Suggest the values of a trial by key."""
        for key, values in self.tune.ranges.items():
            if values.choices is not None:
                trial.suggest_categorical(key, list(self._choices(key)))
            else:
                suggest: Any = trial.suggest_int if values.whole else trial.suggest_float
                steps = {} if values.step is None else {"step": values.step}
                suggest(key, values.low, values.high, log=values.log, **steps)
        return self.values(trial.params)

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Convert Optuna's parameters to values of the recipe by key."""
        return {key: self._choices(key).get(value, value) for key, value in params.items()}

    def recipe_of(self, values: Mapping[str, Any]) -> Recipe:
        """Create the recipe with some values by key, without `tune`; RecipeError if they are not valid together."""
        try:
            return self._validated(values)
        except ValidationError as error:
            raise RecipeError(in_words(error.errors())) from error

    def own(self) -> dict[str, Any]:
        """Return Optuna's parameters for the recipe's own values, for keys whose range holds the value."""
        found: dict[str, Any] = {}
        whole = self.recipe.model_dump(mode="json", by_alias=True)
        for key, values in self.tune.ranges.items():
            candidates = self._choices(key)
            if values.low is not None and values.high is not None:
                node: Any = whole
                for part in key.split("."):
                    node = node[int(part)] if isinstance(node, list) else (node or {}).get(part)
                inside = isinstance(node, int | float) and values.low <= node <= values.high
                steps = (node - values.low) / values.step if inside and values.step else 0
                candidates = {node: node} if inside and abs(steps - round(steps)) < 1e-9 else {}
            if same := [name for name, value in candidates.items() if self._is_own(key, value)]:
                found[key] = same[0]
        return found

    def _is_own(self, key: str, value: Any) -> bool:
        try:
            return self._validated({key: value}) == self.recipe
        except (RecipeError, ValidationError):
            return False

    def _choices(self, key: str) -> dict[str | int | float, Any]:
        """Return the choices of a key by their names in Optuna: the value itself, or JSON for a list or table."""
        choices = self.tune.ranges[key].choices or []
        return {value if isinstance(value, str | int | float) else json.dumps(value): value for value in choices}

    def _validated(self, values: Mapping[str, Any]) -> Recipe:
        tree = copy.deepcopy(self._tree)
        for key in sorted(values, key=lambda key: key.count(".")):
            set_value(tree, key, copy.deepcopy(values[key]))
        return Recipe.model_validate(tree)

    def _check(self, key: str, values: RangeConfig) -> None:
        """Refuse values that are wrong in themselves, not only in combination with other keys."""
        if any(f"{key}.".startswith(f"{fixed}.") for fixed in _MEASURED_ALIKE):
            raise RecipeError(
                f"tune.ranges: expected keys that leave alone what is measured, received {key!r}: trials differ in "
                f"none of {', '.join(_MEASURED_ALIKE)}"
            )
        below = {
            each: (of.choices or [of.low])[0] for each, of in self.tune.ranges.items() if each.startswith(f"{key}.")
        }
        for value in values.choices or [values.low, values.high]:
            try:
                self._validated({key: value, **below})
            except RecipeError as error:
                raise RecipeError(f"tune.ranges: {error}") from error
            except ValidationError as error:
                wrong = [
                    problem
                    for problem in error.errors()
                    if problem["type"] == "extra_forbidden"
                    or f"{'.'.join(map(str, problem['loc']))}.".startswith(f"{key}.")
                ]
                if wrong:
                    raise RecipeError(f"tune.ranges, {key} = {json.dumps(value)}: {in_words(wrong)}") from error
