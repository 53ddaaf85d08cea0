"""Read values by SQL expressions: ids, numbers, times, and the types of text columns."""

from __future__ import annotations

TEXT = "TEXT"
"""Type of a column of a text file; DuckDB stores VARCHAR."""
NULLS = '"NULL"'
"""Type of a column of nulls."""
NOTHING = ("", "na", "n/a", "#n/a", "nan", "null", "nil", "none", "\\n", "-", "--", "?")
"""Words for a missing value, in lower case."""
NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_CLOCK = rf"\s*{_YEAR}-\d\d-\d\d([ T]([01]\d|2[0-3]):\d\d(:\d\d(\.\d{{1,9}})?)?)?"
_UTC = rf"{_CLOCK}\s*(Z|UTC|GMT|[+-]00(:?00)?)?\s*"
_ZONED = rf"{_CLOCK}\s*[+-](0\d|1[0-5])(:?[0-5]\d)?\s*"
_ZONE = r"([+-])(\d\d):?(\d\d)?\s*$"
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
             "UHUGEINT")  # fmt: skip
EXACT = {"FLOAT": 2**24, "DOUBLE": 2**53}
"""Integers below these are exact."""
INTEGERS = r"-?\d+(\.0+)?"


def quoted(name: str) -> str:
    """Quote a name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Quote a string in SQL."""
    return "'" + value.replace("'", "''") + "'"


def is_text(kind: str) -> bool:
    """Return whether a type is text."""
    return kind in (TEXT, "VARCHAR", NULLS) or kind.startswith("ENUM")


def is_integer(kind: str) -> bool:
    """Return whether a type is an integer."""
    return kind in _INTEGERS


def is_number(kind: str) -> bool:
    """Return whether a type is a number."""
    return is_integer(kind) or kind in ("FLOAT", "DOUBLE") or kind.startswith("DECIMAL")


def is_time(kind: str) -> bool:
    """Return whether a type is a date or timestamp."""
    return kind == "DATE" or kind.startswith("TIMESTAMP")


def is_list_of_ids(kind: str) -> bool:
    """Return whether a type is a list of text or integers."""
    return kind.endswith("[]") and (is_text(kind[:-2]) or is_integer(kind[:-2]))


def is_nested(kind: str) -> bool:
    """Return whether a type is a list, map or struct."""
    return kind.endswith("]") or kind.startswith(("MAP(", "STRUCT(", "UNION("))


def type_name(kind: str) -> str:
    """Describe a type in messages."""
    return "text" if is_text(kind) else kind.lower()


def double(value: float) -> str:
    """Return SQL for the exact number."""
    return f"'{float(value)!r}'::DOUBLE"


def is_nothing(text: str) -> str:
    """Return SQL that tests for a word for a missing value."""
    return f"lower(trim({text})) IN ({', '.join(map(literal, NOTHING))})"


def matches(text: str, pattern: str) -> str:
    """Return SQL that tests whether a regular expression matches a whole text."""
    return f"regexp_full_match({text}, {literal(pattern)})"


def to_text(value: str, kind: str) -> str:
    """Return SQL that casts to an id: whole numbers as integers, booleans in lower case."""
    if is_text(kind):
        return f"{value}::VARCHAR"
    if kind in ("FLOAT", "DOUBLE"):
        is_whole = f"{value} = trunc({value}) AND abs({value}) < {EXACT[kind]}"
        text = f"CASE WHEN {is_whole} THEN {value}::BIGINT::VARCHAR ELSE {value}::VARCHAR END"
        return f"CASE WHEN NOT isnan({value}) THEN {text} END"
    if kind.startswith("DECIMAL"):
        return (
            f"CASE WHEN {value} = trunc({value}) THEN {value}::HUGEINT::VARCHAR ELSE rtrim({value}::VARCHAR, '0') END"
        )
    return f"TRY(decode({value}))" if kind == "BLOB" else f"{value}::VARCHAR"


def to_number(value: str, kind: str) -> str | None:
    """Return SQL that casts to DOUBLE (NULL if not a number); None if the type is not numeric."""
    if is_text(kind):
        return f"CASE WHEN {matches(value, NUMBER)} THEN TRY_CAST(trim({value}) AS DOUBLE) END"
    return f"{value}::DOUBLE" if is_number(kind) else None


