"""Recipes as files: TOML, overrides, and readable messages for mistakes in either."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from longtail.bundle.validation import describe_problems, did_you_mean
from longtail.tables import DataError, is_query
from longtail.trainer.config.recipe import Recipe
from longtail.trainer.config.sections import SOURCE_KEYS, DataConfig
from longtail.trainer.errors import RecipeError

_PARQUET = b"PAR1"
_TABLES = (".csv", ".tsv", ".parquet", ".jsonl")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe and apply overrides; paths of data become relative to the recipe's folder.

    Args:
        overrides: `KEY=VALUE`, such as `model.dim=32`; the value is TOML or a bare string.

    Raises:
        RecipeError: the file is unreadable, a key is unknown or a value is not allowed; the message names the key.

    Example:
        >>> recipe = load_recipe("recipe.toml", ["model.dim=32"])
        >>> recipe.name, recipe.model.dim
        ('tiny', 32)
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content.startswith(_PARQUET) or path.suffix in _TABLES:
            raise RecipeError(
                f"{path}: expected a recipe, which is a TOML file, received a table: `longtail-train init {path}` "
                "drafts a recipe from it"
            )
        tree = tomllib.loads(content.decode())
    except OSError as error:
        raise RecipeError(f"{path}: expected a recipe: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: expected TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_absent_ids(tree, path.parent) or format_errors(error.errors())}") from error
    try:
        return _change_sources(recipe, lambda source: path.parent / source)
    except DataError as error:
        raise RecipeError(f"{path}: {error}") from error


def _absent_ids(tree: dict[str, Any], folder: Path) -> str | None:
    """Describe a column of ids that no training file has; None if unknown.

    This problem goes first, because others may follow from it.
    """
    from longtail.tables import find_files
    from longtail.tables.database import open_database  # needs DuckDB
    from longtail.tables.table import open_file

    try:
        data = DataConfig.model_validate(tree.get("data"))
        sources = data.train if isinstance(data.train, list) else [data.train]
        with open_database() as reader:
            files = [
                open_file(reader, file)
                for file in find_files([folder / source if isinstance(source, Path) else source for source in sources])
            ]
    except (ValidationError, DataError, OSError):
        return None
    for key, name in (("query_id", data.query_id), ("label_id", data.label_id)):
        if not any(name in file.names for file in files):
            names = files[0].names
            return (
                f"data.{key}: expected a column of {files[0].file.name}, which has {', '.join(names)}, received "
                f"{name!r}{did_you_mean(name, names)}"
            )
    return None


def _change_sources(recipe: Recipe, change: Callable[[Path], Path]) -> Recipe:
    """Return a recipe with changed file paths, also inside SQL queries."""

    def changed(source: Path | str) -> Path | str:
        if isinstance(source, Path):
            return change(source)
        if not is_query(source):
            return source
        from longtail.tables.queries import rename_files  # needs DuckDB

        return rename_files(source, change)

    data = {}
    for key in SOURCE_KEYS:
        if (sources := getattr(recipe.data, key)) is not None:
            data[key] = [*map(changed, sources)] if isinstance(sources, list) else changed(sources)
    evaluation = recipe.evaluation
    if isinstance(evaluation.target_prior, Path):
        evaluation = evaluation.model_copy(update={"target_prior": change(evaluation.target_prior)})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data), "evaluation": evaluation})


def format_errors(problems: Sequence[ErrorDetails], model: type[BaseModel] = Recipe) -> str:
    """Return validation errors in one line: where, what was expected, what was received."""
    return "; ".join(str(it if it.path else replace(it, path="recipe")) for it in describe_problems(problems, model))


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one dotted key; a value that is not valid TOML is a string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set: expected KEY=VALUE, received {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    try:
        set_value(tree, key, value)
    except RecipeError as error:
        raise RecipeError(f"--set {error}") from error


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a recipe's tree: `query.features.0.dim`. Missing tables are created."""
    *parents, last = key.split(".")
    node: Any = tree
    for step in parents:
        node = (
            node[_index(node, step, key)] if isinstance(node, list) else _section(node, step, key).setdefault(step, {})
        )
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        _section(node, last, key)[last] = value


def _section(node: Any, step: str, key: str) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise RecipeError(f"{key}: expected a section before {step!r}, found {node!r}")
    return node


def _index(node: list[Any], step: str, key: str) -> int:
    if not step.isdigit() or int(step) >= len(node):
        raise RecipeError(f"{key}: expected an index below {len(node)}, received {step!r}")
    return int(step)


def recipe_toml(recipe: Recipe, folder: Path) -> str:
    """Write a recipe as TOML for `load_recipe`, with paths relative to `folder`."""
    import tomlkit  # imported here because the extra `longtail[tfrs]` does not install it

    moved = _change_sources(recipe, lambda source: Path(os.path.relpath(source.resolve(), folder.resolve())))
    tree = moved.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True, exclude={"tune"})
    return tomlkit.dumps(tree)
