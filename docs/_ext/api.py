"""The API reference as Markdown, from sources that griffe reads without importing them.

So it needs neither TensorFlow nor FAISS. What a module's `__all__` names is shown, wherever it is defined; of a module
without one, what is defined there and does not begin with `_`. Docstrings are Markdown with Google's sections.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from sphinx.util import logging as sphinx_logging

_ROOMS = ("bundle", "client", "index", "serving", "state", "tables", "trainer")
_ROOT = Path(__file__).resolve().parents[2]
_PARSER = griffe.Parser.google
_OPTIONS: dict[str, Any] = {"warnings": True, "warn_missing_types": False, "warn_unknown_params": True}

_DOCTEST = re.compile(r"(?m)^>>> (?:.+(?:\n|\Z))+")

_RAISES = re.compile(r"(?ms)^([ ]*)Raises:\n(?:\1    .*?(?:\n|\Z))+")
_UNNAMED = re.compile(r"(?m)^( *)(?=as `)")
"""An entry of `Raises:` such as "as `open`": a sentence, where griffe wants an error's name and drops it otherwise."""

_log = sphinx_logging.getLogger(__name__)


class _Warnings(logging.Handler):
    """Passes on what griffe finds wrong with docstrings as warnings of Sphinx, which end the build."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it again, unless it is of several parameters that share one line, `a, b: …`."""
        message = record.getMessage()
        if not re.search(r"Parameter '[^']*, ", message):
            _log.warning("%s", message.rpartition("/longtail/")[2])


@cache
def _rooms() -> griffe.ModulesCollection:
    """Every module of `longtail`, read once."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "longtail")
        package.mkdir()
        for room in _ROOMS:  # links to the rooms alone: griffe would follow `.types/longtail` into itself
            (package / room).symlink_to(_ROOT / room)
        loader = griffe.GriffeLoader(
            search_paths=[folder], docstring_parser=_PARSER, docstring_options=_OPTIONS, allow_inspection=False
        )
        for room in _ROOMS:
            loader.load(f"longtail.{room}")
    loader.resolve_aliases(implicit=False, external=False)
    griffe_log = logging.getLogger("griffe")
    griffe_log.addHandler(_Warnings(logging.WARNING))
    griffe_log.propagate = False
    return loader.modules_collection


def module_reference(name: str) -> str:
    """The reference of one module, to stand on a page of its own or under a heading.

    Raises:
        ValueError: no such module.
    """
    try:
        module = _rooms()[name]
    except KeyError:
        raise ValueError(f"api: expected a module of the repository, received {name!r}") from None
    lines = [f"```{{py:module}} {name}", "```", "", *_docstring(module)]
    for member in _public(module):
        lines += _member(member, member.name)
    return "\n".join(lines)


def _public(module: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    if module.exports is not None:
        return [module.members[str(name)] for name in module.exports]
    return [
        member
        for member in module.members.values()
        if not member.is_alias and not member.name.startswith("_") and (member.has_docstring or not member.is_attribute)
    ]


def _member(member: griffe.Object | griffe.Alias, name: str) -> list[str]:
    """One class, function or constant as a directive of Sphinx' Python domain."""
    member = member.final_target if member.is_alias else member
    if member.is_class:
        return _class(member, name)
    if member.is_function:
        return _directive("function", f"{name}{_signature(member)}", _docstring(member))
    if member.is_module:
        return []
    options = [_type(member)] if member.annotation is not None else []
    return _directive("data", name, _docstring(member), options + _value(member))


def _class(member: griffe.Object | griffe.Alias, name: str) -> list[str]:
    body = _docstring(member)
    documented = _attribute_names(member)
    bases = [str(base) for base in member.bases if str(base) not in ("object", "BaseModel", "Section", "Record")]
    if bases:
        body = [f"Bases: {', '.join(f'`{base}`' for base in bases)}", "", *body]
    initializer = member.members.get("__init__")
    in_signature = "dataclass" in member.labels
    for field, inner in member.members.items():
        if field.startswith("_") or inner.is_alias or inner.is_class or field == "model_config":
            continue
        if inner.is_function:
            kind = "classmethod" if "classmethod" in inner.labels else "method"
            body += _directive(kind, f"{field}{_signature(inner)}", _docstring(inner), awaited=inner)
        elif "property" in inner.labels:
            options = [_type(inner)] if inner.annotation is not None else []
            body += _directive("property", field, _docstring(inner), options)
        elif inner.annotation is not None and field not in documented and (inner.has_docstring or not in_signature):
            options = [_type(inner)]
            options += _value(inner)
            body += _directive("attribute", field, _docstring(inner) + _bounds(inner), options)
    signature = ""
    if initializer is not None and initializer.is_function:
        signature = _signature(initializer).removesuffix(" -> None")
    return _directive("class", f"{name}{signature}", body)


