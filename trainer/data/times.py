"""Times of interactions as numbers: how they are read, and what unit they are in.

Legend: `N` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Float64

UNITS = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6, "nanoseconds": 1e9}
"""How many of a unit a second has."""

_EARLIEST = datetime(1990, 1, 1, tzinfo=UTC).timestamp()
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_TIME = r"^\s*\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?)?(Z|[+-]\d\d:?\d\d)?\s*$"


def as_numbers(column: pa.ChunkedArray) -> Float64 | None:
    """Return numbers, or text of numbers, as float64 [N], NaN where a value is none; None for a column that holds no
    numbers.

    An unreadable value among readable ones is NaN; text of which no value reads is no column of numbers.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _float64(column.cast(pa.float64(), safe=False))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _read_text(column, _NUMBER, lambda text: text.cast(pa.float64()))
    return None


def as_times(column: pa.ChunkedArray) -> Float64 | None:
    """Return times as float64 [N]: numbers as they are; dates, timestamps and ISO 8601 text in microseconds since 1970,
    UTC.

    NaN where a value is none; None for a column that holds no times.
    """
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return _float64(_microseconds(column))
    numbers = as_numbers(column)
    if numbers is not None or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return numbers
    return _read_text(column, _TIME, _microseconds_of_text)


def are_dates(column: pa.ChunkedArray) -> bool:
    """Return whether `as_times` reads a column [N] in microseconds since 1970: dates, timestamps, ISO 8601 text."""
    return as_numbers(column) is None


def _read_text(column: pa.ChunkedArray, pattern: str, read: Callable[[pa.Array], pa.Array]) -> Float64 | None:
    """Return text as numbers, value by value where it does not all read; None where nothing does."""
    try:
        return _float64(read(column.combine_chunks()))
    except pa.ArrowInvalid:
        text = pc.utf8_trim_whitespace(column).combine_chunks()
        readable = pc.if_else(pc.match_substring_regex(text, pattern), text, None)
    if readable.null_count == len(readable):
        return None
    values = _halving(readable, read)
    return None if np.isnan(values).all() else values


def _halving(text: pa.Array, read: Callable[[pa.Array], pa.Array]) -> Float64:
    """Return text as numbers, NaN where a value such as the day 2026-02-30 passes the pattern and does not read."""
    try:
        return _float64(read(text))
    except pa.ArrowInvalid:
        if len(text) == 1:
            return np.array([np.nan])
        half = len(text) // 2
        return np.concatenate([_halving(text[:half], read), _halving(text[half:], read)])


def _microseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.timestamp("us", column.type.tz if pa.types.is_timestamp(column.type) else None), safe=False)


def _microseconds_of_text(text: pa.Array) -> pa.Array:
    """ISO 8601; what names a zone and what does not are read apart."""
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d)$")
    parts = [
        pc.if_else(zoned, text, None).cast(pa.timestamp("us", "UTC")).cast(pa.int64()),
        pc.if_else(zoned, None, text).cast(pa.timestamp("us")).cast(pa.int64()),
    ]
    return pc.coalesce(*parts)


def _float64(column: pa.ChunkedArray | pa.Array) -> Float64:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def unit_of(times: Sequence[Float64], *, now: datetime) -> str | None:
    """Return the unit in which most of these times lie between 1990 and tomorrow; None where most lie so in no unit.

    Args:
        times: of all files, float64 [N] each; NaN counts for nothing.

    Example:
        >>> unit_of([np.array([1.6e12, 1.7e12])], now=datetime(2026, 1, 1, tzinfo=UTC))
        'milliseconds'
    """
    known = sum(int(np.isfinite(part).sum()) for part in times)
    for name in UNITS:
        if 2 * sum(int((~implausible(part, name, now=now)).sum()) for part in times) > known:
            return name
    return None


def implausible(times_N: Float64, unit: str, *, now: datetime) -> Bools:
    """Return times that are no number, before 1990 or later than tomorrow, bool [N]."""
    seconds_N = times_N / UNITS[unit]
    outside: Bools = ~((seconds_N >= _EARLIEST) & (seconds_N <= now.timestamp() + 86_400))
    return outside


def in_words(time: float, unit: str | None) -> str:
    """Return a time as a date where its unit is known: `2026-01-31 12:00`; else as a number."""
    if unit is None or not np.isfinite(time):
        return f"{time:g}"
    try:
        return datetime.fromtimestamp(time / UNITS[unit], UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return f"{time:.0f}"
