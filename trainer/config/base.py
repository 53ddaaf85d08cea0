"""Base classes of the tables of a recipe."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from longtail.bundle.one_line import one_line
from longtail.bundle.validation import ValidationProblem, describe_problems
from longtail.trainer import register


class Section(BaseModel):
    """Hold a table of a recipe; unknown keys and infinite values are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    __repr__ = __str__ = one_line

    def _problems(self) -> Iterator[str]:
        """Yield conflicts between values that are each valid alone; the first conflict is raised."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self


class RowChoice(Section):
    """Choose a registered row by its name, with parameters; a bare string is a name.

    The parameters of a row, built-in or custom, are the keyword-only parameters of its function: names, types, bounds
    and defaults.
    """

    model_config = ConfigDict(extra="allow")
    registry: ClassVar[str]
    """A key of `register.GROUPS`."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _check_arguments(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        elif isinstance(value, dict):
            # Parameters alone keep the default row: `loss.family.pairwise = true`.
            value = {"name": cls.model_fields["name"].get_default()} | value
        if not isinstance(value, dict) or not isinstance(value["name"], str):
            return value
        row = f"{cls.registry} {value['name']!r}"
        parameters = _parameters_model(register.find(cls.registry, value["name"]), row)
        arguments = {name: argument for name, argument in value.items() if name != "name"}
        if arguments and not parameters.model_fields:
            raise ValueError(f"{row}: expected no parameters, received {next(iter(arguments))!r}")
        try:
            checked = parameters.model_validate(arguments)
        except ValidationError as error:
            problems = [_as_argument(problem, row) for problem in describe_problems(error.errors(), parameters)]
            raise ValidationError.from_exception_data(row, problems) from error
        # Without defaults, so that a recipe written back says what its author said.
        return {"name": value["name"]} | checked.model_dump(exclude_unset=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the row's function."""
        return dict(self.__pydantic_extra__ or {})

    def argument(self, name: str) -> Any:
        """Return the recipe's value of a parameter or its default; None if the row has no such parameter."""
        if name in self.arguments:
            return self.arguments[name]
        parameter = inspect.signature(register.find(self.registry, self.name)).parameters.get(name)
        return None if parameter is None else parameter.default

    def __str__(self) -> str:
        arguments = ", ".join(f"{name} = {value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name


def _as_argument(problem: ValidationProblem, row: str) -> InitErrorDetails:
    """Add the row's name to a message, and the argument's location."""
    message = f"{replace(problem, path='')} ({row})"
    kind = PydanticCustomError("argument", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=(problem.path,), input=problem.received)


@cache
def _parameters_model(function: Callable[..., Any], row: str) -> type[BaseModel]:
    """Create a model of the keyword-only parameters of a row's function."""
    parameters = [it for it in inspect.signature(function).parameters.values() if it.kind is it.KEYWORD_ONLY]
    try:
        hints = get_type_hints(function, include_extras=True) if parameters else {}
    except NameError as error:
        raise ValueError(f"{row}: expected annotations that resolve: {error}") from error
    fields: dict[str, Any] = {
        it.name: (hints.get(it.name, Any), ... if it.default is it.empty else it.default) for it in parameters
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a parameter may have the name of a method of pydantic's models
        config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
        return create_model(row, __config__=config, **fields)