def to_micros(value: str, kind: str) -> str | None:
    """Return SQL for microseconds since 1970, UTC (NULL if not a time); None if the type has no times.

    Text is ISO 8601 or a database's notation: `2026-01-01 01:03:49.123456789+00`, with `T`, `Z` or ` UTC`.
    """
    if is_text(kind):
        sign, hours, minutes = (f"regexp_extract({value}, {literal(_ZONE)}, {group})" for group in (1, 2, 3))
        offset = f"({hours}::BIGINT * 60 + coalesce(nullif({minutes}, ''), '0')::BIGINT) * 60000000"
        offset = f"CASE {sign} WHEN '-' THEN -({offset}) ELSE {offset} END"
        micros = f"epoch_us(TRY_CAST(trim({value}) AS TIMESTAMP))"
        return (
            f"CASE WHEN {matches(value, _UTC)} THEN {micros} WHEN {matches(value, _ZONED)} THEN {micros} - {offset} END"
        )
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"epoch_us({value})"
    exact = "TIMESTAMP_NS" if kind.endswith("_NS") else "TIMESTAMP"  # a cast to TIMESTAMP rounds nanoseconds up
    return f"epoch_us({value}::{exact})" if is_time(kind) else None


def text_types(text: str) -> dict[str, str]:
    """Return the types of a text column, with SQL that tests one value.

    Leading zeros, a plus and exponents are text because they belong to codes; so are more digits than a type has.
    """
    written = {
        "BIGINT": r"\s*-?(0|[1-9]\d{0,18})\s*",
        "DOUBLE": r"\s*-?(0|[1-9]\d{0,14})(\.\d+)?\s*",
        "DATE": rf"\s*{_YEAR}-\d\d-\d\d\s*",
    }
    fits = {kind: f"{matches(text, form)} AND {typed(text, kind)} IS NOT NULL" for kind, form in written.items()}
    # A DOUBLE has 15 digits for sure, of any number of 16 or 17 only some.
    many, printed = matches(text, r"\s*-?\d{13,}\.\d*[1-9]\d*\s*"), f"{typed(text, 'DOUBLE')}::VARCHAR"
    fits["DOUBLE"] += f" AND ({printed} = rtrim(trim({text}), '0') OR NOT {many})"
    return {
        "BOOLEAN": f"lower(trim({text})) IN ('true', 'false')",
        **fits,
        "TIMESTAMP": f"{to_micros(text, TEXT)} IS NOT NULL",
    }


def typed(text: str, kind: str) -> str:
    """Return SQL that converts a text to a type of `text_types`."""
    if kind == "VARCHAR":
        return text
    if kind == "TIMESTAMP":
        return f"make_timestamp({to_micros(text, TEXT)})"
    if kind == "DOUBLE":  # a cast takes `nan`, a word for nothing, for a number
        return str(to_number(text, TEXT))
    return f"TRY_CAST(trim({text}) AS {kind})"


def one_type(kinds: set[str]) -> str | None:
    """Find a type for the values of several types; None if there is none.

    Numbers become wider, and dates timestamps. With text, all but lists become text.
    """
    kinds = {"VARCHAR" if kind.startswith("ENUM") else kind for kind in kinds if kind != NULLS} or {"VARCHAR"}
    if len(kinds) == 1:
        return next(iter(kinds))
    if all(kind.endswith("[]") for kind in kinds):
        inner = one_type({kind[:-2] for kind in kinds})
        return None if inner is None else f"{inner}[]"
    if any(map(is_nested, kinds)) or "BLOB" in kinds:
        return None
    if all(map(is_number, kinds)):
        wide = {"HUGEINT", "UBIGINT", "UHUGEINT"} & kinds
        return "DOUBLE" if not all(map(is_integer, kinds)) else "HUGEINT" if wide else "BIGINT"
    if all(map(is_time, kinds)):
        return "TIMESTAMP"
    return "VARCHAR" if "VARCHAR" in kinds else TEXT


def as_type(value: str, kind: str, target: str) -> str:
    """Return SQL that converts a value to a wider type."""
    if kind == target or (kind, target) == (TEXT, "VARCHAR"):
        return value
    if target in (TEXT, "VARCHAR"):
        return to_text(value, kind)
    if target.endswith("[]") and kind.endswith("[]"):
        return f"list_transform({value}, lambda x: {as_type('x', kind[:-2], target[:-2])})"
    if target == "TIMESTAMP":
        return f"make_timestamp({to_micros(value, kind)})"
    return f"{value}::{target}"
