"""Map errors to HTTP responses."""

from __future__ import annotations

from http import HTTPStatus
from math import ceil

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from longtail.bundle.errors import describe
from longtail.serving.errors import (
    BodyTooLargeError,
    ContentTypeError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    MalformedBodyError,
    NoLabelTowerError,
    NoQueriesError,
    NotReadyError,
    QueueFullError,
    RefusedReleaseError,
    ServingError,
    SlowBodyError,
    StorageError,
    TimedOutError,
    UnauthenticatedError,
    UnknownLabelError,
    UnknownReleaseError,
)

_ERRORS: dict[type[ServingError], tuple[HTTPStatus, str, dict[str, str]]] = {
    MalformedBodyError: (HTTPStatus.BAD_REQUEST, "malformed_body", {}),
    UnauthenticatedError: (HTTPStatus.UNAUTHORIZED, "unauthenticated", {"WWW-Authenticate": "Bearer"}),
    ForbiddenError: (HTTPStatus.FORBIDDEN, "forbidden", {}),
    UnknownLabelError: (HTTPStatus.NOT_FOUND, "unknown_label", {}),
    UnknownReleaseError: (HTTPStatus.NOT_FOUND, "unknown_release", {}),
    NoQueriesError: (HTTPStatus.NOT_FOUND, "no_queries", {}),
    SlowBodyError: (HTTPStatus.REQUEST_TIMEOUT, "slow_body", {"Connection": "close"}),
    RefusedReleaseError: (HTTPStatus.CONFLICT, "release_refused", {}),
    BodyTooLargeError: (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", {}),
    ContentTypeError: (HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_content_type", {}),
    InvalidRequestError: (HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", {}),
    NoLabelTowerError: (HTTPStatus.UNPROCESSABLE_ENTITY, "no_label_tower", {}),
    QueueFullError: (HTTPStatus.TOO_MANY_REQUESTS, "queue_full", {"Retry-After": "1"}),
    TimedOutError: (HTTPStatus.SERVICE_UNAVAILABLE, "timeout", {"Retry-After": "1"}),
    EngineError: (HTTPStatus.SERVICE_UNAVAILABLE, "engine", {}),
    StorageError: (HTTPStatus.SERVICE_UNAVAILABLE, "storage", {"Retry-After": "10"}),
    NotReadyError: (HTTPStatus.SERVICE_UNAVAILABLE, "not_ready", {"Retry-After": "1"}),
}
_LONGEST_WAIT = 3600
"""Largest Retry-After, in seconds."""
PROBLEM = "application/problem+json"
"""Media type of errors [RFC 9457]."""


def error_response(id_: str, status: int, kind: str, message: str, field: str | None = None) -> Response:
    """Create the response of an error: RFC 9457's members, `error` and the request's id."""
    error = {"type": kind, "message": message} | ({} if field is None else {"field": field})
    problem = {
        "type": f"urn:longtail:{kind}", "title": HTTPStatus(status).phrase, "status": int(status), "detail": message,
        "error": error, "request_id": id_,
    }  # fmt: skip
    return Response(orjson.dumps(problem), status, media_type=PROBLEM)


def serving_error(id_: str, error: ServingError) -> Response:
    """Create the response to a service error; raises the error if clients may not see it."""
    # An error for the operator becomes a 500 without its text.
    if type(error) not in _ERRORS:
        raise error
    status, kind, headers = _ERRORS[type(error)]
    if isinstance(error, EngineError):
        headers = {"Retry-After": str(min(_LONGEST_WAIT, max(1, ceil(error.seconds))))}
    response = error_response(id_, status, kind, error.message, error.field)
    response.headers.update(headers)
    return response


async def answer_serving_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed with a service error."""
    assert isinstance(error, ServingError)
    return serving_error(request.state.request_id, error)


async def answer_routing_error(request: Request, error: Exception) -> Response:
    """Answer a request that no route matches."""
    assert isinstance(error, HTTPException)
    path, headers, status = describe(request.scope["path"]), dict(error.headers or {}), HTTPStatus(error.status_code)
    kind, message = status.name.lower(), status.description or status.phrase
    if status == HTTPStatus.NOT_FOUND:
        kind, message = "unknown_route", f"expected one of the routes that /docs lists, received {path}"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        # The middleware answers HEAD like GET, which Starlette does not know.
        headers["Allow"] = headers["Allow"].replace("GET", "GET, HEAD")
        kind, message = "wrong_method", f"expected {headers['Allow']} for {path}, received {request.method}"
    response = error_response(request.state.request_id, status, kind, message)
    response.headers.update(headers)
    return response
