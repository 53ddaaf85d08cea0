"""Base classes of the tables of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from longtail.bundle.one_line import one_line
from longtail.bundle.validation import did_you_mean
from longtail.trainer import register


class Section(BaseModel):
    """Hold a table of a recipe; unknown keys and infinite values are refused, values are fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    __repr__ = __str__ = one_line

    def _problems(self) -> Iterator[str]:
        """Yield conflicts between values that are each valid alone; the first conflict is raised."""
        yield from ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self


class Choice(Section):
    """Choose a registered row by its name, with parameters; a bare string is a name.

    Fields are the parameters of built-in rows. A custom row may have others, which its function's signature defines.
    """

    model_config = ConfigDict(extra="allow")
    registry: ClassVar[str]
    """A key of `register.GROUPS`."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the row's function."""
        return self.model_dump(exclude={"name"}, exclude_none=True)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name} = {value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name

    def _problems(self) -> Iterator[str]:
        function, where = register.find(self.registry, self.name), f"{self.registry} {self.name!r}"
        parameters = [it for it in inspect.signature(function).parameters.values() if it.kind is it.KEYWORD_ONLY]
        known, given = [it.name for it in parameters], self.arguments
        if unknown := [name for name in given if name not in known]:
            hint = did_you_mean(unknown[0], known)
            yield f"{where}: expected {known or 'no parameters'}, received {unknown[0]!r}{hint}"
        settable = type(self).model_fields if register.is_ours(self.registry, self.name) else known
        needed = [it.name for it in parameters if it.default is it.empty and it.name in settable]
        if missing := [name for name in needed if name not in given]:
            yield f"{where}: expected a value for {missing[0]!r}, received none"
        extra = self.__pydantic_extra__ or {}
        try:
            hints = get_type_hints(function, include_extras=True) if extra else {}
        except NameError as error:
            yield f"{where}: expected annotations that resolve: {error}"
        for name, value in extra.items():
            try:
                adapter = TypeAdapter(hints.get(name, Any), config=ConfigDict(allow_inf_nan=False))
                extra[name] = adapter.validate_python(value)
            except ValidationError as error:
                yield f"{where}: {name}: {error.errors()[0]['msg']}, received {value!r}"
