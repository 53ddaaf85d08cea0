"""Read request bodies, bounded while they arrive and validated once from their bytes, and query strings."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, get_args

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longtail.bundle.errors import describe
from longtail.serving.errors import (
    BodyTooLargeError,
    ContentTypeError,
    InvalidRequestError,
    MalformedBodyError,
    SlowBodyError,
)
from longtail.serving.http.limits import Body
from longtail.serving.http.responses import service_of
from longtail.serving.settings import Settings

BodyT = TypeVar("BodyT", bound=Body)
Model = TypeVar("Model", bound=BaseModel)
_LONGEST_NAME = 100
_IN_FULL = {"id_or_ids", "features_or_vector", "queries_or_labels", "request_or_features", "display_alone"}
"""Errors of the models' own, which say expected and received themselves."""


class RequestRoute(APIRoute):
    """A route whose endpoint takes the Request and returns the Response: FastAPI only documents it."""

    def __init__(self, path: str, endpoint: Callable[[Request], Coroutine[Any, Any, Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # A label's id may have line breaks: Starlette's `path` ends before one, and names another label.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)

        self.app = app


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """Read the request's JSON body as `model`, within the service's limits.

    Raises:
        ContentTypeError: a Content-Type other than application/json.
        BodyTooLargeError: more bytes than `max_body_bytes`, announced or sent.
        SlowBodyError: the body is not complete after `request_seconds`.
        MalformedBodyError: the body is not JSON in UTF-8.
        InvalidRequestError: `model` or its limits refuse the body; the error names the first wrong field.
    """
    settings, headers = service_of(request).settings, request.headers
    content_type = headers.get("content-type", "none")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ContentTypeError(f"expected Content-Type application/json, received {content_type[:_LONGEST_NAME]}")
    limit = settings.max_body_bytes
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced[:18]) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body = message.get("body", b"")
    if message.get("more_body", False):
        body = await _read_rest(request, body, settings)
    if len(body) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")
    parsed = parse(body, model)
    parsed.check_limits(settings)
    return parsed


async def _read_rest(request: Request, first: bytes, settings: Settings) -> bytes:
    """Read a body that comes in several parts, or the beginning of one that is too long."""
    body, more = bytearray(first), True
    try:
        async with asyncio.timeout(settings.request_seconds):
            while more and len(body) <= settings.max_body_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise SlowBodyError(
            f"expected the whole body within {settings.request_seconds:g} s, received {len(body)} bytes of it"
        ) from None
    return bytes(body)


def read_parameters(request: Request, model: type[Model]) -> Model:
    """Read the request's query string as `model`, whose numbers must not be strict.

    Raises:
        InvalidRequestError: `model` refuses a parameter, or one comes twice.
    """
    given = request.query_params.multi_items()
    ((name, count),) = Counter(name for name, _ in given).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidRequestError(f"expected every parameter once, received one {count} times", field=name[:100])
    return parse(orjson.dumps(dict(given)), model)


def parse(body: bytes, model: type[Model]) -> Model:
    """Validate JSON bytes.

    Raises:
        MalformedBodyError, InvalidRequestError: see `read_body`.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise MalformedBodyError(
            f"expected a JSON object in UTF-8, received a body that is not: {first['ctx']['error']}"
        )
    path = [str(part)[:_LONGEST_NAME] for part in first["loc"]]
    raise InvalidRequestError(_describe(first, path, model), field=".".join(path) or None)


def _describe(error: Any, path: list[str], model: type[BaseModel]) -> str:
    """One of pydantic's errors as expected and received."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return f"expected a value for {path[-1]}, received none"
    if kind == "extra_forbidden":
        known = list(_model_holding(error["loc"], model).model_fields)
        return f"expected one of the keys {known}, received {describe(path[-1])}"
    if kind == "too_short":
        return f"expected at least {context['min_length']} of them, received {context['actual_length']}"
    if kind in _IN_FULL:
        return str(error["msg"])
    expected = str(error["msg"]).removeprefix("Input should be ").removeprefix("String should have ")
    return f"expected {expected}, received {describe(error['input'])}"


def _model_holding(path: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    """The model of the object that the last part of a path is a key of."""
    for part in path[:-1]:
        annotation = model.model_fields[part].annotation if isinstance(part, str) else None
        model = next(_models_in(annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
