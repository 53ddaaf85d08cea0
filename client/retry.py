"""When to ask again: pure functions of what happened, without clock, sleep or randomness of their own."""

from __future__ import annotations

from email.utils import parsedate_to_datetime

import httpx

FIRST_SECONDS = 0.1
"""Upper end of the first wait; every further one doubles it."""
LONGEST_SECONDS = 5.0
"""Upper end of any wait that the service did not ask for."""

_RETRIED = frozenset({429, 503})
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)

Outcome = httpx.Response | httpx.RequestError
"""What came of one attempt."""


def may_repeat(outcome: Outcome, kind: str | None, *, repeatable: bool) -> bool:
    """Whether the same request may be sent again.

    Args:
        outcome: what came of it.
        kind: the service's name of the error; None if no answer came.
        repeatable: twice does what once does. If not, only what the service surely did not take is sent again:
            429, `not_ready`, and requests that found no connection.
    """
    if isinstance(outcome, httpx.Response):
        refused = outcome.status_code == 429 or kind == "not_ready"
        return outcome.status_code in _RETRIED and (repeatable or refused)
    return isinstance(outcome, _LOST if repeatable else _NEVER_SENT)


def seconds_to_wait(outcome: Outcome, attempt: int, *, now: float, draw: float) -> float:
    """Retry-After, if the answer has one, plus exponential backoff with full jitter, which spreads the returning.

    Args:
        outcome: what came of the last attempt.
        attempt: which it was, from 0.
        now: seconds since the epoch, for a Retry-After that is a date.
        draw: uniform in [0, 1).
    """
    asked: str = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx.Response) else ""
    return retry_after(asked, now) + draw * min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(attempt, 30))


def retry_after(value: str, now: float) -> float:
    """Seconds that a Retry-After header asks for [RFC 9110 §10.2.3]; 0 for a date that is past and for nonsense."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
