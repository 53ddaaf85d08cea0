"""Read later pairs of a log: queries, label rows, seconds since 1970 and types of events.

Legend: `N` pairs, `P` pairs sorted by query, `Q` queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float64, Int64
from longtail.bundle.cooccurrence import LogPairs
from longtail.bundle.manifest import CooccurrenceSettings, LogColumns
from longtail.index.errors import PriorsError
from longtail.tables import DataError, find_files
from longtail.tables.engine import Opened, engine
from longtail.tables.table import Table, id_of, read_table
from longtail.tables.values import is_plausible, literal, micros_of, number_of

_OF_EXPORT = {"label_id": "label_id", "timestamp": "time", "event": "event"}
"""Columns of an export of feedback, used where the training log's columns are missing."""


class NewPairs(NamedTuple):
    """Pairs with labels of a bundle.

    Attributes:
        queries: a number for each query, int64 [N].
        labels: label rows, int64 [N].
        times: seconds since 1970, float64 [N].
        ids: ids of the queries, string [N]; null for a query without one.
        events: types of events, string [N]; null where the log has none.
    """

    queries: Int64
    labels: Int64
    times: Float64
    ids: pa.Array
    events: pa.Array

    def by_query(self, settings: CooccurrenceSettings, since: float, until: float) -> tuple[LogPairs, pa.Array]:
        """Sort the pairs of a time by query, then time; returns them, and the ids of their queries, string [Q].

        Args:
            since, until: seconds since 1970; a pair at `since` is left out, one at `until` is not.
        """
        order_P = np.lexsort((self.times, self.queries))
        order_P = order_P[(self.times[order_P] > since) & (self.times[order_P] <= until)]
        _, first_Q, queries_P = np.unique(self.queries[order_P], return_index=True, return_inverse=True)
        weights_P = None
        if settings.weights:
            types = self.events.dictionary_encode()
            weights = [settings.weights.get(type_, 1.0) for type_ in types.dictionary.to_pylist()]
            weights_P = np.array([*weights, 1.0], np.float32)[np.asarray(types.indices.fill_null(len(weights)))][
                order_P
            ]
        return LogPairs(queries_P, self.labels[order_P], weights_P), self.ids.take(order_P[first_Q])


def read_pairs(
    place: Path | str, settings: LogColumns, progress: Callable[[str], None], *, timed: bool = True
) -> pa.Table:
    """Read the pairs of a log or an export of feedback by training's column names; raises PriorsError.

    Columns of the table: `query`, the query's number; `id`, the query's id; `label`, the label's id; `time`, in seconds
    since 1970; `event`, its type, or null where types do not matter.

    Args:
        timed: read times; otherwise `time` is the row.
    """

    def columns(opened: Opened, _: int) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for role in ("query_id", "label_id", "timestamp", "event"):
            name = getattr(settings, role)
            name = _OF_EXPORT.get(role, name) if name not in opened.names else name
            if (role == "event" and (settings.event is None or name not in opened.names)) or (
                role == "timestamp" and not timed
            ):
                found[role] = ("NULL", "VARCHAR")
                continue
            found[role] = opened.column(name)
            if role != "timestamp":
                found[role] = id_of(opened, name, *found[role])
        return found

    try:
        with engine() as duck:
            table = read_table(duck, find_files(place), columns, str(place))
            table.refuse_rejected()
            id_, seconds = table.column("query_id"), _seconds(table, place, settings) if timed else "rowid::DOUBLE"
            ignored = ", ".join(map(literal, settings.ignored)) or "''"
            # Queries only need distinct numbers: a hash, shifted so that an unsigned 64-bit value fits BIGINT.
            query, label = f"(hash({id_}) >> 1)::BIGINT", table.column("label_id")
            given = f"{id_} IS NOT NULL" + (f" AND {is_plausible(seconds, time.time())}" if timed else "")
            known = f"coalesce({given}, false)"
            counted = f"coalesce({table.column('event')} NOT IN ({ignored}), true)"
            rows = duck.arrow(
                f"SELECT {query} AS query, {id_} AS id, {label} AS label, {seconds} AS time, "
                f"{table.column('event')} AS event FROM {table.name} WHERE {known} AND {counted}"
            )
            (odd,) = duck.row(f"SELECT count(*) FROM {table.name} WHERE NOT {known}")
            skipped = table.rows - len(rows)
            if 2 * odd > table.rows:
                raise PriorsError(
                    f"{place}: expected ids, and times between 1990 and tomorrow, in most rows, found {odd:,} of "
                    f"{table.rows:,} rows without"
                )
    except DataError as error:
        raise PriorsError(str(error)) from error
    if skipped:
        progress(
            f"pairs: {skipped:,} of {table.rows:,} rows left out, without an id or a time since 1990, or of types that "
            "do not count"
        )
    return rows


def _seconds(table: Table, place: Path | str, settings: LogColumns) -> str:
    """Return SQL of a pair's time in seconds since 1970."""
    table.find_types(["timestamp"])
    cell, kind = table.column("timestamp"), table.kinds["timestamp"]
    micros, number = micros_of(cell, kind), number_of(cell, kind)
    if micros is None and number is None:
        raise PriorsError(f"{place}, column {settings.timestamp!r}: expected times, found {kind}")
    return f"({micros}) / 1e6" if micros is not None else f"({number}) / {settings.ticks!r}"


def known_pairs(rows: pa.Table, bundle: Bundle, progress: Callable[[str], None]) -> NewPairs:
    """Select the rows of `read_pairs` whose label is in a bundle."""
    labels = pc.index_in(rows["label"].cast(bundle.labels.ids.type), bundle.labels.ids)
    if labels.null_count:
        progress(f"pairs: {labels.null_count:,} of {len(rows):,} left out, of labels that the release lacks")
    rows = rows.filter(labels.is_valid())
    return NewPairs(
        np.asarray(rows["query"]),
        np.asarray(labels.drop_null()).astype(np.int64),
        np.asarray(rows["time"], np.float64),
        *(rows[name].cast(pa.string()).combine_chunks() for name in ("id", "event")),
    )
