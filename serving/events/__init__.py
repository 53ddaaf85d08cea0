"""Record events for training and analysis.

    schema.py    the one schema of all events, and events as JSON
    folder.py    a folder: segments of JSON lines, rotated to Parquet
    kafka.py     a topic of Kafka
    objects.py   copies of finished files in an object store
    reader.py    events of a folder, as a table of DuckDB

Imports no web framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol


class EventSink(Protocol):
    """A destination that stores events. Thread-safe."""

    newest: float
    """Time of the newest event stored before, in seconds since 1970; 0 if unknown."""

    def append(self, lines: Sequence[bytes]) -> Future[None]:
        """Accept JSON events; the future completes when they are durable.

        The future's exception is StorageError if the events may be lost, or if too many events wait; the caller may
        send the events again later.
        """

    def offer(self, lines: Sequence[bytes]) -> int:
        """Accept events unacknowledged; return the number dropped."""

    def close(self) -> None:
        """Store waiting events within seconds, and close."""


CountDropped = Callable[[int], None]
"""Callback that counts accepted events without acknowledgement which were later lost."""
