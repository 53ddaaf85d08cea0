"""Reads request bodies: bounded while they arrive, then validated in one pass from their bytes."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from serving.errors import BodyTooLargeError, ContentTypeError, InvalidRequestError, MalformedBodyError
from serving.schemas import Query
from serving.wording import received

Model = TypeVar("Model", bound=BaseModel)
_LONGEST_NAME = 100


async def read_body(request: Request, model: type[Model], *, limit: int) -> Model:
    """The request's JSON body as `model`.

    Args:
        request: its body is read here, chunk by chunk, and never beyond `limit`.
        model: what the body must be.
        limit: bytes.

    Raises:
        ContentTypeError: a Content-Type other than application/json.
        BodyTooLargeError: more than `limit` bytes, announced or sent.
        MalformedBodyError: not JSON in UTF-8.
        InvalidRequestError: JSON that `model` refuses; names the first field that is wrong.
    """
    content_type = request.headers.get("content-type", "none")
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ContentTypeError(f"expected Content-Type application/json, received {content_type[:_LONGEST_NAME]}")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) > limit:
        raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received one of {announced[:18]}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLargeError(f"expected a body of at most {limit} bytes, received more")
    return parse(bytes(body), model)


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
    raise InvalidRequestError(_message(first, path, model), field=".".join(path) or None)


def _message(error: Any, path: list[str], model: type[BaseModel]) -> str:
    """One of pydantic's errors as expected and received."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return f"expected a value for {path[-1]}, received none"
    if kind == "extra_forbidden":
        known = model if len(path) == 1 else Query
        return f"expected one of the keys {list(known.model_fields)}, received {received(path[-1])}"
    if kind == "too_short":
        return f"expected at least {context['min_length']} of them, received {context['actual_length']}"
    if kind == "id_or_ids":
        return str(error["msg"])
    expected = str(error["msg"]).removeprefix("Input should be ")
    return f"expected {expected}, received {received(error['input'])}"
