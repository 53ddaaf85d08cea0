"""Connect FastAPI's routes with the service: read bodies within limits, and encode answers.

FastAPI documents the routes from the types of their functions. Its own handler takes 44 µs of CPU for a request, so
the routes replace it as their ASGI application: with FastAPI's hook `get_route_handler` alone a request would still
pass two stacks of contexts, 10 µs. FastAPI's would also read a body of any size before it checks the first byte.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel, JsonValue, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.bundle.errors import describe
from longtail.bundle.validation import did_you_mean, model_keys
from longtail.serving.core.queries import ELSEWHERE, MAX_IDS, RequestModel, RetrieveQuery
from longtail.serving.errors import (
    BodyTooLargeError,
    ContentTypeError,
    InvalidRequestError,
    MalformedBodyError,
    SlowBodyError,
)
from longtail.serving.http.schemas.operations import ErrorAnswer
from longtail.serving.settings import Settings

LONGEST_ID = 512
"""Most characters of a label id that the release does not know."""
BODY_ERRORS = (400, 401, 408, 413, 415, 422, 429, 503)
"""Statuses of errors that every route with a body may answer."""
_LONGEST_NAME = 100
_MOST_VALUES = 1 << 17
"""Most values and keys of a body: 512 in each of 256 queries."""
_MOST_BRACKETS = 1 << 14
"""Most lists and objects of a body, which take ten times as long as other values: 64 in each of 256 queries."""
_MOST_ERRORS = 1000
"""Most errors of a body that are examined; a list stops at its first error, so further ones are unknown keys."""


class Body(RequestModel):
    """Base of request bodies."""

    def check_limits(self, settings: Settings) -> None:
        """Raise InvalidRequestError beyond a configured limit."""


BodyT = TypeVar("BodyT", bound=Body)
Parameters = TypeVar("Parameters", bound=BaseModel)


class ServiceRoute(APIRoute):
    """A FastAPI route that reads its request by itself.

    The function returns a Response, or the fields of a JSON answer, which gets the request's id. Dependencies of the
    route are called with the Request before its body is read.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # A label's id may contain line breaks, where Starlette's `path` would end and name another label.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)
        summary, _, description = self.description.partition("\n")
        self.summary, self.description = summary.removesuffix("."), description.strip()
        self.app = self._create_app()

    def _create_app(self) -> ASGIApp:
        """Create the application that answers a request."""
        endpoint: Callable[..., Coroutine[Any, Any, Any]] = self.endpoint
        checks = [dependency.dependency for dependency in self.dependencies if dependency.dependency is not None]
        body, query = self.body_field, next(iter(self.dependant.query_params), None)
        body_model: Any = body and body.field_info.annotation
        query_model: Any = query and query.field_info.annotation

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            # Before the body is read, so that a client without the right costs nothing.
            for check in checks:
                check(request)
            arguments = dict(request.path_params)
            if body is not None:
                arguments[body.name] = await _read_body(request, body_model)
            elif query is not None:
                arguments[query.name] = _read_parameters(request, query_model)
            response = await endpoint(request, **arguments)
            if not isinstance(response, Response):
                content = {**response, "request_id": scope["state"]["request_id"]}
                encoded = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
                response = Response(encoded, media_type="application/json")
            await response(scope, receive, send)

        return answer


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe a route's errors for OpenAPI."""
    return {status: {"model": ErrorAnswer} for status in sorted(statuses)}


async def _read_body(request: Request, model: type[BodyT]) -> BodyT:
    """Read the request's JSON body as `model`, within the service's limits.

    Raises:
        ContentTypeError, BodyTooLargeError, SlowBodyError, MalformedBodyError: the body cannot be read.
        InvalidRequestError: `model` or its limits refuse the body; the error names the first wrong field.
    """
    settings, headers = request.app.state.service.settings, request.headers
    content_type = headers.get("content-type", "none")
    # Only JSON: a page of another host can send other types without asking first (CORS).
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ContentTypeError(f"expected Content-Type application/json, received {content_type[:_LONGEST_NAME]}")
    if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
        raise ContentTypeError(f"expected a body without Content-Encoding, received {encoding[:_LONGEST_NAME]}")
    limit, announced = settings.max_body_bytes, headers.get("content-length", "")
    # 18 digits exceed any limit, and a longer number takes quadratic time to parse.
    if announced.isdigit() and int(announced[:18]) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")
    message = await request.receive()
    body = message.get("body", b"")
    if message.get("more_body", False):
        body = bytearray(body)  # appending to bytes would copy the whole body for every part
        try:
            async with asyncio.timeout(settings.request_seconds):
                while message.get("more_body", False) and len(body) <= limit:
                    message = await request.receive()
                    body += message.get("body", b"")
        except TimeoutError:
            raise SlowBodyError(
                f"expected the whole body within {settings.request_seconds:g} s, received {len(body)} bytes of it"
            ) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    if len(body) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")
    # Parsing blocks the loop in proportion to the number of values; every value follows one of these characters.
    if len(body) > _MOST_VALUES and sum(map(body.count, (b",", b":", b"[", b"{"))) > _MOST_VALUES:
        raise BodyTooLargeError(f"expected a body of at most {_MOST_VALUES} commas, colons, [ and {{, received more")
    if len(body) > _MOST_BRACKETS and body.count(b"[") + body.count(b"{") > _MOST_BRACKETS:
        raise BodyTooLargeError(f"expected a body of at most {_MOST_BRACKETS} [ and {{, received more")
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, model) from None
    parsed.check_limits(settings)
    return parsed


