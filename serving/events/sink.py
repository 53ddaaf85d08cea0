"""What a place for events does."""

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
