"""Read requests: declare bodies and errors of routes, read bodies within limits, and parse query strings."""

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
from starlette.types import Receive, Scope, Send

from longtail.bundle.errors import describe
from longtail.bundle.validation import did_you_mean, keys_at
from longtail.serving.core.queries import ELSEWHERE, MAX_IDS, Query, RequestModel, features_json
from longtail.serving.errors import (
    BodyTooLargeError,
    ContentTypeError,
    InvalidRequestError,
    MalformedBodyError,
    SlowBodyError,
)
from longtail.serving.http.responses import service_of
from longtail.serving.http.schemas.operations import ErrorAnswer
from longtail.serving.settings import Settings

LONGEST_ID = 512
"""Most characters of a label id that the release does not know."""
REFERENCE = "#/components/schemas/{model}"
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
        """Raise InvalidRequestError, which names the field, if the body exceeds a configured limit."""


BodyT = TypeVar("BodyT", bound=Body)
Model = TypeVar("Model", bound=BaseModel)


class RequestRoute(APIRoute):
    """A route whose endpoint takes the Request and returns the Response: FastAPI only documents it."""

    def __init__(self, path: str, endpoint: Callable[[Request], Coroutine[Any, Any, Response]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # A label's id may contain line breaks, where Starlette's `path` would end and name another label.
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)

        self.app = app


def json_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """Create the part of a route's OpenAPI entry that describes a JSON body."""
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """Create the part of a route's OpenAPI entry that describes its query string."""
    parameters = [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
    return {"parameters": parameters}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Create the part of a route's OpenAPI entry that describes its errors."""
    return {status: {"model": ErrorAnswer} for status in statuses}


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """Read the request's JSON body as `model`, within the service's limits.

    Raises:
        ContentTypeError, BodyTooLargeError, SlowBodyError, MalformedBodyError: the body cannot be read.
        InvalidRequestError: `model` or its limits refuse the body; the error names the first wrong field.
    """
    settings, headers = service_of(request).settings, request.headers
    content_type = headers.get("content-type", "none")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ContentTypeError(f"expected Content-Type application/json, received {content_type[:_LONGEST_NAME]}")
    if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
        raise ContentTypeError(f"expected a body without Content-Encoding, received {encoding[:_LONGEST_NAME]}")
    limit, announced = settings.max_body_bytes, headers.get("content-length", "")
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


def read_parameters(request: Request, model: type[Model]) -> Model:
    """Read the request's query string as `model`; raises InvalidRequestError."""
    given = request.query_params.multi_items()
    ((name, count),) = Counter(name for name, _ in given).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidRequestError(f"expected every parameter once, received one {count} times", field=name[:100])
    try:
        return model.model_validate_json(orjson.dumps(dict(given)))
    except ValidationError as error:
        raise _refusal(error, model) from None


def at_most(count: int, limit: int, what: str, field: str) -> None:
    """Raise InvalidRequestError if there are more than `limit` entries."""
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)


def check_lengths(features_B: Iterable[Mapping[str, JsonValue] | None], field: str) -> None:
    """Raise InvalidRequestError if a list or object among the features of a query is too long.

    Args:
        field: of the features of a query, with `{}` for its position.
    """
    for position, features in enumerate(features_B):
        for name, value in (features or {}).items():
            if isinstance(value, list | dict) and len(value) > MAX_IDS:
                at_most(len(value), MAX_IDS, "entries", f"{field.format(position)}.{name[:_LONGEST_NAME]}")


def check_recorded(features: dict[str, JsonValue] | None, settings: Settings, field: str) -> None:
    """Raise InvalidRequestError if features to be recorded on disk are too long."""
    length = 0 if features is None or not settings.record_features else len(features_json(features))
    if length > settings.max_features_bytes:
        raise InvalidRequestError(
            f"expected features of at most {settings.max_features_bytes} bytes as JSON, as they are recorded "
            f"(LONGTAIL_RECORD_FEATURES), received {length}",
            field=field,
        )


def _refusal(error: ValidationError, model: type[BaseModel]) -> MalformedBodyError | InvalidRequestError:
    """Translate the first of pydantic's errors into a message with expected and received."""
    if (count := error.error_count()) > _MOST_ERRORS:
        return InvalidRequestError(f"expected an object of known keys, received one of {count} that are not")
    first = error.errors(include_url=False)[0]
    kind, context, said = first["type"], first.get("ctx", {}), str(first["msg"])
    if kind == "json_invalid":
        return MalformedBodyError(f"expected a JSON object in UTF-8, received a body that is not: {context['error']}")
    path = [str(part)[:_LONGEST_NAME] for part in first["loc"]]
    if kind == "missing":
        message = f"expected a value for {path[-1]}, received none; /docs has examples"
    elif kind == "extra_forbidden":
        known = keys_at(first["loc"], model)
        hint = did_you_mean(path[-1], known, ELSEWHERE) or did_you_mean(path[-1].lower(), known)
        if not hint and "features" in known and path[-1].lower() not in Query.model_fields:
            hint = f': features go into "features", did you mean {{"features": {{{describe(path[-1])}: …}}}}?'
        message = f"expected one of the keys {known}, received {describe(path[-1])}{hint}"
    elif kind == "too_short":
        kind_name = "an object" if isinstance(first["input"], dict) else "a list"
        message = f"expected {kind_name} of at least {context['min_length']}, received an empty one"
    elif kind == "too_long":
        message = f"expected at most {context['max_length']} of them, received {context['actual_length'] or 'more'}"
    elif kind == "list_type":
        value = first["input"]
        example = f", such as [{describe(value)}]" if isinstance(value, str | int | float) else ""
        message = f"expected a list{example}, received {describe(value)}"
    elif said.startswith("expected "):  # a message of our own validators, which is complete
        message = said
    else:
        expected = said.removeprefix("Input should be ").removeprefix("String should have ")
        message = f"expected {expected}, received {describe(first['input'])}"
    return InvalidRequestError(message, field=".".join(path) or None)
