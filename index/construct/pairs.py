"""Read later pairs of a log: queries, label rows, seconds since 1970, types of events and weights.

Legend: `N` pairs, `P` pairs sorted by query, `Q` queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float64, Int64
from longtail.bundle.cooccurrence import LogPairs
from longtail.bundle.errors import describe
from longtail.bundle.events import weights_of
from longtail.bundle.ids import rows_of_ids
from longtail.bundle.manifest import LogColumns
from longtail.index.errors import NothingNewError, PriorsError
from longtail.tables import DataError, EmptyFileError, find_files
from longtail.tables.engine import Opened, engine
from longtail.tables.table import Table, canonical_ids, id_of, read_table
from longtail.tables.times import UNITS, times_of_files
from longtail.tables.values import double, in_words, is_plausible, micros_of, number_of

_OF_EXPORT = {"label_id": "label_id", "timestamp": "time", "event": "event", "weight": "debiased_weight"}
"""Columns of an export of feedback, used where the training log's columns are missing."""
_MOST_NAMED = 5
"""Most types of events that a line names."""


class NewPairs(NamedTuple):
    """Pairs with labels of a bundle.

    Attributes:
        queries: a number for each query, int64 [N].
        labels: label rows, int64 [N].
        times: seconds since 1970, float64 [N].
        ids: ids of the queries, string [N]; null for a query without one.
        of_types: weights by the pairs' types of events, float64 [N], > 0.
        weights: these times the weights of the log's own column, float64 [N], > 0.
    """

    queries: Int64
    labels: Int64
    times: Float64
    ids: pa.Array
    of_types: Float64
    weights: Float64

    def by_query(self, since: float, until: float) -> tuple[LogPairs, pa.Array, LogPairs]:
        """Sort the pairs of a time by query, then time.

        Args:
            since, until: seconds since 1970; a pair at `since` is left out, one at `until` is not.

        Returns:
            The pairs, the ids of their queries, string [Q], and the earlier pairs of these queries.
        """
        order_N = np.lexsort((self.times, self.queries))
        times_N = self.times[order_N]
        order_P = order_N[(times_N > since) & (times_N <= until)]
        numbers_Q, first_Q, queries_P = np.unique(self.queries[order_P], return_index=True, return_inverse=True)
        weights_P = self.weights[order_P].astype(np.float32)
        earlier_n = order_N[(times_N <= since) & np.isin(self.queries[order_N], numbers_Q)]
        earlier = LogPairs(np.searchsorted(numbers_Q, self.queries[earlier_n]), self.labels[earlier_n])
        return LogPairs(queries_P, self.labels[order_P], weights_P), self.ids.take(order_P[first_Q]), earlier


