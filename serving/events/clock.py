"""Tell the time of events: never back, because an export takes only events later than the one before."""

from __future__ import annotations

import logging
import threading
import time
from datetime import UTC, datetime

logger = logging.getLogger(__name__)

_MOST_AHEAD = 86_400.0
"""Seconds; the times of events further ahead of the clock are errors, which no clock can wait for."""
_NOTABLE = 3600.0
"""Seconds between the times of events and the clock of which an operator should know."""


class ForwardClock:
    """Tells seconds since 1970, which pass on where the system's clock is set back. Thread-safe.

    Args:
        newest: time of the newest event before, in seconds since 1970.
    """

    def __init__(self, newest: float = 0.0) -> None:
        self._newest, self._began = newest, time.time()
        self._told = newest if newest - time.time() <= _MOST_AHEAD else 0.0
        self._at, self._lock = time.monotonic(), threading.Lock()
        if problem := self.problem():
            logger.error(problem)

    def __call__(self) -> float:
        """Return the present time, at least the time before plus what has passed since."""
        with self._lock:
            at = time.monotonic()
            self._told, self._at = max(time.time(), self._told + at - self._at), at
            return self._told

    def problem(self) -> str | None:
        """Say how far events are dated ahead of the clock; None up to an hour."""
        now = time.time()
        ahead = self() - now
        if ahead > _NOTABLE:
            hours = f"{ahead / 3600:,.0f} hours"
            return (
                f"Events are dated {hours} ahead of this machine's clock, because it has been set back: exports and "
                "refreshes take them once it is there."
            )
        if self._newest - now > _NOTABLE:
            newest, began = (
                datetime.fromtimestamp(at, UTC).strftime("%F %R UTC") for at in (self._newest, self._began)
            )
            return (
                f"Older events are dated up to {newest}, ahead of this machine's clock, and those since {began} before "
                "them: export with an earlier --since."
            )
        return None
