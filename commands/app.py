"""Create the Typer apps of the commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

from longtail import __version__

_VALUES = {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER"}
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class App(typer.Typer):
    """Extends Typer by help in plain text, with values of options in capitals."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[FunctionT], FunctionT]:
        """Register a function as a command.

        A parameter that is a dataclass stands for options: the fields of the dataclass, one each.
        """
        register = super().command(name, cls=_Command, **options)
        return lambda function: register(_with_value_names(_expand_records(function)))


class _Command(TyperCommand):
    """Shows required arguments in the usage line without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


def say_next(*words: object, note: str = "") -> None:
    """Print the next command on standard error."""
    sys.stdout.flush()  # so that lines come in order where both streams are one file
    print(f"next: {shlex.join(map(str, words))}{note}", file=sys.stderr)


def split_settings(
    settings: Sequence[str] | None, error: type[Exception], keys: Collection[str] = (), *, metavar: str = "KEY=VALUE",
    hint: str = "",
) -> dict[str, str]:  # fmt: skip
    """Split the texts of `--set` into keys and values.

    Args:
        error: raised for a wrong text; the command prints it in one line.
        keys: allowed keys; by default any.
        metavar: form of a text, as the command's help shows it.
    """
    values: dict[str, str] = {}
    for setting in settings or ():
        key, _, value = setting.partition("=")
        if not (key and value) or (keys and key not in keys):
            expected = f" of {', '.join(keys)}" if keys else ""
            raise error(f"--set: expected {metavar}{expected}, received {setting!r}{hint}")
        values[key] = value
    return values


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"longtail {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
]


def app_of_commands(text: str) -> App:
    """Create an app of several commands.

    Args:
        text: sentence that `--help` begins with.
    """
    app = App(no_args_is_help=True)

    @app.callback(help=text)
    def _(version: VersionOption = False) -> None:
        pass

    return app


def _expand_records(function: FunctionT) -> FunctionT:
    """Replace parameters that are dataclasses by the fields of the dataclasses, for Typer."""
    kinds = get_type_hints(function, include_extras=True)
    records: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        kind = kinds[parameter.name]
        if is_dataclass(kind):
            records[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            for field in fields(kind):
                default = Parameter.empty if field.default is MISSING else field.default
                parameters.append(
                    Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=options[field.name])
                )
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))
    if not records:
        return function

    @wraps(function)
    def call(**values: Any) -> Any:
        for name, record in records.items():
            values[name] = record(**{field.name: values.pop(field.name) for field in fields(record)})
        return function(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call  # type: ignore[return-value]


def _with_value_names(function: FunctionT) -> FunctionT:
    """Name arguments by parameters and option values by types."""
    # Evaluated once, because Typer would evaluate annotations of text into other objects.
    function.__annotations__ = get_type_hints(function, include_extras=True)
    for parameter, annotation in function.__annotations__.items():
        for info in getattr(annotation, "__metadata__", ()):
            if isinstance(info, ArgumentInfo):
                info.metavar = info.metavar or parameter.upper()
            elif isinstance(info, OptionInfo):
                info.metavar = _value_name(annotation.__origin__, info.metavar)
    return function


def _value_name(kind: Any, name: str | None) -> str | None:
    """Return the name of an option's value; None for flags and choices."""
    (kind,) = [part for part in get_args(kind) if part is not NoneType] if NoneType in get_args(kind) else [kind]
    if get_origin(kind) is not list:
        return name or _VALUES.get(kind)
    name = name or _VALUES[get_args(kind)[0]]
    return name if name.endswith(" (repeatable)") else f"{name} (repeatable)"
