"""Convert columns of query features to JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa

from longtail.bundle import Feature, Vocabulary
from longtail.bundle.ids import as_float64, id_text, split_ids
from longtail.bundle.mapped_table import combine_chunks
from longtail.tables.database import OpenedFile
from longtail.tables.values import TEXT

WRITTEN = "written:"
"""Prefix of a second column with the ids exactly as a text file spells them."""


def as_written(opened: OpenedFile, features: Sequence[Feature]) -> dict[str, tuple[str, str]]:
    """Return second columns with the ids as a text file spells them."""
    ids = [feature.name for feature in features if feature.kind == "id" and feature.name in opened.names]
    columns = {name: opened.column(name) for name in ids}
    return {WRITTEN + name: (cell, "VARCHAR") for name, (cell, kind) in columns.items() if kind == TEXT}


def feature_columns(
    rows: pa.Table, features: Sequence[Feature], vocabularies: Mapping[str, Vocabulary]
) -> dict[str, list[Any]]:
    """Convert the features that a table has to JSON values, by name."""
    columns = dict[str, list[Any]]()
    for feature in (feature for feature in features if feature.name in rows.column_names):
        name, values = feature.name, as_json(rows[feature.name], as_lists=feature.kind == "history")
        if WRITTEN + name in rows.column_names:
            values = as_known(rows[WRITTEN + name].to_pylist(), values, vocabularies[str(feature.vocabulary)])
        columns[name] = values
    return columns


def as_known(texts: list[str | None], values: list[Any], vocabulary: Vocabulary) -> list[Any]:
    """Choose for each id of a text file: its spelling if the release knows that, otherwise its parsed value."""
    words = [text or "" for text in texts]
    rows = vocabulary.find_all(words)
    return [text if text and row else value for text, value, row in zip(texts, values, rows, strict=True)]


def as_json(column: pa.ChunkedArray, *, as_lists: bool = False) -> list[Any]:
    """Convert the values of a column to JSON values; with `as_lists`, parse text as lists."""
    array = combine_chunks(column)
    kind = array.type
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", kind.tz), safe=False)
    values: list[Any] = as_float64(array).to_pylist()
    if as_lists and pa.types.is_string(kind):
        return [text if text is None or (ids := split_ids(text, None)) is None else ids for text in values]
    lists = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    plain = pa.types.is_string(kind) or (
        lists and not (pa.types.is_nested(kind.value_type) or _is_odd(kind.value_type))
    )
    return values if plain else [*map(_json_value, values)]


def _is_odd(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_binary(kind))


def _json_value(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return id_text(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):  # text whose writer declared no encoding
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):  # JSON lines have null for an entry that a row lacks
        return {name: _json_value(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        pairs = value and isinstance(value[0], tuple)  # DuckDB's map
        return {str(id_text(key)): _json_value(entry) for key, entry in value} if pairs else [*map(_json_value, value)]
    return None if value != value else value
