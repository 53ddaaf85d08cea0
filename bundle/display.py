"""Convert display columns to JSON and back.

Text, numbers, booleans and lists keep their JSON types; dates, decimals and other types become strings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC
from decimal import Decimal

import pyarrow as pa
from pydantic import JsonValue

from longtail.bundle.dates import parse_time
from longtail.bundle.errors import LONGEST_NAME, BundleInvariantError, DisplayError, describe
from longtail.bundle.mapped_table import decode_chunks

Display = Mapping[str, JsonValue]

_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_FLOAT16 = 1e-3
"""Largest relative rounding error of a number in a float16 column."""


class DisplayColumns:
    """The display columns of one label table."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def to_json(self, row: int) -> dict[str, JsonValue]:
        """Return the display columns of one label as JSON values, by name."""
        return {
            name: json_ready(name, self._table[name].slice(row, 1)).to_pylist()[0] for name in self._table.column_names
        }

    def complete(self, display: Display, defaults: Display) -> dict[str, JsonValue]:
        """Complete the columns of a label: as given, otherwise as known, otherwise null."""
        names = self._table.column_names
        values: dict[str, JsonValue] = {}
        for name, value in display.items():
            field = f"display.{name[:LONGEST_NAME]}"
            if name not in names:
                message = f"expected one of the display columns {names}, received {describe(name)}"
                raise DisplayError(message, row=0, field=field)
            try:
                values[name] = self._round_trip(name, value)
            except _UNFIT:
                expected = _in_words(self._type(name))
                raise DisplayError(f"expected {expected}, received {describe(value)}", row=0, field=field) from None
        return {name: values.get(name, defaults.get(name)) for name in names}

    def column(self, name: str, values: Sequence[JsonValue]) -> pa.Array:
        """Create a column from JSON values that `complete` has accepted."""
        type_ = self._type(name)
        return pa.array(values, type_) if _is_json(type_) else pa.array(values, pa.string()).cast(type_)

    def _type(self, name: str) -> pa.DataType:
        type_ = self._table.schema.field(name).type
        return type_.value_type if pa.types.is_dictionary(type_) else type_

    def _round_trip(self, name: str, value: JsonValue) -> JsonValue:
        """Convert a value to the column's type and back.

        Raises ValueError, TypeError or an Arrow error if the value changes.
        """
        try:
            return self._convert(name, value)
        except _UNFIT:
            return self._convert(name, _as_filters_read(value, self._type(name)))

    def _convert(self, name: str, value: JsonValue) -> JsonValue:
        column = self.column(name, [value])
        to_json: JsonValue = json_ready(name, pa.chunked_array([column])).to_pylist()[0]
        # Arrow converts some values to others without an error.
        if _is_json(column.type) and not _alike(value, to_json):
            raise ValueError
        return to_json


def check_displayable(name: str, column: pa.ChunkedArray) -> None:
    """Check that every row of a column can be shown in an answer; raises BundleInvariantError."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise _undisplayable(name, f"{column.type} that is damaged: {error}") from error
    json_ready(name, column)


def json_ready(name: str, column: pa.ChunkedArray) -> pa.Array:
    """Convert a column [n] to one contiguous array of a JSON type; raises BundleInvariantError."""
    array = decode_chunks(column)
    if _is_json(array.type):
        return array
    try:
        return array.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _undisplayable(name, array.type) from error


def _undisplayable(name: str, actual: object) -> BundleInvariantError:
    return BundleInvariantError(
        f"labels.arrow column {name!r} can be displayed",
        expected="text in UTF-8, numbers, booleans, dates, or lists or structs of text, numbers and booleans",
        actual=actual,
    )


def _is_json(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _is_json(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_json(field.type) for field in type_)
    return any(
        test(type_)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_integer,
            pa.types.is_floating,
            pa.types.is_boolean,
            pa.types.is_null,
        )
    )


def _as_filters_read(value: JsonValue, type_: pa.DataType) -> JsonValue:
    """Spell a number or time for a column of decimals, integers or times."""
    if isinstance(value, float) and pa.types.is_integer(type_) and value.is_integer():
        return int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and pa.types.is_decimal(type_):
        return format(Decimal(str(value)), "f")
    if isinstance(value, str) and pa.types.is_timestamp(type_):
        moment = parse_time(value).astimezone(UTC).replace(tzinfo=None)
        return moment.isoformat(" ", "microseconds" if moment.microsecond else "seconds") + ("Z" if type_.tz else "")
    return value


def _in_words(type_: pa.DataType) -> str:
    """Describe the values that a column takes."""
    for is_type, words in (
        (pa.types.is_integer, "a whole number within its range"),
        (pa.types.is_decimal, "a number within its digits"),
        (pa.types.is_timestamp, "a time in ISO 8601"),
        (pa.types.is_date, "a day such as 2026-01-31"),
    ):
        if is_type(type_):
            return f"a value that a column of {type_} can hold, {words}"
    return f"a value that a column of {type_} can hold"


def _alike(value: JsonValue, result: JsonValue) -> bool:
    """Return whether a value survived Arrow's conversion.

    Arrow cuts fractions off, converts true to 1, and takes "ab" for a list.
    """
    if isinstance(value, list):
        return isinstance(result, list) and len(value) == len(result) and all(map(_alike, value, result))
    if isinstance(value, dict):
        return isinstance(result, dict) and all(name in result and _alike(value[name], result[name]) for name in value)
    if isinstance(result, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(result) and math.isclose(value, result, rel_tol=_FLOAT16, abs_tol=_FLOAT16)
    return type(value) is type(result) and value == result
