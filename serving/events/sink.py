"""What a place for events does, and how LONGTAIL_EVENTS names one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol


class EventSink(Protocol):
    """A place that keeps events. Thread-safe."""

    def append(self, lines: Sequence[bytes]) -> Future[None]:
        """Take events, JSON each; the future is done when they are kept for good.

        Its exception is StorageError if the events may be lost, or if too many wait: send them again later.
        """

    def offer(self, lines: Sequence[bytes]) -> int:
        """Take events that nobody waits for, and return at once how many were dropped."""

    def close(self) -> None:
        """Keep what waits, for some seconds, and let go of files and connections."""


CountDropped = Callable[[int], None]
"""Counts events that were offered, taken, and could not be kept."""


def open_events(place: Path | str, *, days: float, most_bytes: int, count_dropped: CountDropped) -> EventSink:
    """Open what LONGTAIL_EVENTS names.

    Args:
        place: a folder, or the URL of a Kafka topic.
        days, most_bytes: how much a folder keeps.
        count_dropped: counts offered events that could not be kept.

    Raises:
        ValueError: a URL that names no topic.
        OSError: the folder cannot be made.
        StateError: the extra `kafka` is not installed.
    """
    if isinstance(place, str) and "://" in place:
        from longtail.serving.events.kafka import KafkaEvents  # comes with the extra `kafka`

        return KafkaEvents(place, count_dropped=count_dropped)
    from longtail.serving.events.folder import FolderEvents

    return FolderEvents(Path(place), days=days, most_bytes=most_bytes, count_dropped=count_dropped)
