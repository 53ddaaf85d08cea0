"""The API reference as Markdown, from sources that griffe reads without importing them.

Building the reference therefore needs neither TensorFlow nor FAISS. The reference of a module lists the names in
`__all__`. For a module without `__all__`, it lists the public names that the module defines.
Docstrings are Markdown with Google's sections.
"""

from __future__ import annotations

import ast
import logging
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import griffe

_ROOT = Path(__file__).resolve().parents[2]
_PARSER = griffe.Parser.google
_OPTIONS: dict[str, Any] = {"warnings": True, "warn_missing_types": False, "warn_unknown_params": True}

_DOCTEST = re.compile(r"(?m)^>>> (?:.+(?:\n|\Z))+")

_QUOTED = re.compile(r"'([^'\"\\]*)'")
"""Strings in the quotes of `ast`; pages show them in double quotes, like formatted code."""

_RAISES = re.compile(r"(?ms)^([ ]*)Raises:\n(?:\1    .*?(?:\n|\Z))+")
_UNNAMED = re.compile(r"(?m)^( *)(?=as `)")
"""An entry of `Raises:` such as "as `open`": a sentence, where griffe wants an error's name and drops it otherwise."""


class _Warnings(logging.Handler):
    """Makes an error of what griffe finds wrong with docstrings."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise it, unless it is of several parameters that share one line, `a, b: …`.

        Raises:
            ValueError: a docstring is not what griffe reads.
        """
        message = record.getMessage()
        if not re.search(r"Parameter '[^']*, ", message):
            raise ValueError(message.rpartition("/longtail/")[2])


@cache
def _rooms() -> griffe.ModulesCollection:
    """Every module of `longtail`, read once."""
    loader = griffe.GriffeLoader(
        search_paths=[_ROOT], docstring_parser=_PARSER, docstring_options=_OPTIONS, allow_inspection=False
    )
    loader.load("longtail")
    loader.resolve_aliases(implicit=False, external=False)
    griffe_log = logging.getLogger("griffe")
    griffe_log.addHandler(_Warnings(logging.WARNING))
    griffe_log.propagate = False
    return loader.modules_collection


def module_reference(name: str, marks: str) -> str:
    """Return the reference of one module, its members under headings of these marks, such as `###`.

    Raises:
        ValueError: no such module, or a docstring that cannot be read.
    """
    try:
        module = _rooms()[name]
    except KeyError:
        raise ValueError(f"api: expected a module of the repository, received {name!r}") from None
    lines = _docstring(module)
    for member in _public(module):
        lines += _member(member, member.name, marks)
    return "\n".join(lines)


def _public(module: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    if module.exports is not None:
        return [module.members[str(name)] for name in module.exports]
    return [
        member
        for member in module.members.values()
        if not member.is_alias and not member.name.startswith("_") and (member.has_docstring or not member.is_attribute)
    ]


def _member(member: griffe.Object | griffe.Alias, name: str, marks: str) -> list[str]:
    """One class, function or constant under a heading."""
    member = member.final_target if member.is_alias else member
    if member.is_class:
        return _class(member, name, marks)
    if member.is_function:
        return [f"{marks} `{name}`", "", *_code(f"def {_signature(member, name)}", member), *_docstring(member)]
    if member.is_module:
        return []
    declared = f": {member.annotation}" if member.annotation is not None else ""
    value = _value(member)
    constant = _code(f"{name}{declared}{f' = {value}' if value else ''}") if declared or value else []
    return [f"{marks} `{name}`", "", *constant, *_docstring(member)]


def _class(member: griffe.Object | griffe.Alias, name: str, marks: str) -> list[str]:
    documented = _attribute_names(member)
    bases = [str(base) for base in member.bases if str(base) not in ("object", "BaseModel", "Section", "Record")]
    initializer = member.members.get("__init__")
    in_signature = "dataclass" in member.labels
    fields: list[str] = []
    methods: list[str] = []
    for field, inner in member.members.items():
        if field.startswith("_") or inner.is_alias or inner.is_class or field == "model_config":
            continue
        if inner.is_function:
            methods += [f"{marks}# `{name}.{field}`", ""]
            methods += [*_code(f"def {_signature(inner, field)}", inner), *_docstring(inner)]
        elif "property" in inner.labels:
            fields += _field_entry(field, inner, "")
        elif inner.annotation is not None and field not in documented and (inner.has_docstring or not in_signature):
            fields += _field_entry(field, inner, _value(inner))
    signature = ""
    if initializer is not None and initializer.is_function:
        signature = _signature(initializer, name).removesuffix(" -> None")
    head = [f"{marks} `{name}`", ""]
    if signature not in ("", f"{name}()"):
        head += _code(f"class {signature}")
    if bases:
        head += [f"Bases: {', '.join(f'`{base}`' for base in bases)}", ""]
    return [*head, *_docstring(member), *fields, *([""] if fields else []), *methods]


def _code(signature: str, function: griffe.Object | griffe.Alias | None = None) -> list[str]:
    """A signature in a fence; a function's with what is before its `def`."""
    if function is not None:
        if "async" in function.labels:
            signature = f"async {signature}"
        if "classmethod" in function.labels:
            signature = f"@classmethod\n{signature}"
    return ["```python", _QUOTED.sub(r'"\1"', signature).replace("e+", "e"), "```", ""]


def _field_entry(name: str, member: griffe.Object | griffe.Alias, value: str) -> list[str]:
    """One attribute as an entry of a list: its type, its default, then its docstring, indented."""
    declared = f": `{member.annotation}`" if member.annotation is not None else ""
    default = f", default `{value}`" if value else ""
    body = textwrap.indent("\n".join(_docstring(member) + _bounds(member)).strip(), "  ")
    return [f"- **`{name}`**{declared}{default}", *(["", body, ""] if body else [])]


def _value(member: griffe.Object | griffe.Alias) -> str:
    """A default or constant, empty where it is long; of pydantic's `Field(…)` its default."""
    value = "" if member.value is None else str(member.value)
    if value.startswith("Field("):
        value = _field(value).get("default", "")
    return value if "\n" not in value and len(value) <= 60 else ""


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


def _signature(function: griffe.Object | griffe.Alias, name: str) -> str:
    """`name(a, *, b: int = 0) -> str` without `self` and `cls`; a long one has a line for each parameter."""
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
        shown.append(" ".join(text.split()))
        last = kind
    returns = f" -> {function.returns}" if function.returns is not None else ""
    line = f"{name}({', '.join(shown)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in shown), f"){returns}"])


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
            raise ValueError(
                f"{member.path}: expected sections Args, Attributes, Returns, Raises or Example, found {kind}"
            )
    return lines


def _fenced(text: str) -> list[str]:
    """Lines of Markdown in which doctests stand in fences."""
    return _DOCTEST.sub(lambda test: f"```pycon\n{test[0].rstrip()}\n```\n", text).splitlines()
