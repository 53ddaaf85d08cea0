"""Convert times to numbers: the unit of each file, and the newest time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from longtail.tables.database import Database
from longtail.tables.files import DataFile
from longtail.tables.values import double, to_micros, to_number, type_name

UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
"""Number of each unit per second."""
_1990, _A_DAY = 631_152_000, 86_400


def is_plausible(time: str, unit: str, now: float) -> str:
    """Return SQL that tests whether a time is between 1990 and tomorrow; `now` is in seconds."""
    return f"({time} / {double(UNITS[unit])} BETWEEN {double(_1990)} AND {double(now + _A_DAY)})"


def find_times(database: Database, source: str, value: str, kind: str) -> tuple[str, bool] | None:
    """Return SQL for a column's times, and whether they are dates, in microseconds; None without times.

    Text holds dates if more of its values are dates than numbers.
    """
    number, micros = to_number(value, kind), to_micros(value, kind)
    if number is not None and micros is not None:
        numbers, dates = database.row(f"SELECT count({number}), count({micros}) FROM {source}")
        number = None if dates > numbers else number
    if number is not None:
        return number, False
    return None if micros is None else (f"({micros})::DOUBLE", True)


def time_expressions(file: DataFile, name: str, value: str, kind: str) -> dict[str, tuple[str, str]]:
    """Return SQL for the `number` and the `micros` of a column of times; raises DataError if its type has none."""
    number, micros = to_number(value, kind), to_micros(value, kind)
    if number is None and micros is None:
        raise file.wrong(name, "numbers or timestamps", type_name(kind))
    return {"number": (number or "NULL", "DOUBLE"), "micros": (micros or "NULL", "BIGINT")}


class FileTimes(NamedTuple):
    """Times of the rows of several files, in one unit.

    Attributes:
        time: SQL expression of the time, a DOUBLE.
        unit: coarsest unit of the files with numbers; None if their numbers are only an order.
        dated, numbered, without: numbers of the files with dates, with numbers, and with neither.
    """

    time: str
    unit: str | None
    dated: list[int]
    numbered: list[int]
    without: list[int]


def read_file_times(
    database: Database, source: str, file: str, number: str, micros: str, *, condition: str, now: datetime
) -> FileTimes:
    """Read each file's times as dates or numbers, and find its unit.

    Args:
        file, number, micros: SQL expressions: number of a row's file, its time as a number, and as a date in
            microseconds; NULL for other values.
        condition: SQL condition of the rows that count.
    """
    counts = database.rows(
        f"SELECT {file}, count({number}), count({micros}) FROM {source} WHERE {condition} GROUP BY 1 ORDER BY 1"
    )
    dated = [file_number for file_number, numbers, dates in counts if dates > numbers]
    numbered = [file_number for file_number, *_ in counts if file_number not in dated]
    units = Clock.units(database, number, source, condition, now, group=file)
    unit = next((unit for unit in UNITS if unit in {units[file_number] for file_number in numbered}), None)
    time = number
    for value, file_unit, files in [
        *(
            (number, file_unit, [file_number for file_number in numbered if units[file_number] == file_unit])
            for file_unit in UNITS
            if file_unit != unit
        ),
        (f"{micros}::DOUBLE", "microseconds", dated),
    ]:
        if files:
            scale = UNITS[unit or "microseconds"] / UNITS[file_unit]
            scaled = value if scale == 1 else f"{value} * {double(scale)}"
            time = f"CASE WHEN {file} IN ({', '.join(map(str, files))}) THEN {scaled} ELSE {time} END"
    return FileTimes(
        time,
        unit,
        dated,
        numbered,
        [file_number for file_number, numbers, dates in counts if not numbers and not dates],
    )


@dataclass(frozen=True)
class Clock:
    """Unit and newest of the times of a table.

    Attributes:
        unit: the first of `UNITS` in which most times lie between 1990 and tomorrow; None if times are only an order.
        newest: the latest of the times between 1990 and tomorrow.
        now: the present time, seconds since 1970.
    """

    unit: str | None
    newest: float | None
    now: float

    @classmethod
    def measure(cls, database: Database, time: str, table: str, condition: str, now: datetime) -> Clock:
        """Find unit and newest of the times of some rows; `time` is SQL of a DOUBLE."""
        unit, newest = cls.units(database, time, table, condition, now)[0], None
        if unit is not None:
            is_valid = is_plausible(time, unit, now.timestamp())
            (newest,) = database.row(f"SELECT max({time}) FROM {table} WHERE {condition} AND {is_valid}")
        return cls(unit, newest, now.timestamp())

    @classmethod
    def units(
        cls, database: Database, time: str, table: str, condition: str, now: datetime, group: str = "0"
    ) -> dict[int, str | None]:
        """Find the unit of the times of each group of rows, by the group's number."""
        counts = ", ".join(f"count(*) FILTER ({is_plausible(time, unit, now.timestamp())})" for unit in UNITS)
        groups = database.rows(
            f"SELECT {group}, count(*) FILTER (isfinite({time})), {counts} FROM {table} WHERE {condition} GROUP BY 1"
        )
        # More than half of the times must fit: a unit that fits only outliers would misread all others.
        return {0: None} | {
            number: next((unit for unit, count in zip(UNITS, fitting, strict=True) if 2 * count > rows), None)
            for number, rows, *fitting in groups
        }


def format_time(time: float, unit: str | None) -> str:
    """Format a time as a date, or as a number without a unit."""
    if unit is None or not np.isfinite(time):
        return f"{time:g}"
    try:
        return datetime.fromtimestamp(time / UNITS[unit], UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{time:.0f}"