def _read_parameters(request: Request, model: type[Parameters]) -> Parameters:
    """Read the request's query string as `model`; raises InvalidRequestError."""
    parameters = request.query_params.multi_items()
    ((name, count),) = Counter(name for name, _ in parameters).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidRequestError(f"expected every parameter once, received one {count} times", field=name[:100])
    try:
        return model.model_validate_json(orjson.dumps(dict(parameters)))
    except ValidationError as error:
        raise _refusal(error, model) from None


def at_most(count: int, limit: int, what: str, field: str) -> None:
    """Raise InvalidRequestError if there are more than `limit` entries."""
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)


def check_lengths(features_B: Iterable[Mapping[str, JsonValue] | None], field: str) -> None:
    """Raise InvalidRequestError for a too long list among features.

    Args:
        field: of the features of a query, with `{}` for its position.
    """
    for position, features in enumerate(features_B):
        for name, value in (features or {}).items():
            if isinstance(value, list | dict) and len(value) > MAX_IDS:
                at_most(len(value), MAX_IDS, "entries", f"{field.format(position)}.{name[:_LONGEST_NAME]}")


def _propose_wrapper(location: tuple[str | int, ...], body: object, model: type[BaseModel]) -> str:
    """Return the end of an error message if an object has the keys of an entry of its missing list; else nothing."""
    entry_keys = model_keys((*location, 0, ""), model)
    sent = [key for key in body if key in entry_keys] if isinstance(body, dict) else []
    entry = ", ".join(f"{describe(key)}: …" for key in sent)
    return f": did you mean {{{describe(location[-1])}: [{{{entry}}}]}}?" if sent else ""


def _refusal(error: ValidationError, model: type[BaseModel]) -> MalformedBodyError | InvalidRequestError:
    """Translate the first error of pydantic."""
    if (count := error.error_count()) > _MOST_ERRORS:
        return InvalidRequestError(f"expected an object of known keys, received one of {count} that are not")
    first = error.errors(include_url=False)[0]
    kind, context, reason = first["type"], first.get("ctx", {}), str(first["msg"])
    if kind == "json_invalid":
        return MalformedBodyError(f"expected a JSON object in UTF-8, received a body that is not: {context['error']}")
    path = [str(part)[:_LONGEST_NAME] for part in first["loc"]]
    if kind == "missing":
        hint = _propose_wrapper(first["loc"], first["input"], model) or "; /docs has examples"
        message = f"expected a value for {path[-1]}, received none{hint}"
    elif kind == "extra_forbidden":
        keys = model_keys(first["loc"], model)
        hint = did_you_mean(path[-1], keys, ELSEWHERE) or did_you_mean(path[-1].lower(), keys)
        if not hint and "features" in keys and path[-1].lower() not in RetrieveQuery.model_fields:
            hint = f': features go into "features", did you mean {{"features": {{{describe(path[-1])}: …}}}}?'
        message = f"expected one of the keys {keys}, received {describe(path[-1])}{hint}"
    elif kind == "too_short":
        kind_name = "an object" if isinstance(first["input"], dict) else "a list"
        message = f"expected {kind_name} of at least {context['min_length']}, received an empty one"
    elif kind == "too_long":
        message = f"expected at most {context['max_length']} of them, received {context['actual_length'] or 'more'}"
    elif kind == "list_type":
        value = first["input"]
        example = f", such as [{describe(value)}]" if isinstance(value, str | int | float) else ""
        message = f"expected a list{example}, received {describe(value)}"
    elif reason.startswith("expected "):  # a message of our own validators, which is complete
        message = reason
    else:
        expected = reason.removeprefix("Input should be ").removeprefix("String should have ")
        message = f"expected {expected}, received {describe(first['input'])}"
    return InvalidRequestError(message, field=".".join(path) or None)
