"""Reads request bodies: bounded while they arrive, then validated in one pass from their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from longtail.bundle.errors import describe
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.http.head import head_of
from longtail.serving.settings import Settings

Model = TypeVar("Model", bound=BaseModel)
_LONGEST_NAME = 100
_JSON = b"application/json"
_IN_FULL = {"id_or_ids", "features_or_vector", "queries_or_labels", "request_or_features", "display_alone"}
"""Errors of the models' own, which say expected and received themselves."""


class MalformedBodyError(ServingError):
    """The request body is not JSON in UTF-8."""


class SlowBodyError(ServingError):
    """The request body did not arrive in time."""


class ContentTypeError(ServingError):
    """The request says that its body is something other than JSON."""


class BodyTooLargeError(ServingError):
    """The request body is longer than the service reads."""


async def read_body(scope: Scope, receive: Receive, model: type[Model], settings: Settings) -> Model:
    """The request's JSON body as `model`.

    Args:
        scope: of the request, as the request middleware hands it on.
        receive: gives its body, which is read here, chunk by chunk, and never beyond the limit.
        model: what the body must be.
        settings: how long a body may be, and how long it may take.

    Raises:
        ContentTypeError: a Content-Type other than application/json.
        BodyTooLargeError: more bytes than the limit, announced or sent.
        SlowBodyError: it is not all there in time.
        MalformedBodyError: not JSON in UTF-8.
        InvalidRequestError: JSON that `model` refuses; names the first field that is wrong.
    """
    head = head_of(scope)
    content_type = head.get(b"content-type", b"none")
    if content_type != _JSON and content_type.split(b";")[0].strip().lower() != _JSON:
        raise ContentTypeError(
            f"expected Content-Type application/json, received {content_type[:_LONGEST_NAME].decode('latin-1')}"
        )
    limit = settings.max_body_bytes
    announced = head.get(b"content-length", b"")
    if announced.isdigit() and int(announced[:18]) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received one of {announced[:18].decode()}")
    message = await receive()
    body = message.get("body", b"")
    if message.get("more_body", False):
        body = await _read_rest(receive, bytearray(body), settings)
    elif message["type"] == "http.disconnect":
        raise ClientDisconnect
    _refuse_beyond(limit, body)
    return parse(body, model)


async def _read_rest(receive: Receive, body: bytearray, settings: Settings) -> bytes:
    """A body that comes in several parts, whole."""
    try:
        async with asyncio.timeout(settings.request_seconds):
            more = True
            while more:
                _refuse_beyond(settings.max_body_bytes, body)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise SlowBodyError(
            f"expected the whole body within {settings.request_seconds:g} s, received {len(body)} bytes of it"
        ) from None
    return bytes(body)


def _refuse_beyond(limit: int, body: bytes | bytearray) -> None:
    if len(body) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")


def parse(body: bytes, model: type[Model]) -> Model:
    """Validate JSON bytes; raises MalformedBodyError and InvalidRequestError as `read_body`."""
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