def _type(member: griffe.Object | griffe.Alias) -> str:
    return f":type: {json.dumps(str(member.annotation), ensure_ascii=False)}"


def _value(member: griffe.Object | griffe.Alias) -> list[str]:
    """A default or constant as an option, unless it is long; of pydantic's `Field(…)` its default."""
    value = "" if member.value is None else str(member.value)
    if value.startswith("Field("):
        value = _field(value).get("default", "")
    return (
        [f":value: {json.dumps(value, ensure_ascii=False)}"] if value and "\n" not in value and len(value) <= 60 else []
    )


def _field(value: str) -> dict[str, str]:
    """The arguments of `Field(…)`, by name, as written; a factory such as `list` as the call of it."""
    call = ast.parse(value, mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = {keyword.arg or "": ast.unparse(keyword.value) for keyword in call.keywords}
    if call.args:
        arguments["default"] = ast.unparse(call.args[0])
    if factory := arguments.pop("default_factory", None):
        arguments["default"] = f"{factory}()"
    return arguments


_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "a multiple of", "pattern": "matches"}
_BOUNDS |= {"min_length": "at least this many:", "max_length": "at most this many:"}


def _bounds(member: griffe.Object | griffe.Alias) -> list[str]:
    """What pydantic's `Field(…)` demands of a value, as a paragraph: "Expected: ≥ 0, < 1."."""
    value = "" if member.value is None else str(member.value)
    if not value.startswith("Field("):
        return []
    bounds = [f"{_BOUNDS[name]} `{bound.strip(chr(39))}`" for name, bound in _field(value).items() if name in _BOUNDS]
    return [f"Expected: {', '.join(bounds)}.", ""] if bounds else []


def _attribute_names(member: griffe.Object | griffe.Alias) -> set[str]:
    """Attributes that the class' docstring already explains."""
    names: set[str] = set()
    for part in _sections(member):
        if part.kind is griffe.DocstringSectionKind.attributes:
            names |= {name.strip() for attribute in part.value for name in attribute.name.split(",")}
    return names


def _signature(function: griffe.Object | griffe.Alias) -> str:
    """`(a, *, b: int = 0) -> str`, without `self` and `cls`."""
    shown: list[str] = []
    last: griffe.ParameterKind | None = None
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and last not in (kind, griffe.ParameterKind.var_positional):
            shown.append("*")
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        shown.append(text)
        last = kind
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return f"({', '.join(shown)}){returns}".replace("\n", " ")


def _directive(
    kind: str,
    signature: str,
    body: list[str],
    options: list[str] | None = None,
    awaited: griffe.Object | griffe.Alias | None = None,
) -> list[str]:
    """A MyST directive whose fence is longer than any inside it."""
    options = list(options or [])
    if awaited is not None and "async" in awaited.labels:
        options.append(":async:")
    longest = max((len(line) - len(line.lstrip("`")) for line in map(str.strip, body)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{{py:{kind}}} {signature}", *options, "", *body, fence, ""]


def _sections(member: griffe.Object | griffe.Alias) -> list[griffe.DocstringSection]:
    if member.docstring is None:
        return []
    member.docstring.value = _RAISES.sub(lambda raises: _UNNAMED.sub(r"\1—: ", raises[0]), member.docstring.value)
    return member.docstring.parse(_PARSER, **_OPTIONS)


def _docstring(member: griffe.Object | griffe.Alias) -> list[str]:
    """A docstring's prose, and its sections as lists."""
    lines: list[str] = []
    titles = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Raises", "returns": "Returns"}
    for part in _sections(member):
        kind = part.kind.value
        if kind == "text":
            lines += [*_fenced(str(part.value)), ""]
        elif kind in titles:
            lines += [f"**{titles[kind]}**", ""]
            for item in part.value:
                name = str(item.annotation) if kind == "raises" else getattr(item, "name", "") or ""
                what = f"`{name}`" if name not in ("", "—") else ""
                text = textwrap.indent(item.description.strip(), "  ").strip()
                lines.append(f"- {what}: {text}" if what else f"- {text}")
            lines.append("")
        elif kind == "examples":
            lines += ["**Example**", ""]
            for what, text in part.value:
                fenced = what is griffe.DocstringSectionKind.examples
                lines += ["```pycon", text, "```", ""] if fenced else [text, ""]
        elif kind == "admonition":
            lines += [f"**{part.title}**", "", *_fenced(part.value.contents), ""]
        else:
            _log.warning(
                "%s: expected sections Args, Attributes, Returns, Raises or Example, found %s", member.path, kind
            )
    return lines


def _fenced(text: str) -> list[str]:
    """Lines of Markdown in which doctests stand in fences."""
    return _DOCTEST.sub(lambda test: f"```pycon\n{test[0].rstrip()}\n```\n", text).splitlines()
