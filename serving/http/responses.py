"""Where answers and errors become HTTP: the one mapping of errors to statuses, and the JSON of both."""

from __future__ import annotations

from http import HTTPStatus
from math import ceil
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from longtail.bundle.errors import describe
from longtail.serving.core.service import Service
from longtail.serving.errors import (
    BodyTooLargeError,
    ContentTypeError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    MalformedBodyError,
    NoLabelTowerError,
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
"""Seconds that a client is told to wait, at most."""
PROBLEM = "application/problem+json"
"""Media type of errors [RFC 9457]."""
_INTERNAL = "the request could not be answered; the server's log has the details under this request id"


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service


def request_id(request: Request) -> str:
    """The id that the request middleware gave this request."""
    id_: str = request.state.request_id
    return id_


def serving_error(id_: str, error: ServingError) -> Response:
    """The answer to an error of the service's own."""
    status, kind, headers = _ERRORS[type(error)]
    if isinstance(error, EngineError):
        headers = {"Retry-After": str(min(_LONGEST_WAIT, max(1, ceil(error.seconds))))}
    response = error_response(id_, status, kind, error.message, error.field)
    response.headers.update(headers)
    return response


def to_json(answer: dict[str, Any], id_: str) -> bytes:
    """An answer with its request's id, as JSON."""
    return orjson.dumps({**answer, "request_id": id_}, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: bytes, status: int = 200) -> Response:
    """A response of JSON bytes."""
    return Response(content, status, media_type="application/json")


def problem(id_: str, status: int, kind: str, message: str, field: str | None = None) -> bytes:
    """The one shape of every error: the members of RFC 9457, then `error` and the request's id, as JSON."""
    error = {"type": kind, "message": message}
    if field is not None:
        error["field"] = field
    members = {
        "type": f"urn:longtail:{kind}", "title": HTTPStatus(status).phrase, "status": int(status), "detail": message,
    }  # fmt: skip
    return to_json({**members, "error": error}, id_)


def error_response(id_: str, status: int, kind: str, message: str, field: str | None = None) -> Response:
    """An error as an answer."""
    return Response(problem(id_, status, kind, message, field), status, media_type=PROBLEM)


def internal_error(id_: str) -> Response:
    """A 500 that tells nothing but where to look."""
    return error_response(id_, HTTPStatus.INTERNAL_SERVER_ERROR, "internal", _INTERNAL)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error that a client caused in the one shape; any other is the request middleware's."""
    for error_type in _ERRORS:
        app.add_exception_handler(error_type, _serving_error)
    app.add_exception_handler(HTTPException, _routing_error)


async def _serving_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ServingError):
        raise error
    return serving_error(request_id(request), error)


async def _routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    path, headers = describe(request.scope["path"]), dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        response = error_response(
            request_id(request), 404, "unknown_route", f"expected one of the routes that /docs lists, received {path}"
        )
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = headers["Allow"].replace("GET", "GET, HEAD")
        response = error_response(
            request_id(request), 405, "wrong_method",
            f"expected {headers['Allow']} for {path}, received {request.method}",
        )  # fmt: skip
    else:
        status = HTTPStatus(error.status_code)
        response = error_response(request_id(request), status, status.name.lower(), status.description or status.phrase)
    response.headers.update(headers)
    return response
