"""Read the lifetimes of labels from their display columns `available_from` and `available_until`.

A label is available at the time t if from <= t < until, in whole seconds; a missing time is no limit.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Int64
from longtail.bundle.dates import parse_seconds
from longtail.bundle.display import Display
from longtail.bundle.errors import BundleInvariantError, DisplayError, describe
from longtail.bundle.ids import is_text
from longtail.bundle.mapped_table import decode_chunks

FROM, UNTIL = "available_from", "available_until"
NO_LIMITS = {FROM: int(np.iinfo(np.int64).min), UNTIL: int(np.iinfo(np.int64).max)}
"""Times of a label without limits, by column."""
_TIMES = "timestamps, dates, or strings in ISO 8601"
_MICRO = 1_000_000


def read_lifetimes(display: pa.Table, ids: pa.Array) -> Int64:
    """Read the lifetimes of a label table, seconds since 1970, int64 [L, 2].

    Raises:
        BundleInvariantError: a column holds no times, or a label's lifetime ends before it begins.
    """
    lifetimes_L2 = np.stack(
        [
            _seconds(name, display[name], no_limit)
            if name in display.column_names
            else np.full(len(display), no_limit, np.int64)
            for name, no_limit in NO_LIMITS.items()
        ],
        axis=1,
    )
    never_L = lifetimes_L2[:, 0] >= lifetimes_L2[:, 1]
    if never_L.any():
        row = int(never_L.argmax())
        raise BundleInvariantError(
            f"labels.arrow: the lifetime of label {describe(ids[row].as_py())} begins before it ends",
            expected=f"{FROM} < {UNTIL}",
            actual=f"{display[FROM][row]} and {display[UNTIL][row]}",
        )
    return lifetimes_L2


def read_lifetime(display: Display) -> tuple[int, int]:
    """Read the lifetime of one label from its display columns as JSON values; raises DisplayError."""
    begin, end = (_second(name, display.get(name), no_limit) for name, no_limit in NO_LIMITS.items())
    return begin, end


def check_lifetime(display: Display) -> None:
    """Refuse a lifetime that ends before it begins; raises DisplayError."""
    begin, end = read_lifetime(display)
    if begin >= end:
        raise DisplayError(
            f"expected a time after {FROM}, {describe(display[FROM])}, received {describe(display[UNTIL])}",
            row=0, field=f"display.{UNTIL}",
        )  # fmt: skip


def _second(name: str, value: object, no_limit: int) -> int:
    if value is None or value == "":
        return no_limit
    try:
        return parse_seconds(value)  # type: ignore[arg-type]  # values that are not text raise AttributeError
    except (AttributeError, ValueError, OverflowError):
        message = f"expected a date or time in ISO 8601, received {describe(value)}"
        raise DisplayError(message, row=0, field=f"display.{name}") from None


def _seconds(name: str, column: pa.ChunkedArray, no_limit: int) -> Int64:
    """Read a column of times, int64 [L]."""
    array, problem = decode_chunks(column), str(column.type)
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        # Unsafe, so that nanoseconds are cut off: lifetimes count in whole seconds.
        micros = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
        valid_L = micros.is_valid().to_numpy(zero_copy_only=False)
        seconds_L: Int64 = np.where(valid_L, pc.fill_null(micros, 0).to_numpy(zero_copy_only=False) // _MICRO, no_limit)
        return seconds_L
    try:
        if pa.types.is_null(array.type) or is_text(array.type):
            # Many labels share a time, so each text is parsed once.
            encoded = array.cast(pa.large_string()).dictionary_encode()
            seconds = [_second(name, text, no_limit) for text in encoded.dictionary.to_pylist()]
            rows_L = pc.fill_null(encoded.indices, len(seconds)).to_numpy(zero_copy_only=False)
            filled_L: Int64 = np.array([*seconds, no_limit], np.int64)[rows_L]
            return filled_L
    except DisplayError as error:
        problem = error.message
    raise BundleInvariantError(f"labels.arrow column {name!r} holds times", expected=_TIMES, actual=problem)
