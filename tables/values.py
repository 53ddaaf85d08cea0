"""How values are read, as SQL expressions: ids, numbers, times, and what a whole column of text holds."""

from __future__ import annotations

TEXT = "TEXT"
"""Type of a column of a text file, which has no types; DuckDB holds it as VARCHAR."""
NULLS = '"NULL"'
"""Type of a column whose values are all null."""
NOTHING = ("", "na", "n/a", "#n/a", "nan", "null", "nil", "none", "\\n", "-", "--", "?")
"""Words for a missing number, time or boolean, in lower case."""
NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"
_YEAR = r"(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_CLOCK = rf"\s*{_YEAR}-\d\d-\d\d([ T]([01]\d|2[0-3]):\d\d(:\d\d(\.\d{{1,9}})?)?)?"
_UTC = rf"{_CLOCK}\s*(Z|UTC|GMT|[+-]00(:?00)?)?\s*"
_ZONED = rf"{_CLOCK}\s*[+-](0\d|1[0-5])(:?[0-5]\d)?\s*"
_ZONE = r"([+-])(\d\d):?(\d\d)?\s*$"
_1990, _A_DAY = 631_152_000, 86_400
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
             "UHUGEINT")  # fmt: skip
_EXACT = {"FLOAT": 2**24, "DOUBLE": 2**53}
"""Below this, floats tell one integer from the next."""
WHOLE = r"-?\d+(\.0+)?"


def quoted(name: str) -> str:
    """Quote a name of SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Quote a text of SQL."""
    return "'" + value.replace("'", "''") + "'"


def is_text(kind: str) -> bool:
    """Tell whether a column holds text."""
    return kind in (TEXT, "VARCHAR", NULLS) or kind.startswith("ENUM")


def is_integer(kind: str) -> bool:
    """Tell whether a column holds integers."""
    return kind in _INTEGERS


def is_number(kind: str) -> bool:
    """Tell whether a column holds numbers."""
    return is_integer(kind) or kind in ("FLOAT", "DOUBLE") or kind.startswith("DECIMAL")


def is_time(kind: str) -> bool:
    """Tell whether a column holds dates or timestamps."""
    return kind == "DATE" or kind.startswith("TIMESTAMP")


def is_list_of_ids(kind: str) -> bool:
    """Tell whether a column holds lists of text or integers."""
    return kind.endswith("[]") and (is_text(kind[:-2]) or is_integer(kind[:-2]))


def is_nested(kind: str) -> bool:
    """Tell whether a column holds lists, maps or structs."""
    return kind.endswith("]") or kind.startswith(("MAP(", "STRUCT(", "UNION("))


def in_words(kind: str) -> str:
    """Return a type for a message."""
    return "text" if is_text(kind) else kind.lower()


def double(value: float) -> str:
    """Write a number as SQL, exactly."""
    return f"'{float(value)!r}'::DOUBLE"


def is_nothing(text: str) -> str:
    """Tell whether a text is a word for a missing value."""
    return f"lower(trim({text})) IN ({', '.join(map(literal, NOTHING))})"


def is_plausible(seconds: str, now: float) -> str:
    """Tell whether a time, in seconds, lies between 1990 and tomorrow."""
    return f"({seconds} BETWEEN {double(_1990)} AND {double(now + _A_DAY)})"


def matches(text: str, pattern: str) -> str:
    """Tell whether all of a text matches a regular expression."""
    return f"regexp_full_match({text}, {literal(pattern)})"


def text_of(value: str, kind: str) -> str:
    """Return a value as the text of an id: whole numbers as integers, booleans in lower case."""
    if is_text(kind):
        return f"{value}::VARCHAR"
    if kind in ("FLOAT", "DOUBLE"):
        whole = f"{value} = trunc({value}) AND abs({value}) < {_EXACT[kind]}"
        return (
            f"CASE WHEN isnan({value}) THEN NULL WHEN {whole} THEN {value}::BIGINT::VARCHAR ELSE {value}::VARCHAR END"
        )
    if kind.startswith("DECIMAL"):
        return (
            f"CASE WHEN {value} = trunc({value}) THEN {value}::HUGEINT::VARCHAR ELSE rtrim({value}::VARCHAR, '0') END"
        )
    return f"TRY(decode({value}))" if kind == "BLOB" else f"{value}::VARCHAR"


