"""Detection of column contents, feature kinds, and the roles of a log's columns."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Float64
from longtail.bundle.ids import is_text, split_ids
from longtail.tables.database import open_database
from longtail.tables.times import Clock, find_times, is_plausible
from longtail.trainer.errors import DataError

KINDS = {
    "category": "id", "boolean": "id", "words": "text", "joined": "bag", "bag": "bag", "number": "number",
    "vector": "vector", "date": "date",
}  # fmt: skip
"""Feature kind by the content of a column; no feature reads any other content."""

_FRAMED, _VECTOR = r"^\s*[\[{][\s\S]*[\]}]\s*$", re.compile(r"[\[\]\s\d.,eE+-]*\d\.[\[\]\s\d.,eE+-]*")
"""Patterns of text that looks like a list or an object, and of a list of numbers that are not whole."""
_PLAIN = r"^\s*[-+]?\d+(\.\d+)?\s*$"
_AMOUNT = r"[-+]?\d{1,3}(([.' ,\x{a0}]\d{3})+|\d*)([.,]\d+)?"
_SIGN = r"[$€£¥₹%]|EUR|USD|GBP|CHF|JPY|CNY|INR|SEK|NOK|DKK|PLN|CZK|BRL|CAD|AUD|kr|zł"
_FOREIGN = {
    rf"\s*({_SIGN})?\s*{_AMOUNT}\s*({_SIGN})?\s*":
        "numbers with decimal commas, thousands, currencies or %, which no feature reads: write 1234.5",
    r"\s*\d{1,2}([./-])\d{1,2}[./-]\d{4}([ T,].*)?":
        "days of another order than ISO 8601, which no feature reads: write 2026-01-31",
}  # fmt: skip
"""Patterns of text that is a number or a day of one country, and what `init` says of it."""
_SAMPLE = 20_000
"""Number of values of a string column that are examined."""
_FEW = 64
"""Largest number of distinct integers that count as a category."""
_CODES = {"id", "code", "zip", "postcode", "postal", "type", "category", "group", "class"}
"""Words in the names of integer columns that hold categories, with any number of distinct values."""

_QUERY = {"user", "customer", "client", "visitor", "member", "session", "shopper", "account", "query", "person",
          "reviewer", "uid", "buyer", "reader", "viewer", "listener", "household", "cookie", "device"}  # fmt: skip
_LABEL = {"item", "product", "article", "label", "sku", "movie", "film", "book", "track", "song", "video", "asin",
          "business", "content", "game", "course", "poi", "location", "listing", "offer", "document", "doc", "page",
          "iid", "pid", "recipe", "job", "podcast", "artist", "venue"}  # fmt: skip
TIME_WORDS = {"time", "timestamp", "date", "datetime", "ts", "at", "day", "unixtime"}
_STOCK = {"stock", "instock", "available", "availability", "inventory", "backorder", "sold", "soldout"}
_QUANTITY = {"quantity", "qty", "on", "hand", "left", "remaining", "units"}
"""Words of columns that say whether a label can be had now; the second set must be all the words of a name."""
_EVENT = {"event", "action", "behavior", "behaviour", "type", "interaction"}
_MOST_EVENTS = 30


class ColumnProfile(NamedTuple):
    """Describe a column.

    The content is a key of `KINDS`, or the reason why no feature reads the column. There are also counts of values, the
    separator of joined values, and the length of vectors.
    """

    name: str
    content: str
    distinct: int
    nulls: int
    separator: str | None = None
    dims: int | None = None


class Times(NamedTuple):
    """Hold times of a column, float64 [N], NaN for other values; a mask of plausible times, bool [N]; their unit."""

    values: Float64
    plausible: Bools
    unit: str | None


def spelled(name: str) -> list[str]:
    """List the words of a name in order, lower-case: add, to and cart for `AddToCart` and `add-to-cart`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def split_words(name: str) -> set[str]:
    """List the words of a column's name, lower-case: product and id for `productId`, `PRODUCT_ID` and `productid`."""
    words = {*spelled(name)}
    return words | {part for word in words if word.endswith("id") and len(word) > 3 for part in (word[:-2], "id")}


def is_stock(column: ColumnProfile) -> bool:
    """Return whether a column's name says that a label is in stock."""
    words = split_words(column.name)
    timed = column.content == "date" or bool(words & (TIME_WORDS | {"from", "since", "until"}))
    return not timed and bool(words & _STOCK or (words and words <= _QUANTITY))


