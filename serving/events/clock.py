"""Tell the time of events: never back, because an export takes only events later than the one before."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger(__name__)

_MOST_AHEAD = 86_400.0
"""Seconds; the times of events further ahead of the clock are errors, which no clock can wait for."""


class ForwardClock:
    """Tells seconds since 1970, which pass on where the system's clock is set back. Thread-safe.

    Args:
        newest: time of the newest event before, in seconds since 1970.
    """

    def __init__(self, newest: float = 0.0) -> None:
        ahead = newest - time.time()
        if ahead > _MOST_AHEAD:
            logger.error(
                "the newest events are %.0f hours ahead of this machine's clock: later ones are dated before them, and "
                "`export-feedback --since` may leave them out",
                ahead / 3600,
            )
            newest = 0.0
        self._told, self._at, self._lock = newest, time.monotonic(), threading.Lock()

    def __call__(self) -> float:
        """Return the present time, at least the time before plus what has passed since."""
        with self._lock:
            at = time.monotonic()
            self._told, self._at = max(time.time(), self._told + at - self._at), at
            return self._told