def read_pairs(
    place: Path | str, settings: LogColumns, progress: Callable[[str], None], *, timed: bool = True
) -> pa.Table:
    """Read the pairs of a log or an export of feedback by training's column names; raises PriorsError.

    Columns of the table: `query`, the query's number; `id`, the query's id; `label`, the label's id; `time`, in seconds
    since 1970; `event`, its type, or null where types do not matter; `weight`, null for 1.

    Args:
        timed: read times; otherwise `time` is the row.
    """

    def columns(opened: Opened, number: int) -> dict[str, tuple[str, str]]:
        expressions: dict[str, tuple[str, str]] = {"file": (f"{number}::INTEGER", "INTEGER")}
        for role in ("query_id", "label_id", "event"):
            name = name_in(opened, role)
            if role == "event" and (settings.event is None or name not in opened.names):
                expressions[role] = "NULL", "VARCHAR"
            else:
                expressions[role] = id_of(opened, name, *opened.column(name))
        name, weight = name_in(opened, "weight"), None
        if settings.weight is not None and name in opened.names:
            weight = number_of(*opened.column(name))
        expressions["weight"] = weight or "NULL", "DOUBLE"
        if timed:
            name = name_in(opened, "timestamp")
            value, kind = opened.column(name)
            seconds, micros = number_of(value, kind), micros_of(value, kind)
            if seconds is None and micros is None:
                raise opened.file.wrong(name, "numbers or timestamps", in_words(kind))
            expressions |= {"number": (seconds or "NULL", "DOUBLE"), "micros": (micros or "NULL", "BIGINT")}
        return expressions

    def name_in(opened: Opened, role: str) -> str:
        name: str = getattr(settings, role) or ""
        return _OF_EXPORT.get(role, name) if name not in opened.names else name

    try:
        with engine() as duck:
            table = read_table(duck, find_files(place), columns, str(place))
            table.refuse_rejected()
            seconds = _seconds(table, settings.ticks) if timed else "rowid::DOUBLE"
            id_, label = (canonical_ids(duck, table.name, table.column(role)) for role in ("query_id", "label_id"))
            # Queries only need distinct numbers: a hash, shifted so that an unsigned 64-bit value fits BIGINT.
            query = f"(hash({id_}) >> 1)::BIGINT"
            given = f"{id_} IS NOT NULL" + (f" AND {is_plausible(seconds, time.time())}" if timed else "")
            known = f"coalesce({given}, false)"
            rows = duck.arrow(
                f"SELECT {query} AS query, {id_} AS id, {label} AS label, {seconds} AS time, "
                f"{table.column('event')} AS event, {table.column('weight')} AS weight FROM {table.name} WHERE {known}"
            )
            (odd,) = duck.row(f"SELECT count(*) FROM {table.name} WHERE NOT {known}")
            skipped = table.rows - len(rows)
            if 2 * odd > table.rows:
                raise PriorsError(
                    f"{place}: expected ids, and times between 1990 and tomorrow, in most rows, found {odd:,} of "
                    f"{table.rows:,} rows without"
                )
            empty_files = duck.empty_in_words()
    except EmptyFileError as error:
        raise NothingNewError(str(error)) from error
    except DataError as error:
        raise PriorsError(str(error)) from error
    if empty_files:
        progress(f"pairs: {empty_files[0].lower()}{empty_files[1:]}")
    if skipped:
        progress(f"pairs: {skipped:,} of {table.rows:,} rows left out, without an id or a time since 1990")
    return rows


def _seconds(table: Table, ticks: float) -> str:
    """Return SQL of a pair's time in seconds since 1970; `ticks` a second where no unit fits the numbers."""
    columns = (table.column(name) for name in ("file", "number", "micros"))
    times = times_of_files(table.engine, table.name, *columns, where="true", now=datetime.now(UTC))
    unit = times.unit or ("microseconds" if times.dated else None)
    return f"({times.time}) / {double(UNITS[unit] if unit else ticks)}"


def weighed(rows: pa.Table, columns: LogColumns, progress: Callable[[str], None]) -> pa.Table:
    """Add to rows of `read_pairs` their weights, `of_type` and `weight`, and leave out those that do not count."""
    of_types_N = weights_of(rows["event"].cast(pa.string()).combine_chunks(), columns.by_type)
    weights_N = of_types_N * rows["weight"].cast(pa.float64()).combine_chunks().fill_null(1.0).to_numpy()
    rows = rows.drop_columns("weight").append_column("of_type", pa.array(of_types_N))
    counts_N = np.isfinite(weights_N) & (weights_N > 0)
    if not counts_N.all():
        unknown = {*rows["event"].filter(pa.array(of_types_N == 0)).unique().to_pylist()} - {*columns.by_type}
        named = ", ".join(sorted(map(describe, unknown))[:_MOST_NAMED])
        progress(
            f"pairs: {int((~counts_N).sum()):,} of {len(rows):,} left out, of weight 0"
            + (f", or of types without a weight: {named}" if unknown else "")
        )
    return rows.append_column("weight", pa.array(weights_N)).filter(pa.array(counts_N))


def known_pairs(rows: pa.Table, bundle: Bundle, progress: Callable[[str], None]) -> NewPairs:
    """Select the rows of `weighed` whose label is in a bundle."""
    labels = rows_of_ids(rows["label"].combine_chunks(), bundle.labels.ids)
    if labels.null_count:
        progress(f"pairs: {labels.null_count:,} of {len(rows):,} left out, of labels that the release lacks")
    rows = rows.filter(labels.is_valid())
    return NewPairs(
        np.asarray(rows["query"]),
        np.asarray(labels.drop_null()).astype(np.int64),
        np.asarray(rows["time"], np.float64),
        rows["id"].cast(pa.string()).combine_chunks(),
        *(rows[name].to_numpy() for name in ("of_type", "weight")),
    )
