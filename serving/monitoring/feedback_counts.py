"""What is counted of feedback, in the tables `recall` and `totals`; within the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from longtail.serving.monitoring.tables import recall, totals
from longtail.state.engines import add_up

FEEDBACK, SHADOW = SOURCES = ("feedback", "shadow")
EVENTS_OF_ANSWERS, EVENTS_ORGANIC, UNMATCHED, AMBIGUOUS = COUNTERS = (
    "events_answer",
    "events_organic",
    "unmatched",
    "ambiguous",
)
FEEDBACK_FORGOTTEN = "feedback_forgotten"
"""Among the totals: the first second since 1970 from which on all feedback is kept."""


def add_recall(connection: Connection, source: str, now: float, counts: Iterable[tuple[str, int, int, int]]) -> None:
    """Add (release, bucket, positives, hits) to the minute's counts."""
    rows = [
        {"release": release, "minute": int(now // 60), "source": source, "bucket": bucket, "positives": positives,
         "hits": hits}
        for release, bucket, positives, hits in sorted(counts)
        if positives
    ]  # fmt: skip
    add_up(connection, recall, rows, "positives", "hits")


def add_to_total(connection: Connection, name: str, more: int) -> None:
    """Add to the counter of a name, one of COUNTERS."""
    add_up(connection, totals, [{"name": name, "value": more}], "value")
