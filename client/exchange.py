"""One call from its first attempt to its value or error, without a socket: both clients do as it says."""

from __future__ import annotations

import json
from random import random
from time import monotonic, time
from typing import Any, Generic

import httpx

from longtail.client.calls import Call, T
from longtail.client.errors import BusyError, error_of, unanswered, unreadable
from longtail.client.retry import Outcome, may_repeat, seconds_to_wait
from longtail.client.settings import Settings

_SHORTEST_SECONDS = 0.001


class Exchange(Generic[T]):
    """The state of one call: how often it was tried, and how long it may go on.

    Args:
        call: what is asked.
        settings: how patiently.

    Raises:
        ValueError, TypeError: the body has something that JSON has not, such as NaN.
    """

    def __init__(self, call: Call[T], settings: Settings) -> None:
        self._call = call
        self._retries = settings.retries if call.otherwise is None else 0
        self._deadline = monotonic() + settings.timeout
        self._attempt = 0
        self._content = (
            None
            if call.body is None
            else json.dumps(call.body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        )

    def request(self) -> dict[str, Any]:
        """The next attempt, as arguments of `build_request`; it may take what is left of the time."""
        return {
            "method": self._call.method,
            "url": self._call.path,
            "content": self._content,
            "headers": {} if self._content is None else {"Content-Type": "application/json"},
            "timeout": max(self._left(), _SHORTEST_SECONDS),
        }

    def wait_after(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt; None if the outcome is the last, because it is final or time is short."""
        if self._attempt >= self._retries:
            return None
        kind = error_of(outcome).type if isinstance(outcome, httpx.Response) and outcome.is_error else None
        if not may_repeat(outcome, kind, repeatable=self._call.repeatable):
            return None
        wait = seconds_to_wait(outcome, self._attempt, now=time(), draw=random())
        self._attempt += 1
        return wait if wait < self._left() else None

    def value(self, outcome: Outcome) -> T:
        """What the last outcome says; raises LongtailError if that is an error."""
        otherwise = self._call.otherwise
        if not isinstance(outcome, httpx.Response):
            if otherwise is not None:
                return otherwise
            raise unanswered(outcome.request, outcome) from outcome
        if outcome.is_success:
            try:
                return self._call.read(outcome.json())
            except (ValueError, KeyError, TypeError, AttributeError) as cause:
                raise unreadable(outcome, cause) from cause
        error = error_of(outcome)
        if otherwise is not None and isinstance(error, BusyError):
            return otherwise
        raise error

    def _left(self) -> float:
        return self._deadline - monotonic()
