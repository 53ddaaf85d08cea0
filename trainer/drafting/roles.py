"""Which columns of a log are the query's id, the label's id, the time and the event: by name, then by cardinality."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.trainer.data.times import as_times
from longtail.trainer.drafting.columns import words_of
from longtail.trainer.errors import DataError

_QUERY = {"user", "customer", "client", "visitor", "member", "session", "shopper", "account", "query", "person",
          "reviewer", "uid", "buyer", "reader", "viewer", "listener", "household", "cookie", "device"}  # fmt: skip
_LABEL = {"item", "product", "article", "label", "sku", "movie", "film", "book", "track", "song", "video", "asin",
          "business", "content", "game", "course", "poi", "location", "listing", "offer", "document", "doc", "page",
          "iid", "pid", "recipe", "job", "podcast", "artist", "venue"}  # fmt: skip
TIME_WORDS = {"time", "timestamp", "date", "datetime", "ts", "at", "day", "unixtime"}
_EVENT = {"event", "action", "behavior", "behaviour", "type", "interaction"}
_MOST_EVENTS = 30


@dataclass(frozen=True)
class Roles:
    """Columns of a log.

    Attributes:
        query_id, label_id: of ids.
        timestamp: of numbers, dates or ISO 8601 text; None without.
        event: of few strings; None without.
        guessed: roles that nothing but the number of their values speaks for.
    """

    query_id: str
    label_id: str
    timestamp: str | None
    event: str | None
    guessed: list[str]


def roles_of(
    log: pa.Table, path: Path, given: dict[str, str | None], *, query_columns: Collection[str],
    label_columns: Collection[str],
) -> Roles:  # fmt: skip
    """Find the roles.

    Args:
        log: interactions.
        path: of the log, for errors.
        given: columns by role, as the options name them; None is found out.
        query_columns, label_columns: of the feature tables, which must have the ids' columns.

    Raises:
        DataError: a column that is given is not there, or no column can be ids of queries or of labels.
    """
    for role, name in given.items():
        if name is not None and name not in log.column_names:
            option = role.replace("_", "-")
            raise DataError(f"{path}: --{option}: expected one of {', '.join(log.column_names)}, received {name!r}")
    timestamp = given["timestamp"] or _time_in(log, taken=set(given.values()))
    event = given["event"] or _event_in(log, taken={*given.values(), timestamp})
    ids = {name: int(pc.count_distinct(log[name]).as_py()) for name in log.column_names if _is_id(log, name)}
    found, guessed = {"query_id": given["query_id"], "label_id": given["label_id"]}, []
    for role, names, columns in (("label_id", _LABEL, label_columns), ("query_id", _QUERY, query_columns)):
        taken = {timestamp, event, *found.values()}
        free = [name for name in ids if name not in taken]
        if found[role] is None and (named := [name for name in free if _score(name, names, columns)]):
            found[role] = max(named, key=lambda name: (_score(name, names, columns), ids[name]))
    for role in ("query_id", "label_id"):
        free = [name for name in ids if name not in {timestamp, event, *found.values()}]
        if found[role] is None and free:
            found[role] = max(free, key=lambda name: ids[name] if ids[name] < log.num_rows else 0)
            guessed.append(role)
    if found["query_id"] is None or found["label_id"] is None:
        raise DataError(
            f"{path}: expected a column of query ids and one of label ids, strings or integers, found "
            f"{', '.join(f'{name} ({log.schema.field(name).type})' for name in log.column_names)}; "
            "name them with --query-id and --label-id"
        )
    if found["query_id"] == found["label_id"]:
        raise DataError(f"{path}: expected two columns of ids, received {found['query_id']!r} for both")
    return Roles(found["query_id"], found["label_id"], timestamp, event, guessed)


def _score(name: str, words: set[str], columns: Collection[str]) -> int:
    """How well a name fits: 4 for a column of the feature table, 2 for a word of the list, 1 more for `id`."""
    own = words_of(name)
    fits = 4 * (name in columns) + 2 * bool(own & words)
    return fits + (1 if fits and "id" in own else 0)


def _is_id(log: pa.Table, name: str) -> bool:
    """Strings, integers, and integers that a null or their size made floats of."""
    column = log[name]
    kind = column.type
    if pa.types.is_floating(kind):
        values = column.drop_null().to_numpy()
        values = values[~np.isnan(values)]
        return len(values) > 0 and bool((np.isfinite(values) & (values == np.floor(values))).all())
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind))


def _time_in(log: pa.Table, taken: Collection[str | None]) -> str | None:
    """The column of times: dates, or numbers or text with a name that says so; most of its rows have one."""
    fits = {}
    for name in log.column_names:
        kind, named = log.schema.field(name).type, bool(words_of(name) & TIME_WORDS)
        temporal = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        times_N = as_times(log[name]) if name not in taken and (temporal or named) else None
        if times_N is not None and np.isfinite(times_N).mean() > 0.5:
            fits[name] = 2 * named + temporal
    return max(fits, key=lambda name: fits[name]) if fits else None


def _event_in(log: pa.Table, taken: Collection[str | None]) -> str | None:
    """The column of event types: few different strings, and a name that says so."""
    names: list[str] = log.column_names
    for name in names:
        kind = log.schema.field(name).type
        strings = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        few = strings and pc.count_distinct(log[name]).as_py() <= _MOST_EVENTS
        if name not in taken and few and words_of(name) & _EVENT:
            return name
    return None
