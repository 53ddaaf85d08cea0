"""Events for training and analysis: what was chosen, which labels changed, and a share of the answers.

    schema.py    the one schema of all events, and events as JSON
    folder.py    a folder: segments of JSON lines, rotated to Parquet
    kafka.py     a topic of Kafka
    reader.py    events of a folder, as a table of DuckDB

Imports no web framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol


class EventSink(Protocol):
    """A place that keeps events. Thread-safe."""

    def append(self, lines: Sequence[bytes]) -> Future[None]:
        """Take events, JSON each; the future is done when they are kept for good.

        Its exception is StorageError if the events may be lost, or if too many wait: send them again later.
        """

    def offer(self, lines: Sequence[bytes]) -> int:
        """Take events without an acknowledgement, and return at once how many were dropped."""

    def close(self) -> None:
        """Keep what waits, for some seconds, and let go of files and connections."""


CountDropped = Callable[[int], None]
"""Counts events that were offered, taken, and could not be kept."""
