"""The errors of the client, and how they are made of an HTTP response or of its absence."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from longtail.client.responses import ErrorBody, Problem, read


class LongtailError(Exception):
    """Base of everything the client raises but ValueError and TypeError, which are the caller's and raised unsent.

    Args:
        message: what was expected and what was received.
        status: HTTP status of the answer; None if no answer came.
        type: stable name of the kind of error, such as `invalid_request`. `http_STATUS` if the answer is not the
            service's but, say, a gateway's; `unexpected_answer` if it is a success that cannot be read.
        field: dotted path of what is wrong in the request, such as `queries.0.k`; None if nothing is.
        request_id: under which the service's log has the details; None if unknown.
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
    """No answer came, to any attempt: `type` is `timeout` or `connection`. `__cause__` is httpx's error."""


class BusyError(LongtailError):
    """429 or 503, to every attempt: the queue is full, no release is loaded, or
    the service's own limit passed.
    """


class NotFoundError(LongtailError):
    """404: no such label, release or route."""


class DeniedError(LongtailError):
    """401 or 403: no key, a wrong one, or a plain one where an admin key is needed."""


_TYPES = {401: DeniedError, 403: DeniedError, 404: NotFoundError, 429: BusyError, 503: BusyError}


def error_of(response: httpx.Response) -> LongtailError:
    """The error of a response that is no success, in the service's words if the service wrote it."""
    try:
        body = read(ErrorBody, response.content)
        problem, request_id = body.error, body.request_id
    except ValidationError:
        message = (
            f"expected an answer of Longtail from {place(response.request)}, received another's: "
            f"{response.status_code} {response.reason_phrase}"
        )
        problem = Problem(message.rstrip(), f"http_{response.status_code}")
        request_id = response.headers.get("x-request-id")
    kind = _TYPES.get(response.status_code, LongtailError)
    return kind(
        problem.message,
        status=response.status_code,
        type=problem.type,
        field=problem.field,
        request_id=request_id,
    )


def unreadable(response: httpx.Response, cause: ValidationError) -> LongtailError:
    """The error for a success that is not what the route answers; names the first key that differs."""
    first = cause.errors(include_url=False, include_context=False)[0]
    found = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return LongtailError(
        f"expected the answer of {place(response.request)}, received other content: {found}",
        status=response.status_code,
        type="unexpected_answer",
        request_id=response.headers.get("x-request-id"),
    )


def unanswered(request: httpx.Request, cause: httpx.RequestError) -> NoAnswerError:
    """The error for a request that got no answer."""
    timeout = isinstance(cause, httpx.TimeoutException)
    return NoAnswerError(
        f"expected an answer from {place(request)}, received none: {type(cause).__name__}: {cause}".rstrip(": "),
        type="timeout" if timeout else "connection",
    )


def place(request: httpx.Request) -> str:
    """Method, host and path."""
    url = request.url
    port = "" if url.port is None else f":{url.port}"
    return f"{request.method} {url.scheme}://{url.host}{port}{url.path}"
