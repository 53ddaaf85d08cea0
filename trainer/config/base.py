"""What every table of a recipe has in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from longtail.trainer import register


class Section(BaseModel):
    """A table of a recipe: unknown keys are refused, values are fixed and finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def one_of(what: str, table: Mapping[str, Any], name: str, *, also: str = "") -> None:
    """Raise ValueError for a name that is not in the table, nor what else could have put it there."""
    if name not in table:
        lacking = f", which is neither registered nor {also}" if also else ""
        raise ValueError(f"{what}: expected one of {', '.join(table) or 'none'}, received {name!r}{lacking}")


class Choice(Section):
    """A row of a table by its name, and its parameters; a bare string is a name.

    Fields are the parameters of our rows. A row of one's own may have others: `_check` reads them off its function.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of the row's function."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name} = {value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name

    def _check(self, what: str, table: Mapping[str, Any], function: Callable[[Any], Callable[..., Any]]) -> None:
        """Refuse a name that is not in the table, and parameters that its function does not take or lacks."""
        register.find(what, self.name)
        one_of(what, table, self.name, also=f"an entry point of {register.GROUPS[what]}")
        made = function(table[self.name])
        parameters = inspect.signature(made).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        for argument in self.arguments:
            if argument not in known:
                raise ValueError(f"{what} {self.name!r}: expected {known or 'no parameters'}, received {argument!r}")
        for parameter in parameters:
            missing = parameter.default is parameter.empty and parameter.name not in self.arguments
            of_recipe = parameter.name in type(self).model_fields or not register.is_ours(what, self.name)
            if missing and of_recipe and parameter.kind is parameter.KEYWORD_ONLY:
                raise ValueError(f"{what} {self.name!r}: expected a value for {parameter.name!r}, received none")
        if self.__pydantic_extra__:
            self._convert(what, made, self.__pydantic_extra__)

    def _convert(self, what: str, function: Callable[..., Any], extra: dict[str, Any]) -> None:
        """Hold parameters that are no fields to the annotations of their function."""
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ValueError(f"{what} {self.name!r}: expected annotations that resolve: {error}") from error
        for argument, value in extra.items():
            try:
                adapter = TypeAdapter(hints.get(argument, Any), config=ConfigDict(allow_inf_nan=False))
                extra[argument] = adapter.validate_python(value)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                raise ValueError(f"{what} {self.name!r}: {argument}: {problem}, received {value!r}") from error
