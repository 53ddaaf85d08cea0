"""Tell times of events that never run back."""

from __future__ import annotations

import logging
import threading
import time
from datetime import UTC, datetime

logger = logging.getLogger(__name__)

_MOST_AHEAD_SECONDS = 86_400.0
"""Times of events further ahead of the clock are errors, which no clock can wait for."""
_NOTABLE_SECONDS = 3600.0
"""Distance of event times from the clock that an operator should know."""


class ForwardClock:
    """Seconds since 1970 that go on when the clock is set back. Thread-safe.

    Args:
        newest: time of the newest stored event, in seconds since 1970.
    """

    def __init__(self, newest: float = 0.0) -> None:
        self._newest, self._start = newest, time.time()
        self._time = newest if newest - time.time() <= _MOST_AHEAD_SECONDS else 0.0
        self._monotonic, self._lock = time.monotonic(), threading.Lock()
        if problem := self.problem():
            logger.error(problem)

    def __call__(self) -> float:
        """Return the present time, never less than before."""
        with self._lock:
            monotonic = time.monotonic()
            self._time, self._monotonic = max(time.time(), self._time + monotonic - self._monotonic), monotonic
            return self._time

    def problem(self) -> str | None:
        """Say how far events are ahead of the clock; None up to an hour."""
        system_time = time.time()
        ahead = self() - system_time
        if ahead > _NOTABLE_SECONDS:
            hours = f"{ahead / 3600:,.0f} hours"
            return (
                f"Events are dated {hours} ahead of this machine's clock, because it has been set back: exports and "
                "refreshes take them once it is there."
            )
        if self._newest - system_time > _NOTABLE_SECONDS:
            newest, start = (
                datetime.fromtimestamp(at, UTC).strftime("%F %R UTC") for at in (self._newest, self._start)
            )
            return (
                f"Older events are dated up to {newest}, ahead of this machine's clock, and those since {start} before "
                "them: export with an earlier --since."
            )
        return None
