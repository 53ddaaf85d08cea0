"""Read the pairs of a log: ids of queries and labels, seconds since 1970, types of events and weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from longtail.bundle.manifest import LogColumns
from longtail.tables.database import OpenedFile, open_database
from longtail.tables.errors import DataError
from longtail.tables.files import find_files
from longtail.tables.table import Table, canonical_ids, id_expression, read_table
from longtail.tables.times import UNITS, is_plausible, read_file_times, time_expressions
from longtail.tables.values import double, to_number

_OF_EXPORT = {"label_id": "label_id", "timestamp": "time", "event": "event", "weight": "debiased_weight"}
"""Columns of an export of feedback, in place of missing columns of the training log."""


def read_pairs(
    source: Path | str | list[Path | str], settings: LogColumns, progress: Callable[[str], None], *, timed: bool = True
) -> pa.Table:
    """Read the pairs of a log or an export of feedback; raises DataError.

    Columns of the table: `query`, the query's number; `id`, the query's id; `label`, the label's id; `time`, in seconds
    since 1970; `event`, its type, or null where types do not matter; `weight`, null for 1.

    Args:
        timed: read times; otherwise `time` is the row.
    """

    def columns(opened: OpenedFile, number: int) -> dict[str, tuple[str, str]]:
        expressions: dict[str, tuple[str, str]] = {"file": (f"{number}::INTEGER", "INTEGER")}
        for role in ("query_id", "label_id", "event"):
            name = find_name(opened, role)
            if role == "event" and (settings.event is None or name not in opened.names):
                expressions[role] = "NULL", "VARCHAR"
            else:
                expressions[role] = id_expression(opened, name, *opened.column(name))
        name, weight = find_name(opened, "weight"), None
        if settings.weight is not None and name in opened.names:
            weight = to_number(*opened.column(name))
        expressions["weight"] = weight or "NULL", "DOUBLE"
        if timed:
            name = find_name(opened, "timestamp")
            expressions |= time_expressions(opened.file, name, *opened.column(name))
        return expressions

    def find_name(opened: OpenedFile, role: str) -> str:
        name: str = getattr(settings, role) or ""
        return _OF_EXPORT.get(role, name) if name not in opened.names else name

    with open_database() as duck:
        table = read_table(duck, find_files(source), columns, str(source))
        table.refuse_rejected()
        seconds = _seconds(table, settings.ticks) if timed else "rowid::DOUBLE"
        id_, label = (canonical_ids(duck, table.name, table.column(role)) for role in ("query_id", "label_id"))
        # Queries only need distinct numbers: a hash, shifted so that an unsigned 64-bit value fits BIGINT.
        query = f"(hash({id_}) >> 1)::BIGINT"
        is_valid = f"{id_} IS NOT NULL" + (f" AND {is_plausible(seconds, 'seconds', time.time())}" if timed else "")
        valid_rows = f"coalesce({is_valid}, false)"
        rows = duck.arrow(
            f"SELECT {query} AS query, {id_} AS id, {label} AS label, {seconds} AS time, "
            f"{table.column('event')} AS event, {table.column('weight')} AS weight FROM {table.name} WHERE {valid_rows}"
        )
        (odd,) = duck.row(f"SELECT count(*) FROM {table.name} WHERE NOT {valid_rows}")
        skipped = table.rows - len(rows)
        if 2 * odd > table.rows:
            raise DataError(
                f"{source}: expected ids, and times between 1990 and tomorrow, in most rows, found {odd:,} of "
                f"{table.rows:,} rows without"
            )
        empty_files = duck.empty_in_words()
    if empty_files:
        progress(f"pairs: {empty_files[0].lower()}{empty_files[1:]}")
    if skipped:
        progress(f"pairs: {skipped:,} of {table.rows:,} rows left out, without an id or a time since 1990")
    return rows


def _seconds(table: Table, ticks: float) -> str:
    """Return SQL for seconds since 1970; `ticks` per second if no unit fits the numbers."""
    columns = (table.column(name) for name in ("file", "number", "micros"))
    times = read_file_times(table.database, table.name, *columns, condition="true", now=datetime.now(UTC))
    unit = times.unit or ("microseconds" if times.dated else None)
    return f"({times.time}) / {double(UNITS[unit] if unit else ticks)}"
