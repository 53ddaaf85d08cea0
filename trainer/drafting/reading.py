"""Whole tables with the types of their columns, for `init`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from longtail.bundle.arrays import Bools, Float64
from longtail.tables import DataError, DataFile
from longtail.tables import table as tables
from longtail.tables.engine import Opened, engine
from longtail.trainer.data.times import Clock, time_in


class Times(NamedTuple):
    """Times of a column: float64 [N], NaN for what is none; which are plausible, bool [N]; and their unit."""

    values: Float64
    plausible: Bools
    unit: str | None


def read_table(files: Sequence[DataFile], where: str, names: Sequence[str] | None = None) -> pa.Table:
    """Return columns of some files as one table; None returns all."""

    def wanted(opened: Opened, number: int) -> dict[str, tuple[str, str]]:
        return tables.all_columns(opened, number) if names is None else {name: opened.column(name) for name in names}

    with engine() as reader:
        table = tables.read_table(reader, files, wanted, where)
        if not table.rows:
            raise DataError(f"{where}: expected at least one row, found none")
        table.find_types()
        return table.arrow([*table.kinds])


def names_in(file: DataFile) -> list[str]:
    """Return the columns of a file."""
    with engine() as reader:
        return Opened(reader, file).names


def times_in(column: pa.ChunkedArray) -> Times | None:
    """Return the times that a column holds, [N]: numbers, or dates in microseconds; None for a column of no times."""
    with engine() as reader:
        source = reader.register(pa.table({"value": column, "place": np.arange(len(column))}))
        kind = reader.rows(f"DESCRIBE SELECT value FROM {source}")[0][1]
        if (time_and_dates := time_in(reader, source, "value", kind)) is None:
            return None
        time, _ = time_and_dates
        clock = Clock.of(reader, time, source, "true", datetime.now(UTC))
        plausible = f"isfinite({time})" if clock.unit is None else clock.plausible(time, clock.unit)
        found = reader.arrow(
            f"SELECT {time} AS time, coalesce({plausible}, false) AS good FROM {source} ORDER BY place"
        )
    values: Float64 = found["time"].to_numpy()
    return Times(values, found["good"].to_numpy(), clock.unit) if np.isfinite(values).any() else None
