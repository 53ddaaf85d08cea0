"""Decide how a call is sent: settings, attempts, waits, and value or error; without sockets and sleeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from random import random
from time import monotonic, time
from typing import Any, Generic

import httpx2 as httpx
from pydantic import ValidationError

from longtail.client.answers import T, read
from longtail.client.calls import Call
from longtail.plain import encoded

FIRST_SECONDS = 0.1
"""Upper limit of the first wait; every further wait doubles the limit."""
LONGEST_SECONDS = 5.0
"""Upper limit of every wait that the service did not request."""
_SHORTEST_TIMEOUT_SECONDS = 0.001
_LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)

Outcome = httpx.Response | httpx.RequestError
"""Outcome of one attempt."""


class LongtailError(Exception):
    """Base class of the client's errors.

    Wrong arguments raise ValueError or TypeError instead, before anything is sent.

    Args:
        message: what was expected and what was received.
        status: HTTP status of the answer; None if no answer came.
        type: name of the error, such as `invalid_request`, or `http_STATUS` if a gateway answered.
        field: dotted path of the wrong part of the request, such as `queries.0.k`.
        request_id: id of the request in the service's log.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str = "unknown",
        field: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.field = field
        self.request_id = request_id

    def __str__(self) -> str:
        kind = self.type if self.status is None else f"{self.status} {self.type}"
        location = "" if self.field is None else f" in {self.field}"
        request = "" if self.request_id is None else f" (request {self.request_id})"
        return f"{kind}{location}: {self.message}{request}"


class NoAnswerError(LongtailError):
    """No attempt got an answer; `type` is `timeout` or `connection`, and `__cause__` httpx2's error."""


class BusyError(LongtailError):
    """Every attempt got 429 or 503: the queue is full, no release is loaded, or the service's time limit passed."""


class NotFoundError(LongtailError):
    """Status 404: there is no such label, release or route."""


class DeniedError(LongtailError):
    """Status 401 or 403: the API key is missing or wrong, or is not an admin key where one is needed."""


_TYPES = {401: DeniedError, 403: DeniedError, 404: NotFoundError, 429: BusyError, 503: BusyError}


@dataclass(frozen=True)
class ConnectionSettings:
    """Address of the service, API key, timeout and number of retries; the repr hides the key.

    Raises:
        ValueError: a setting is invalid; the message contains neither key nor URL.
    """

    url: str
    api_key: str | None = field(repr=False)
    timeout: float
    retries: int

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"url: expected http(s)://HOST…, received none: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"url: expected http(s)://HOST…, received one of scheme {url.scheme!r}")
        if url.userinfo or url.query or url.fragment:
            raise ValueError("url: expected scheme, host, port and path, received also a password, query or fragment")
        # Checked here, because httpx and h11 would quote a refused header, with the key, in their errors.
        key = self.api_key
        if key is not None and (not key or " " in key or not (key.isascii() and key.isprintable())):
            raise ValueError("api_key: expected printable ASCII without spaces, or None")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout: expected seconds > 0, received {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: expected at least 0, received {self.retries}")

    @property
    def connection(self) -> dict[str, Any]:
        """Return the arguments for both clients of httpx2: base URL, and headers with the key."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.url, "headers": {"Accept": "application/json", **key}}


class Attempts(Generic[T]):
    """The attempts of one call: their number, and the time that is left.

    Raises:
        ValueError, TypeError: JSON cannot represent a value of the body; the message names its field.
    """

    def __init__(self, call: Call[T], settings: ConnectionSettings) -> None:
        self._call = call
        self._retries = settings.retries
        self._deadline = monotonic() + settings.timeout
        self._retried = 0
        self._content = None if call.body is None else encoded(call.body)

    def request(self) -> dict[str, Any]:
        """Return the next attempt as arguments of httpx2's `build_request`; its timeout is the time left."""
        return {
            "method": self._call.method,
            "url": self._call.path,
            "content": self._content,
            "headers": {} if self._content is None else {"Content-Type": "application/json"},
            "timeout": max(self._seconds_left(), _SHORTEST_TIMEOUT_SECONDS),
        }

    def wait_after(self, outcome: Outcome) -> float | None:
        """Return the seconds until the next attempt; None: the outcome is final."""
        again = outcome.status_code in (429, 503) if isinstance(outcome, httpx.Response) else isinstance(outcome, _LOST)
        if self._retried >= self._retries or not again:
            return None
        header: str = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx.Response) else ""
        # Exponential backoff with full jitter, so that clients do not retry in step.
        wait = retry_after(header, time()) + random() * min(
            LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._retried, 30)
        )
        self._retried += 1
        return wait if wait < self._seconds_left() else None

    def value(self, outcome: Outcome) -> T:
        """Return the call's value from the last outcome; raises LongtailError for an error."""
        if not isinstance(outcome, httpx.Response):
            detail = f"{type(outcome).__name__}: {outcome}".rstrip(": ")
            raise NoAnswerError(
                f"expected an answer from {_target(outcome.request)}, received none: {detail}",
                type="timeout" if isinstance(outcome, httpx.TimeoutException) else "connection",
            ) from outcome
        if not outcome.is_success:
            raise _read_error(outcome)
        try:
            return read(self._call.answer, outcome.content)
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_context=False)[0]
            detail = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
            raise LongtailError(
                f"expected the answer of {_target(outcome.request)}, received other content: {detail}",
                status=outcome.status_code,
                type="unexpected_answer",
                request_id=outcome.headers.get("x-request-id"),
            ) from cause

    def _seconds_left(self) -> float:
        return self._deadline - monotonic()


def retry_after(value: str, now: float) -> float:
    """Parse a Retry-After header into seconds [RFC 9110 §10.2.3]; 0 for a past date or malformed text."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0


def _read_error(response: httpx.Response) -> LongtailError:
    """Create the error of an unsuccessful response."""
    status = response.status_code
    kind = _TYPES.get(status, LongtailError)
    try:
        body = read(dict[str, Any], response.content)
        details = {name: body["error"].get(name) for name in ("type", "field")}
        return kind(body["error"]["message"], status=status, request_id=body["request_id"], **details)
    except (ValidationError, LookupError, AttributeError, TypeError):
        message = (
            f"expected an answer of Longtail from {_target(response.request)}, received another's: "
            f"{status} {response.reason_phrase}"
        ).rstrip()
        return kind(message, status=status, type=f"http_{status}", request_id=response.headers.get("x-request-id"))


def _target(request: httpx.Request) -> str:
    """Return method, host and path of a request."""
    url = request.url
    port = "" if url.port is None else f":{url.port}"
    return f"{request.method} {url.scheme}://{url.host}{port}{url.path}"