def is_no_id(value: str, kind: str) -> str | None:
    """Return the condition of values that are no ids; None for a type without such values.

    Raises:
        TypeError: no value of this type is an id.
    """
    if is_text(kind) or is_integer(kind) or kind == "UUID":
        return None
    if kind in ("FLOAT", "DOUBLE"):
        return f"NOT isnan({value}) AND NOT ({value} = trunc({value}) AND abs({value}) < {_EXACT[kind]})"
    if kind.startswith("DECIMAL"):
        return f"{value} <> trunc({value})"
    if kind == "BLOB":
        return f"TRY(decode({value})) IS NULL"
    raise TypeError(kind)


def number_of(value: str, kind: str) -> str | None:
    """Return a value as a DOUBLE, NULL where a text is none; None for a column of no numbers."""
    if is_text(kind):
        return f"CASE WHEN {matches(value, NUMBER)} THEN TRY_CAST(trim({value}) AS DOUBLE) END"
    return f"{value}::DOUBLE" if is_number(kind) else None


def micros_of(value: str, kind: str) -> str | None:
    """Return a time as microseconds since 1970, UTC, NULL where a text is none; None for a column of no times.

    Text is ISO 8601 or as databases print it: `2026-01-01 01:03:49.123456789+00`, with `T`, `Z` or ` UTC`.
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


def kinds_of_text(text: str) -> dict[str, str]:
    """Return what a whole column of text may hold, the first that fits; conditions on one of its values.

    Leading zeros, a plus and exponents are text: they belong to codes, as do more digits than a type tells apart.
    """
    written = {
        "BIGINT": r"\s*-?(0|[1-9]\d{0,18})\s*",
        "DOUBLE": r"\s*-?(0|[1-9]\d{0,14})(\.\d+)?\s*",
        "DATE": rf"\s*{_YEAR}-\d\d-\d\d\s*",
    }
    fits = {kind: f"{matches(text, form)} AND {typed(text, kind)} IS NOT NULL" for kind, form in written.items()}
    # A DOUBLE has 15 digits for sure, of any number of 16 or 17 only some.
    many, shown = matches(text, r"\s*-?\d{13,}\.\d*[1-9]\d*\s*"), f"{typed(text, 'DOUBLE')}::VARCHAR"
    fits["DOUBLE"] += f" AND ({shown} = rtrim(trim({text}), '0') OR NOT {many})"
    return {
        "BOOLEAN": f"lower(trim({text})) IN ('true', 'false')",
        **fits,
        "TIMESTAMP": f"{micros_of(text, TEXT)} IS NOT NULL",
    }


def typed(text: str, kind: str) -> str:
    """Read a text as a value of the type that its whole column holds."""
    if kind == "VARCHAR":
        return text
    if kind == "TIMESTAMP":
        return f"make_timestamp({micros_of(text, TEXT)})"
    if kind == "DOUBLE":  # a cast takes `nan`, a word for nothing, for a number
        return str(number_of(text, TEXT))
    return f"TRY_CAST(trim({text}) AS {kind})"


def one_type(kinds: set[str]) -> str | None:
    """Return the type that holds values of some types; None where there is none.

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


def as_type(value: str, kind: str, wanted: str) -> str:
    """Return a value of one type as one of another that holds it."""
    if kind == wanted or (kind, wanted) == (TEXT, "VARCHAR"):
        return value
    if wanted in (TEXT, "VARCHAR"):
        return text_of(value, kind)
    if wanted.endswith("[]") and kind.endswith("[]"):
        return f"list_transform({value}, lambda x: {as_type('x', kind[:-2], wanted[:-2])})"
    if wanted == "TIMESTAMP":
        return f"make_timestamp({micros_of(value, kind)})"
    return f"{value}::{wanted}"
