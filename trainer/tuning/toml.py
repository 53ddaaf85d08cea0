"""A recipe as a TOML file, complete: what `load_recipe` makes of it is the same recipe."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from longtail.trainer.config import Recipe

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WIDE = 100
"""Characters beyond which a list of tables takes a line for each."""


def recipe_toml(recipe: Recipe, folder: Path) -> str:
    """TOML of what a recipe sets, with paths relative to the folder that the file is written to."""
    tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True, exclude={"tune"})
    data = recipe.data
    for key in ("train", "valid", "test", "queries", "labels"):
        if (places := getattr(data, key)) is not None:
            several = isinstance(places, list)
            found = [_beside(place, folder) for place in (places if several else [places])]
            tree["data"][key] = found if several else found[0]
    if isinstance(prior := recipe.evaluation.target_prior, Path):
        tree["evaluation"]["target_prior"] = _beside(prior, folder)
    lines = [f"{_key(key)} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict) and values:
            lines += ["", f"[{_key(section)}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _beside(place: Path | str, folder: Path) -> str:
    """A place as the folder's files name it; URLs stay."""
    return place if isinstance(place, str) else os.path.relpath(place.resolve(), folder.resolve())


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        parts = [_value(each) for each in value]
        short = f"[{', '.join(parts)}]"
        if len(short) <= _WIDE or not any(isinstance(each, dict) for each in value):
            return short
        return "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    return repr(value)


def _text(text: str) -> str:
    """A basic string of TOML, which is one of JSON but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