def profile_column(name: str, column: pa.ChunkedArray) -> ColumnProfile:
    """Detect the content of one column, [rows]."""
    kind, nulls = column.type, column.null_count
    if nulls == len(column):
        return ColumnProfile(name, "nothing", 0, nulls)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _profile_lists(name, column)
    if pa.types.is_map(kind):
        weights = kind.item_type
        ids = is_text(kind.key_type) or pa.types.is_integer(kind.key_type)
        numbers = pa.types.is_integer(weights) or pa.types.is_floating(weights)
        return ColumnProfile(name, "bag" if ids and numbers else f"a map of {kind.key_type} to {weights}", 0, nulls)
    if pa.types.is_nested(kind) or pa.types.is_decimal(kind) or pa.types.is_binary(kind):
        return ColumnProfile(name, f"values of type {kind}, which no feature reads", 0, nulls)
    distinct = pc.count_distinct(column).as_py()
    if is_text(kind) and (distinct > 1 or nulls):
        return _profile_strings(name, column, distinct)
    if distinct == 1 and not nulls:
        content = "one value in every row"
    elif pa.types.is_boolean(kind):
        content = "boolean"
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        content = "date"
    elif pa.types.is_floating(kind):
        values = column.drop_null().to_numpy()
        values = values[~np.isnan(values)]
        integers = bool((values == np.floor(values)).all())  # pandas turns integers with a null into floats
        content = (
            "infinite numbers"
            if np.isinf(values).any()
            else _content_of_numbers(name, integers, len(np.unique(values)))
        )
    elif pa.types.is_integer(kind):
        content = _content_of_numbers(name, True, distinct)
    else:
        content = f"values of type {kind}, which no feature reads"
    return ColumnProfile(name, content, distinct, nulls)


def _content_of_numbers(name: str, integers: bool, distinct: int) -> str:
    return "category" if integers and (distinct <= 2 or split_words(name) & _CODES) else "number"


def _profile_lists(name: str, column: pa.ChunkedArray) -> ColumnProfile:
    inner, dims = column.type.value_type, None
    if pa.types.is_floating(inner):
        lengths = pc.unique(pc.list_value_length(column).drop_null()).to_pylist()
        numbers = pc.list_flatten(column).cast(pa.float64())
        if len(lengths) > 1 or not lengths[0]:
            content = "vectors of different lengths"
        elif numbers.null_count or not np.isfinite(numbers.to_numpy()).all():
            content = "vectors with numbers that are missing or infinite"
        else:
            content, dims = "vector", lengths[0]
    elif not pa.types.is_fixed_size_list(column.type) and (is_text(inner) or pa.types.is_integer(inner)):
        content = "bag"
    else:
        content = f"lists of {inner}, which no feature reads"
    return ColumnProfile(name, content, 0, column.null_count, dims=dims)


def _profile_strings(name: str, column: pa.ChunkedArray, distinct: int) -> ColumnProfile:
    """Distinguish categories, which repeat, joined values, whose parts repeat, words, and useless strings."""
    rows, nulls = len(column), column.null_count
    sample = column.drop_null().slice(0, _SAMPLE)
    if pc.mean(pc.starts_with(sample, "http").cast(pa.float64())).as_py() > 0.5:
        return ColumnProfile(name, "addresses", distinct, nulls)
    if pc.mean(pc.match_substring_regex(sample, _FRAMED).cast(pa.float64())).as_py() > 0.5:
        texts = pc.unique(column.drop_null()).to_pylist()
        odd_text = next((text for text in texts if _VECTOR.fullmatch(text) or split_ids(text, None) is None), None)
        content = "bag" if odd_text is None else f"lists in text, but not of ids in every row: {odd_text[:40]!r}"
        return ColumnProfile(name, content, 0, nulls)
    distinct_sample = pc.count_distinct(sample).as_py()
    is_plain = pc.all(pc.match_substring_regex(sample, _PLAIN)).as_py()
    for pattern, what in _FOREIGN.items():
        if not is_plain and pc.all(pc.match_substring_regex(sample, f"^{pattern}$")).as_py():
            return ColumnProfile(name, f"{what}: found {sample[0].as_py()!r}", distinct, nulls)
    for separator in ("|", ";", ","):
        parts = pc.split_pattern(sample, separator)
        flat = pc.utf8_trim_whitespace(pc.list_flatten(parts))
        joined = pc.mean(pc.greater(pc.list_value_length(parts), 1).cast(pa.float64())).as_py()
        different = pc.count_distinct(flat).as_py()
        # Commas and semicolons are in plain text too; parts that repeat are joined values.
        fewer = separator == "|" or different < distinct_sample
        if joined >= 0.05 and fewer and different <= 0.2 * len(sample) + 20 and _words(flat) <= 3:
            return ColumnProfile(name, "joined", distinct, nulls, separator=separator)
    words, content = _words(sample), "category"
    if words >= 3 or (words >= 1.5 and distinct > 0.5 * rows):
        content = "words"
    elif distinct > max(_FEW, 0.5 * (rows - nulls)):
        content = "a value of its own in most rows"
    return ColumnProfile(name, content, distinct, nulls)


def _words(texts: pa.Array | pa.ChunkedArray) -> float:
    return float(pc.mean(pc.list_value_length(pc.utf8_split_whitespace(texts))).as_py() or 0)


