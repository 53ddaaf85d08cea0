"""When to ask a server that may be down: not while it has failed lately, and a second time only now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from time import monotonic

_FAILURES = 3
"""In a row, after which the circuit opens."""
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 5.0
"""For which it stays open; twice as long after every trial that fails."""
_RETRY_SHARE, _MOST_RETRIES = 0.1, 10.0
"""Of what is asked, how much may be asked again; and how much of that is saved up."""


class Circuit:
    """A circuit breaker with a budget of retries. Thread-safe.

    After some failures in a row nothing is asked for a while; then one request tries, and the others once it succeeds.
    A request that fails may be tried again as long as few others were: what is overloaded is not asked the more.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at = self._open_until = -inf
        self._open_seconds = _FIRST_SECONDS
        self._trying_until = -inf
        self._retries = _MOST_RETRIES

    def admit(self, seconds: float) -> tuple[float, float]:
        """Begin a request, if the circuit is closed or this one is to try.

        Args:
            seconds: that the request may take: so long no other tries.

        Returns:
            0, or the seconds until the next may try: then nothing is to be asked. And when the request began, for
            `failed`.
        """
        with self._lock:
            now = self._clock()
            if self._failures < _FAILURES:
                self._retries = min(_MOST_RETRIES, self._retries + _RETRY_SHARE)
                return 0.0, now
            wait = max(self._open_until, self._trying_until) - now
            if wait <= 0:
                self._trying_until = now + seconds
            return max(wait, 0.0), now

    def may_retry(self) -> bool:
        """Whether a request that failed may be tried again, which is then counted."""
        with self._lock:
            if self._failures >= _FAILURES or self._retries < 1:
                return False
            self._retries -= 1
            return True

    def succeeded(self) -> None:
        """A request was answered: the circuit closes."""
        with self._lock:
            self._failures, self._open_seconds, self._trying_until = 0, _FIRST_SECONDS, -inf

    def failed(self, began: float) -> None:
        """A request was not answered.

        Args:
            began: as of `admit`. One that was under way when the circuit opened says nothing new.
        """
        with self._lock:
            if self._failures >= _FAILURES and began <= self._opened_at:
                return
            self._failures += 1
            if self._failures >= _FAILURES:
                self._opened_at = self._clock()
                self._open_until = self._opened_at + self._open_seconds
                self._open_seconds = min(2 * self._open_seconds, _LONGEST_SECONDS)
                self._trying_until = -inf

    @property
    def open(self) -> bool:
        """Whether nothing is asked now, but by the one that tries."""
        with self._lock:
            return self._failures >= _FAILURES
