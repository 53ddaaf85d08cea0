"""Convert ids to text by one rule."""

from __future__ import annotations

import ast
import json
import math
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

_BOOLEAN, _INTEGER = r"^(?i:true|false)$", r"^-?(0|[1-9]\d*)(\.0+)?$"
_ENTRY = (
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|-?(?:0|[1-9]\d*)(?:\.\d*)?(?:[eE][+-]?\d+)?"""
    "|[Tt]rue|[Ff]alse|None|null|nan"
)
_LIST = re.compile(rf"\s*\[\s*(?:(?:{_ENTRY})(?:\s*,\s*|\s+|(?=\])))*\]\s*", re.DOTALL)
_ENTRIES = re.compile(_ENTRY, re.DOTALL)


def id_text(value: object) -> str | None:
    """Convert a value to an id: `true`, `39` for 39.0, a number's shortest decimal text; None for other types.

    Example:
        >>> [id_text(value) for value in ("39.0", 39.0, 0.10, True, None)]
        ['39.0', '39', '0.1', 'true', None]
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int):
        return str(value).lower()
    if not isinstance(value, float | Decimal) or not math.isfinite(value):
        return None
    # Through `str`, which gives the shortest decimals; the binary value of 0.1 has 55 digits.
    text = format(Decimal(str(value)), "f")
    return "0" if value == 0 else text.rstrip("0").rstrip(".") if "." in text else text


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def to_ids(column: pa.Array) -> pa.Array:
    """Convert a column to ids, string [n]; null and NaN become null. Raises TypeError for other types.

    A text column of booleans, or of whole numbers such as `39.0`, is read as the values that it spells.
    """
    if is_text(column.type):
        text = column.cast(pa.string())
        if _all(text, _BOOLEAN):
            return pc.utf8_lower(text)
        return pc.replace_substring_regex(text, r"\.0+$", "") if _all(text, _INTEGER) else text
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return column.cast(pa.string())
    if not (pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)):
        raise TypeError(f"expected strings, numbers or booleans, found {column.type}")
    coded = as_float64(column).dictionary_encode()
    values = coded.dictionary.to_pylist()
    if infinite := [value for value in values if math.isinf(value)]:
        raise TypeError(f"expected strings, finite numbers or booleans, found {infinite[0]}")
    return pa.array(map(id_text, values), pa.string()).take(coded.indices)


def as_float64(column: pa.Array) -> pa.Array:
    """Convert floats to the float64 with the same decimals: float32 0.1 becomes 0.1."""
    # A plain cast would turn float32 0.1 into 0.10000000149, which is another id.
    narrow = pa.types.is_floating(column.type) and column.type != pa.float64()
    return column.cast(pa.float32()).cast(pa.string()).cast(pa.float64()) if narrow else column


def respelled(id_: str) -> str:
    """Convert the text `True` to `true`, and `39.0` to `39`; other texts stay."""
    return id_.lower() if re.search(_BOOLEAN, id_) else re.sub(r"\.0+$", "", id_) if re.search(_INTEGER, id_) else id_


def find_rows(ids: pa.Array, catalogue: pa.Array) -> pa.Array:
    """Find the row in a catalogue of each id, int32; null where there is none.

    An id that the catalogue lacks is read as the boolean or whole number that it spells.

    Example:
        >>> find_rows(pa.array(["7", "8.0", "x"]), pa.array(["8", "7"])).to_pylist()
        [1, 0, None]
    """
    ids = ids.cast(catalogue.type)
    rows = pc.index_in(ids, catalogue)
    lacking = pc.and_(pc.is_null(rows), pc.is_valid(ids))
    respelled_ids = pa.array(map(respelled, ids.filter(lacking).to_pylist()), catalogue.type)
    return pc.replace_with_mask(rows, lacking, pc.index_in(respelled_ids, catalogue))


def repeated_ids(ids: pa.Array) -> list[str]:
    """List the distinct ids that occur more than once."""
    counts = pc.value_counts(ids)
    repeated: list[str] = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
    return repeated


def split_ids(text: str, separator: str | None) -> list[str] | None:
    """Split text into ids: a printed list of Python, NumPy or JSON, or non-empty parts between separators.

    None if the text is not a list and there is no separator.

    Example:
        >>> split_ids("red, blue,", ","), split_ids("['red', 'blue']", None), split_ids("red", None)
        (['red', 'blue'], ['red', 'blue'], None)
    """
    if _LIST.fullmatch(text):
        try:
            return [str(id_) for entry in _ENTRIES.findall(text) if (id_ := id_text(_entry(entry))) is not None]
        except (ValueError, SyntaxError):  # an escape that neither Python nor JSON knows
            pass
    return None if separator is None else [part for part in map(str.strip, text.split(separator)) if part]


def _entry(text: str) -> object:
    """Parse a list's entry; a string in double quotes by JSON's escapes if possible."""
    try:
        return None if text == "nan" else json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def _all(text: pa.Array, pattern: str) -> bool:
    """Return whether there are texts and all of them match."""
    return bool(pc.all(pc.match_substring_regex(text, pattern)).as_py())
