"""How one call is sent: settings, attempts, waits between them, and its value or error. No socket and no sleep here.

Both clients do what `Attempts` says. The waits are exponential backoff with full jitter after Retry-After.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from random import random
from time import monotonic, time
from typing import Any, Generic

import httpx
from pydantic import ValidationError

from longtail.client.errors import BusyError, error_of, unanswered, unreadable
from longtail.client.requests import Call, T
from longtail.client.responses import read

FIRST_SECONDS = 0.1
"""Upper end of the first wait; every further one doubles it."""
LONGEST_SECONDS = 5.0
"""Upper end of any wait that the service did not ask for."""

MODELS_PATH = "/v1/models"
_MODEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SHORTEST_TIMEOUT_SECONDS = 0.001
_RETRIED = frozenset({429, 503})
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)

Outcome = httpx.Response | httpx.RequestError
"""What came of one attempt."""


@dataclass(frozen=True)
class Settings:
    """Where the service is and how patiently it is asked; its repr has no key.

    Args:
        url: of the service, such as `https://longtail.example`; may have a path for the routes to follow.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds that one call may take, its retries and the waits between them included. One read of a
            socket waits for as long as is left, so an answer that trickles in can take longer.
        retries: further attempts after the first.
        model: of the service's models, the one that is asked; None: the one whose paths do not name it.

    Raises:
        ValueError: one of them cannot be; the message holds neither key nor URL.
    """

    url: str
    api_key: str | None = field(repr=False)
    timeout: float
    retries: int
    model: str | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: expected http(s)://HOST…, received none: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"url: expected http(s)://HOST…, received one of scheme {url.scheme!r}")
        if url.userinfo or url.query or url.fragment:
            raise ValueError("url: expected scheme, host, port and path, received a password, query or fragment, too")
        # Checked here because httpx and h11 quote a header that they refuse.
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key: expected printable ASCII, received other characters")
        if self.api_key is not None and (not self.api_key or " " in self.api_key):
            raise ValueError("api_key: expected a key or None, received one that is empty or has a space")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout: expected seconds > 0, received {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: expected at least 0, received {self.retries}")
        if self.model is not None and not _MODEL.fullmatch(self.model):
            raise ValueError(
                f"model: expected 1 to 64 of a-z, 0-9, _ and -, no sign first, received {self.model[:100]!r}"
            )

    def headers(self) -> dict[str, str]:
        """HTTP headers of every request, the key among them."""
        authorization = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Accept": "application/json", **authorization}

    def path(self, path: str) -> str:
        """A route's path as that of the model: `/v1/retrieve` is `/v1/models/NAME/retrieve`; of all models as it is."""
        if self.model is None or path == MODELS_PATH:
            return path
        return f"{MODELS_PATH}/{self.model}{path.removeprefix('/v1')}"


class Attempts(Generic[T]):
    """The attempts of one call: how many were made, and how much of its time is left.

    Args:
        call: what is asked.
        settings: the most retries and seconds.

    Raises:
        ValueError, TypeError: the body holds a value that JSON cannot, such as NaN.
    """

    def __init__(self, call: Call[T], settings: Settings) -> None:
        self._call = call
        self._path = settings.path(call.path)
        self._retries = settings.retries if call.when_busy is None else 0
        self._deadline = monotonic() + settings.timeout
        self._made = 0
        self._content = (
            None
            if call.body is None
            else json.dumps(call.body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        )

    def request(self) -> dict[str, Any]:
        """The next attempt, as arguments of httpx's `build_request`; its timeout is the time left."""
        return {
            "method": self._call.method,
            "url": self._path,
            "content": self._content,
            "headers": {} if self._content is None else {"Content-Type": "application/json"},
            "timeout": max(self._seconds_left(), _SHORTEST_TIMEOUT_SECONDS),
        }

    def wait_after(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt; None if the outcome is the last, because it is final or time is short."""
        if self._made >= self._retries:
            return None
        kind = error_of(outcome).type if isinstance(outcome, httpx.Response) and outcome.is_error else None
        if not may_repeat(outcome, kind, repeatable=self._call.repeatable):
            return None
        wait = seconds_to_wait(outcome, self._made, now=time(), draw=random())
        self._made += 1
        return wait if wait < self._seconds_left() else None

    def value(self, outcome: Outcome) -> T:
        """The call's value from the last outcome; raises LongtailError if that is an error."""
        when_busy = self._call.when_busy
        if not isinstance(outcome, httpx.Response):
            if when_busy is not None:
                return when_busy
            raise unanswered(outcome.request, outcome) from outcome
        if outcome.is_success:
            try:
                return read(self._call.answer, outcome.content)
            except ValidationError as cause:
                raise unreadable(outcome, cause) from cause
        error = error_of(outcome)
        if when_busy is not None and isinstance(error, BusyError):
            return when_busy
        raise error

    def _seconds_left(self) -> float:
        return self._deadline - monotonic()


def may_repeat(outcome: Outcome, kind: str | None, *, repeatable: bool) -> bool:
    """Whether the same request may be sent again.

    Args:
        outcome: the HTTP answer, or the error that came instead of one.
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
