"""Describe values that pydantic refuses: their keys, what was expected, and names that were probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

_EXPECTED = {
    "bool_parsing": "true or false", "bool_type": "true or false", "float_parsing": "a number",
    "float_type": "a number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "int_type": "a whole number", "list_type": "a list", "missing": "a value", "path_type": "a path",
    "string_type": "a string", "finite_number": "a finite number", "tuple_type": "a list",
    "greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than": "less than {lt}",
    "less_than_equal": "at most {le}", "literal_error": "{expected}", "enum": "{expected}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "too_long": "at most {max_length} of them", "too_short": "at least {min_length} of them",
}  # fmt: skip
"""What pydantic's errors expect, by type; the braces are keys of an error's context."""
_LONGEST_NAME = 100
_TABLES = ("dict_type", "model_type", "model_attributes_type")


@dataclass(frozen=True)
class ValidationProblem:
    """One refused value."""

    path: str
    """Dotted path of a key, such as `evaluation.floor.tail`; empty if the error concerns the whole input."""
    message: str
    """What is wrong, such as `expected a whole number`."""
    received: object = None
    """The value, where `message` does not say it already."""
    has_value: bool = False
    """Whether `received` belongs to the sentence."""

    def __str__(self) -> str:
        received = f", received {self.received!r}" if self.has_value else ""
        return f"{self.path}: {self.message}{received}" if self.path else f"{self.message}{received}"


def nearest(name: str, names: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name most like another one, or None if none is alike.

    Args:
        alike: least ratio of difflib's matcher, from 0 to 1.
    """
    # A long name costs seconds to compare, and is nothing misspelt.
    return next(iter(get_close_matches(name, [*names], 1, alike)), None) if len(name) <= _LONGEST_NAME else None


def did_you_mean(
    name: str, names: Iterable[str], elsewhere: Mapping[str, str] | None = None, *, alike: float = 0.6
) -> str:
    """Return the end of an error message, `: did you mean 'weight'?`, or nothing.

    Args:
        alike: see `nearest`.
        elsewhere: known names by what other libraries call them.
    """
    names = [*names]
    meant = (elsewhere or {}).get(name)
    meant = meant if meant in names else nearest(name, names, alike)
    return "" if meant is None else f": did you mean {meant!r}?"


def describe_problems(
    errors: Sequence[ErrorDetails], model: type[BaseModel], elsewhere: Mapping[str, str] | None = None
) -> list[ValidationProblem]:
    """Describe validation errors of a model, one for each key.

    Args:
        elsewhere: keys of the model by what other libraries call them.
    """
    problems_by_path: dict[str, list[ValidationProblem]] = {}
    for problem in errors:
        described = _describe(problem, _walk(problem["loc"], model), elsewhere or {})
        problems_by_path.setdefault(described.path, []).append(described)
    return [_join(group) for group in problems_by_path.values()]


def model_keys(location: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """List the keys of the object whose unknown key ends a location."""
    return _keys(_walk(location, model).holder)


@dataclass(frozen=True)
class _Location:
    """The keys and models of a location of pydantic's."""

    path: tuple[str, ...]
    """Keys, without the names of types that pydantic adds."""
    holder: type[BaseModel] | None
    """The model of the object that has the last part as a key."""
    model: type[BaseModel] | None
    """The model of the value itself."""


def _describe(problem: ErrorDetails, location: _Location, elsewhere: Mapping[str, str]) -> ValidationProblem:
    kind, text, value, path = problem["type"], problem["msg"], problem["input"], ".".join(location.path)
    if kind == "value_error":
        return ValidationProblem(path, text.removeprefix("Value error, "))
    if text.startswith("expected "):  # an error of a model's own
        return ValidationProblem(path, text)
    if kind == "missing":
        return ValidationProblem(path, "expected a value, received none")
    if kind == "extra_forbidden":
        keys = _keys(location.holder)
        hint = did_you_mean(location.path[-1], keys, elsewhere)
        return ValidationProblem(path, f"expected one of {', '.join(keys)}, received an unknown key{hint}")
    if kind in _TABLES:
        keys_in_words = f" of {', '.join(_keys(location.model))}" if location.model else ""
        return ValidationProblem(path, f"expected a table{keys_in_words}", value, True)
    expected = re.sub("^(Input|String|Value) should (be|have) ", "", text)
    if kind in _EXPECTED:
        context = {name: _plain(item) for name, item in problem.get("ctx", {}).items()}
        expected = _EXPECTED[kind].format(**context)
        if "actual_length" in context:
            length = context["actual_length"]
            # Pydantic stops counting a long collection at its limit.
            return ValidationProblem(path, f"expected {expected}, received {'more' if length is None else length}")
    if kind == "literal_error" and (hint := did_you_mean(str(value), re.findall("'([^']*)'", expected))):
        return ValidationProblem(path, f"expected {expected}, received {value!r}{hint}")
    return ValidationProblem(path, f"expected {expected}", value, True)


def _plain(value: Any) -> Any:
    """Return a whole float as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _join(faults: Sequence[ValidationProblem]) -> ValidationProblem:
    """Join what the members of a union expect of one value."""
    if len(faults) == 1 or not all(fault.has_value for fault in faults):
        return faults[0]
    expected = dict.fromkeys(fault.message.removeprefix("expected ") for fault in faults)
    return ValidationProblem(faults[0].path, f"expected {' or '.join(expected)}", faults[0].received, True)


def _walk(location: Sequence[str | int], model: type[BaseModel]) -> _Location:
    path: list[str] = []
    kinds: list[Any] = [model]
    holder = None
    for part in location:
        if len(kinds) > 1 and isinstance(part, str):  # the part names a member of the union
            kinds = [member for member in kinds if isinstance(member, type) and member.__name__ in part] or kinds[:1]
            continue
        kind, origin = (kinds[0], get_origin(kinds[0])) if kinds else (None, None)
        if part == "[key]":
            continue
        path.append(str(part))
        if (holder := _as_model(kind)) is not None:
            fields = {field.alias or name: field for name, field in holder.model_fields.items()}
            kinds = [*_members(fields[str(part)].annotation)] if str(part) in fields else []
        else:
            kinds = [*_members(get_args(kind)[-1 if origin is dict else 0])] if origin in (dict, list, tuple) else []
    return _Location(tuple(path), holder, next(filter(None, map(_as_model, kinds)), None))


def _as_model(kind: Any) -> type[BaseModel] | None:
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _keys(model: type[BaseModel] | None) -> list[str]:
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, as pydantic tells them apart, or the type itself."""
    if hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        for member in get_args(annotation):
            if member is not NoneType:
                yield from _members(member)
    else:
        yield annotation