def read_times(column: pa.ChunkedArray) -> Times | None:
    """Read the times of a column, [N], as numbers, or dates in microseconds; None for a column without times."""
    with open_database() as reader:
        source = reader.register(pa.table({"value": column, "row_id": np.arange(len(column))}))
        kind = reader.rows(f"DESCRIBE SELECT value FROM {source}")[0][1]
        if (time_and_dates := find_times(reader, source, "value", kind)) is None:
            return None
        time, _ = time_and_dates
        clock = Clock.measure(reader, time, source, "true", datetime.now(UTC))
        plausible = f"isfinite({time})" if clock.unit is None else is_plausible(time, clock.unit, clock.now)
        times = reader.arrow(
            f"SELECT {time} AS time, coalesce({plausible}, false) AS good FROM {source} ORDER BY row_id"
        )
    values: Float64 = times["time"].to_numpy()
    return Times(values, times["good"].to_numpy(), clock.unit) if np.isfinite(values).any() else None


class Roles(NamedTuple):
    """Hold the columns of a log by role; `guessed` are roles for which only the number of values is evidence."""

    query_id: str
    label_id: str
    timestamp: str | None
    event: str | None
    guessed: list[str]

    def lines(self) -> list[str]:
        """Write a line for each role and its column."""
        columns = {
            "query id": self.query_id,
            "label id": self.label_id,
            "timestamp": self.timestamp,
            "event": self.event,
        }
        return [
            f"{role:9} {name or 'none'}{', a guess' if role.replace(' ', '_') in self.guessed else ''}"
            for role, name in columns.items()
        ]


def assign_roles(
    log: pa.Table, path: str, chosen: dict[str, str | None], *, query_columns: Collection[str],
    label_columns: Collection[str],
) -> Roles:  # fmt: skip
    """Assign roles to a log's columns: roles given first, then by name, then by the number of values.

    `query_columns` and `label_columns` belong to the feature tables, which must have the columns of ids.
    """
    for role, name in chosen.items():
        if name is not None and name not in log.column_names:
            raise DataError(f"{path}: data.{role}: expected one of {', '.join(log.column_names)}, received {name!r}")
    timestamp = chosen["timestamp"] or _find_time(log, used_names=set(chosen.values()))
    event = chosen["event"] or _find_event(log, used_names={*chosen.values(), timestamp})
    ids = {name: int(pc.count_distinct(log[name]).as_py()) for name in log.column_names if _is_id(log, name)}
    roles, guessed = {"query_id": chosen["query_id"], "label_id": chosen["label_id"]}, []

    def free() -> list[str]:
        return [name for name in ids if name not in {timestamp, event, *roles.values()}]

    for role, names, columns in (("label_id", _LABEL, label_columns), ("query_id", _QUERY, query_columns)):
        if roles[role] is None and (named := [name for name in free() if _score(name, names, columns)]):
            roles[role] = max(named, key=lambda name: (_score(name, names, columns), ids[name]))
    for role in ("query_id", "label_id"):
        if roles[role] is None and (free_names := free()):
            # A column with another value in every row numbers the rows, and is the last guess.
            roles[role] = max(free_names, key=lambda name: ids[name] if ids[name] < log.num_rows else 0)
            guessed.append(role)
    query, label = roles["query_id"], roles["label_id"]
    if query is None or label is None:
        raise DataError(
            f"{path}: expected a column of query ids and one of label ids, strings or integers, found "
            f"{', '.join(f'{field.name} ({field.type})' for field in log.schema)}; "
            "name them with --set data.query_id=COLUMN and --set data.label_id=COLUMN"
        )
    if query == label:
        raise DataError(f"{path}: expected two columns of ids, received {query!r} for both")
    return Roles(query, label, timestamp, event, guessed)


def _score(name: str, words: set[str], columns: Collection[str]) -> int:
    """Score the fit of a name: 4 for a column of the feature table, 2 for a word of the list, 1 more for `id`."""
    name_words = split_words(name)
    fits = 4 * (name in columns) + 2 * bool(name_words & words)
    return fits + (1 if fits and "id" in name_words else 0)


def _is_id(log: pa.Table, name: str) -> bool:
    """Return whether a column may hold ids: strings or integers, even as floats because of nulls or size."""
    column = log[name]
    kind = column.type
    if pa.types.is_floating(kind):
        values = column.drop_null().to_numpy()
        values = values[~np.isnan(values)]
        return len(values) > 0 and bool((np.isfinite(values) & (values == np.floor(values))).all())
    return is_text(kind) or bool(pa.types.is_integer(kind))


def _find_time(log: pa.Table, used_names: Collection[str | None]) -> str | None:
    """Find the column of times: dates, or numbers or text with a name of times, in most of the rows."""
    fits = {}
    for name in log.column_names:
        kind, named = log.schema.field(name).type, bool(split_words(name) & TIME_WORDS)
        temporal = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        times = read_times(log[name]) if name not in used_names and (temporal or named) else None
        if times is not None and np.isfinite(times.values).mean() > 0.5:
            fits[name] = 2 * named + temporal
    return max(fits, key=lambda name: fits[name]) if fits else None


def _find_event(log: pa.Table, used_names: Collection[str | None]) -> str | None:
    names: list[str] = log.column_names
    for name in names:
        fits = name not in used_names and is_text(log.schema.field(name).type) and split_words(name) & _EVENT
        if fits and pc.count_distinct(log[name]).as_py() <= _MOST_EVENTS:
            return name
    return None
