"""Convert times to rows of an embedding table: hour, weekday, month and age have separate rows.

The rows are fixed, because the tower of a bundle contains them: 0 is a missing time, 1–24 the hour, 25–31 the weekday
from Monday, 32–43 the month, 44 a time after the reference, and 45 + floor(log2(1 + d)), up to 60, a time d whole days
before the reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Literal

import numpy as np

from longtail.bundle.arrays import Int32, Int64

DatePart = Literal["hour", "weekday", "month", "age"]
DATE_ROWS = 61
"""Rows of the table of a `date`."""
MISSING_DATE = int(np.iinfo(np.int64).min)
"""Marks a missing time among times in seconds."""
DAY_SECONDS = 86_400
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}
_BEFORE_ZONE = re.compile(r"\s+(?=[+-]\d\d(?::?\d\d)?$|Z$)")
_UTC = re.compile(r"\s*(?:UTC|GMT)$")


def parse_time(text: str) -> datetime:
    """Parse a date or time in ISO 8601 or a database's notation; UTC without a zone. Raises ValueError.

    Databases print a blank before the zone, `UTC` as its name, or more than six digits of a second, which are cut off.
    """
    return utc(datetime.fromisoformat(_BEFORE_ZONE.sub("", _UTC.sub("Z", text.strip()))))


def utc(time: datetime) -> datetime:
    """Add the zone UTC to a time without one."""
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def parse_seconds(text: str) -> int:
    """Parse a date or time to seconds since 1970, rounded down; raises ValueError or OverflowError."""
    return int(parse_time(text).timestamp() // 1)


def span_seconds(text: str) -> float:
    """Parse a duration such as `12h` or `4w` to seconds; raises ValueError."""
    if not (match := _SPAN.fullmatch(text)) or float(match[1]) == 0:
        raise ValueError(f"expected a span such as '90m', '12h', '30d' or '4w', received {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def nats_per_day(half_life: str) -> float:
    """Return what a score loses in a day at a half-life, in nats; raises ValueError."""
    return math.log(2) * DAY_SECONDS / span_seconds(half_life)


def date_rows(seconds_B: Int64, parts: Sequence[DatePart], reference: datetime) -> Int32:
    """Compute the rows of each part of times, int32 [B, parts]."""
    valid_B = seconds_B != MISSING_DATE
    times_B = np.where(valid_B, seconds_B, 0)
    days_B = times_B // DAY_SECONDS
    rows: dict[DatePart, Int64] = {
        "hour": 1 + times_B % DAY_SECONDS // 3600,
        "weekday": 25 + (days_B + date(1970, 1, 1).weekday()) % 7,
        "month": 32 + times_B.astype("datetime64[s]").astype("datetime64[M]").astype(np.int64) % 12,
        "age": _age_rows(int(reference.timestamp()) - times_B),
    }
    return np.stack([np.where(valid_B, rows[part], 0) for part in parts], axis=1).astype(np.int32)


def _age_rows(seconds_B: Int64) -> Int64:
    days_B = np.maximum(seconds_B // DAY_SECONDS, 0)
    powers_B = np.frexp((1 + days_B).astype(np.float64))[1] - 1
    return np.where(seconds_B < 0, 44, 45 + np.minimum(powers_B, 15)).astype(np.int64)
