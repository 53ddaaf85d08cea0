"""Ranges over a recipe's keys: what may be tried, and the recipe that given values make. Needs no Keras."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from longtail.trainer.config import RangeConfig, Recipe, TuneConfig
from longtail.trainer.config.reading import in_words, set_value
from longtail.trainer.errors import RecipeError

_MEASURED_ALIKE = ("name", "seed", "evaluation", "tune", "data.split", "data.valid", "data.test")
"""Keys that no range is over: trials would not be measured on the same pairs by the same metrics."""


class Ranges:
    """The ranges of a recipe, checked key by key.

    Args:
        recipe: with a section `tune`.

    Raises:
        RecipeError: no section `tune`; a range over a key that there is not, that decides what is measured, or that
            refuses one of the range's ends or choices whatever the other keys are.
    """

    def __init__(self, recipe: Recipe) -> None:
        if recipe.tune is None:
            raise RecipeError("tune: expected a section [tune] with ranges in the recipe, found none")
        self.recipe, self.tune = recipe.model_copy(update={"tune": None}), recipe.tune
        self._tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"tune"})
        for key, values in self.tune.ranges.items():
            self._check(key, values)

    @property
    def keys(self) -> list[str]:
        """Dotted keys of the recipe, as declared."""
        return list(self.tune.ranges)

    def recipe_of(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe with some values by key, without `tune`; a table is set before the keys in it.

        Raises:
            RecipeError: it refuses them; with what was expected and received.
        """
        try:
            return self._validated(values)
        except ValidationError as error:
            raise RecipeError(in_words(error.errors())) from error

    def choices(self, key: str) -> dict[str | int | float | bool, Any]:
        """The choices of a key by what the study calls them: themselves, or the JSON of a list or table."""
        values = self.tune.ranges[key].choices or []
        return {value if isinstance(value, str | int | float) else _json(value): value for value in values}

    @cached_property
    def own(self) -> dict[str, Any] | None:
        """What the recipe itself has for every key, as the study calls it; None if that lies outside of a range."""
        found = {key: self._own_value(key, values) for key, values in self.tune.ranges.items()}
        return None if None in found.values() else found

    def _own_value(self, key: str, values: RangeConfig) -> Any:
        if values.choices is not None:
            same = (name for name, value in self.choices(key).items() if self._is_own(key, value))
            return next(same, None)
        node: Any = self.recipe.model_dump(mode="json", by_alias=True)
        for part in key.split("."):
            if isinstance(node, list):
                node = dict(enumerate(node)).get(int(part)) if part.isdigit() else None
            else:
                node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, int | float) or isinstance(node, bool) or values.low is None or values.high is None:
            return None
        off = 0 if values.step is None else abs((node - values.low) / values.step % 1 - 0.5) < 0.5 - 1e-9
        whole = not values.whole or node == int(node)
        return node if values.low <= node <= values.high and whole and not off else None

    def _is_own(self, key: str, value: Any) -> bool:
        try:
            return self._validated({key: value}) == self._validated({})
        except (RecipeError, ValidationError):
            return False

    def _validated(self, values: Mapping[str, Any]) -> Recipe:
        tree = copy.deepcopy(self._tree)
        for key in sorted(values, key=lambda key: key.count(".")):
            set_value(tree, key, copy.deepcopy(values[key]))
        return Recipe.model_validate(tree)

    def _check(self, key: str, values: RangeConfig) -> None:
        """Refuse what no other key could mend: what is wrong at the key or below it, and not of its combination."""
        for fixed in _MEASURED_ALIKE:
            if f"{key}.".startswith(f"{fixed}."):
                raise RecipeError(
                    f"tune.ranges: expected keys that leave alone what is measured, received {key!r}: trials differ in "
                    f"none of {', '.join(_MEASURED_ALIKE)}"
                )
        inside = {each: next(_candidates(of)) for each, of in self.tune.ranges.items() if each.startswith(f"{key}.")}
        parts = key.split(".")
        for value in _candidates(values):
            try:
                self._validated({key: value, **inside})
            except RecipeError as error:
                raise RecipeError(f"tune.ranges: {error}") from error
            except ValidationError as error:
                problems = error.errors()
                wrong = [
                    problem
                    for problem in problems
                    if problem["type"] == "extra_forbidden" or [*map(str, problem["loc"])][: len(parts)] == parts
                ]
                if wrong:
                    raise RecipeError(f"tune.ranges, {key} = {_json(value)}: {in_words(wrong)}") from error


def tuned(recipe: Recipe, trials: int | None = None) -> Recipe:
    """A recipe with another number of trials; as it is with None.

    Raises:
        RecipeError: less than one.
    """
    if trials is None or recipe.tune is None:
        return recipe
    if trials < 1:
        raise RecipeError(f"trials: expected at least 1, received {trials}")
    tune: TuneConfig = recipe.tune.model_copy(update={"trials": trials})
    return recipe.model_copy(update={"tune": tune})


def _candidates(values: RangeConfig) -> Iterator[Any]:
    yield from ([values.low, values.high] if values.choices is None else values.choices)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
