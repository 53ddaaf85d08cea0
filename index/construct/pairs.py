"""Read pairs of a log for a forecast: a number per query, label rows, and seconds since 1970.

Legend: `N` pairs.
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
from longtail.bundle.forecast import ForecastSettings
from longtail.index.errors import PriorsError
from longtail.tables import DataError, find_files
from longtail.tables.engine import Opened, engine
from longtail.tables.table import id_of, read_table
from longtail.tables.values import is_plausible, literal, micros_of, number_of

_OF_EXPORT = {"label_id": "label_id", "timestamp": "time", "event": "event"}
"""Columns of an export of feedback, used where the training log's columns are missing."""


class NewPairs(NamedTuple):
    """Pairs with labels of a bundle: query numbers and label rows, int64 [N], and seconds since 1970 [N]."""

    queries: Int64
    labels: Int64
    times: Float64


def read_pairs(
    place: Path | str, bundle: Bundle, settings: ForecastSettings, progress: Callable[[str], None]
) -> NewPairs:
    """Read the pairs of a log or an export of feedback by training's column names; raises PriorsError."""

    def columns(opened: Opened, _: int) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for role in ("query_id", "label_id", "timestamp", "event"):
            name = getattr(settings, role)
            name = _OF_EXPORT.get(role, name) if name not in opened.names else name
            if role == "event" and (settings.event is None or name not in opened.names):
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
            table.find_types(["timestamp"])
            cell, kind = table.column("timestamp"), table.kinds["timestamp"]
            micros, number = micros_of(cell, kind), number_of(cell, kind)
            if micros is None and number is None:
                raise PriorsError(f"{place}, column {settings.timestamp!r}: expected times, found {kind}")
            seconds = f"({micros}) / 1e6" if micros is not None else f"({number}) / {settings.ticks!r}"
            ignored = ", ".join(map(literal, settings.ignored)) or "''"
            # Queries only need distinct numbers: a hash, shifted so that an unsigned 64-bit value fits BIGINT.
            query, label = f"(hash({table.column('query_id')}) >> 1)::BIGINT", table.column("label_id")
            given = f"{table.column('query_id')} IS NOT NULL AND {is_plausible(seconds, time.time())}"
            known = f"coalesce({given}, false)"
            counted = f"coalesce({table.column('event')} NOT IN ({ignored}), true)"
            rows = duck.arrow(
                f"SELECT {query} AS query, {label} AS label, {seconds} AS time FROM {table.name} "
                f"WHERE {known} AND {counted}"
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
    pairs = known_pairs(rows, bundle)
    if (unknown := len(rows) - len(pairs.labels)) or skipped:
        progress(
            f"priors: {skipped:,} of {table.rows:,} rows left out, without an id or a time since 1990, or of types "
            f"that do not count, and {unknown:,} of labels that the release lacks"
        )
    return pairs


def known_pairs(rows: pa.Table, bundle: Bundle) -> NewPairs:
    """Select the rows whose `label` is in a bundle; columns `query`, `label` (ids) and `time` (seconds)."""
    labels = pc.index_in(rows["label"].cast(bundle.labels.ids.type), bundle.labels.ids)
    rows = rows.filter(labels.is_valid())
    return NewPairs(
        np.asarray(rows["query"]), np.asarray(labels.drop_null()).astype(np.int64), np.asarray(rows["time"], np.float64)
    )
