"""How one call is sent: settings, attempts, waits between them, and its value or error. No socket and no sleep here."""

from __future__ import annotations

import json
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

FIRST_SECONDS = 0.1
"""Upper end of the first wait; every further one doubles it."""
LONGEST_SECONDS = 5.0
"""Upper end of any wait that the service did not ask for."""
_SHORTEST_TIMEOUT_SECONDS = 0.001
_LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)

Outcome = httpx.Response | httpx.RequestError
"""What came of one attempt."""


class LongtailError(Exception):
    """Base of everything the client raises but ValueError and TypeError, which are the caller's and raised unsent.

    Args:
        message: what was expected and what was received.
        status: HTTP status of the answer; None if no answer came.
        type: stable name of the kind of error, such as `invalid_request`; `http_STATUS` of a gateway's answer.
        field: dotted path of what is wrong in the request, such as `queries.0.k`.
        request_id: under which the service's log has the details.
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
        where = "" if self.field is None else f" in {self.field}"
        request = "" if self.request_id is None else f" (request {self.request_id})"
        return f"{kind}{where}: {self.message}{request}"


class NoAnswerError(LongtailError):
    """No answer came, to any attempt: `type` is `timeout` or `connection`. `__cause__` is httpx2's error."""


class BusyError(LongtailError):
    """429 or 503, to every attempt: the queue is full, no release is loaded, or the service's own limit passed."""


class NotFoundError(LongtailError):
    """404: no such label, release or route."""


class DeniedError(LongtailError):
    """401 or 403: no key, a wrong one, or a plain one where an admin key is needed."""


_TYPES = {401: DeniedError, 403: DeniedError, 404: NotFoundError, 429: BusyError, 503: BusyError}


@dataclass(frozen=True)
class Settings:
    """Where the service is, how long a call may take and how often it is tried again; its repr has no key.

    Raises:
        ValueError: one of them cannot be; the message holds neither key nor URL.
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
            raise ValueError("url: expected scheme, host, port and path, received a password, query or fragment, too")
        # Checked here because httpx and h11 quote a header that they refuse.
        key = self.api_key
        if key is not None and (not key or " " in key or not (key.isascii() and key.isprintable())):
            raise ValueError("api_key: expected printable ASCII without spaces, or None")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"timeout: expected seconds > 0, received {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: expected at least 0, received {self.retries}")

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of either client of httpx2: base URL and headers, the key among them."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.url, "headers": {"Accept": "application/json", **key}}


class Attempts(Generic[T]):
    """The attempts of one call: how many were made, and how much of its time is left.

    Raises:
        ValueError, TypeError: the body holds a value that JSON cannot, such as NaN.
    """

    def __init__(self, call: Call[T], settings: Settings) -> None:
        self._call = call
        self._retries = settings.retries
        self._deadline = monotonic() + settings.timeout
        self._made = 0
        self._content = (
            None
            if call.body is None
            else json.dumps(call.body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        )

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
        """Return the seconds until the next attempt; None: the outcome is the last."""
        again = outcome.status_code in (429, 503) if isinstance(outcome, httpx.Response) else isinstance(outcome, _LOST)
        if self._made >= self._retries or not again:
            return None
        asked: str = outcome.headers.get("retry-after", "") if isinstance(outcome, httpx.Response) else ""
        # Exponential backoff with full jitter.
        wait = retry_after(asked, time()) + random() * min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._made, 30))
        self._made += 1
        return wait if wait < self._seconds_left() else None

    def value(self, outcome: Outcome) -> T:
        """Return the call's value from the last outcome; raises LongtailError if that is an error."""
        if not isinstance(outcome, httpx.Response):
            found = f"{type(outcome).__name__}: {outcome}".rstrip(": ")
            raise NoAnswerError(
                f"expected an answer from {_place(outcome.request)}, received none: {found}",
                type="timeout" if isinstance(outcome, httpx.TimeoutException) else "connection",
            ) from outcome
        if not outcome.is_success:
            raise _error_of(outcome)
        try:
            return read(self._call.answer, outcome.content)
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_context=False)[0]
            found = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
            raise LongtailError(
                f"expected the answer of {_place(outcome.request)}, received other content: {found}",
                status=outcome.status_code,
                type="unexpected_answer",
                request_id=outcome.headers.get("x-request-id"),
            ) from cause

    def _seconds_left(self) -> float:
        return self._deadline - monotonic()


def retry_after(value: str, now: float) -> float:
    """Read the seconds of a Retry-After header [RFC 9110 §10.2.3]; 0 of a date that is past, and of nonsense."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0


def _error_of(response: httpx.Response) -> LongtailError:
    """Return the error of a response that is no success, in the service's words if the service wrote it."""
    status = response.status_code
    kind = _TYPES.get(status, LongtailError)
    try:
        body = read(dict[str, Any], response.content)
        said = {name: body["error"].get(name) for name in ("type", "field")}
        return kind(body["error"]["message"], status=status, request_id=body["request_id"], **said)
    except (ValidationError, LookupError, AttributeError, TypeError):
        message = (
            f"expected an answer of Longtail from {_place(response.request)}, received another's: "
            f"{status} {response.reason_phrase}"
        ).rstrip()
        return kind(message, status=status, type=f"http_{status}", request_id=response.headers.get("x-request-id"))


def _place(request: httpx.Request) -> str:
    """Return method, host and path."""
    url = request.url
    port = "" if url.port is None else f":{url.port}"
    return f"{request.method} {url.scheme}://{url.host}{port}{url.path}"
