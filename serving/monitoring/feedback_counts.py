"""What is counted of feedback, in the tables `recall` and `totals`; within the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

FEEDBACK, SHADOW = SOURCES = ("feedback", "shadow")
EVENTS_OF_ANSWERS, EVENTS_ORGANIC, UNMATCHED, AMBIGUOUS = COUNTERS = (
    "events_answer",
    "events_organic",
    "unmatched",
    "ambiguous",
)


def add_recall(
    connection: sqlite3.Connection, source: str, now: float, counts: Iterable[tuple[str, int, int, int]]
) -> None:
    """Add (release, bucket, positives, hits) to the minute's counts."""
    connection.executemany(
        "INSERT INTO recall (release, minute, source, bucket, positives, hits) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET positives = positives + excluded.positives, hits = hits + excluded.hits",
        [
            (release, int(now // 60), source, bucket, positives, hits)
            for release, bucket, positives, hits in counts
            if positives
        ],
    )


def add_to_total(connection: sqlite3.Connection, name: str, more: int) -> None:
    """Add to the counter of a name, one of COUNTERS."""
    connection.execute(
        "INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
        (name, more),
    )
