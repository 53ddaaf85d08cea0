"""Reads query strings, with the errors of bodies."""

from __future__ import annotations

from collections import Counter

import orjson
from starlette.requests import Request

from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.body import Model, parse


def read_parameters(request: Request, model: type[Model]) -> Model:
    """The parameters of a request's query string as `model`, whose numbers must not be strict.

    Raises:
        InvalidRequestError: one that `model` refuses, or that comes twice.
    """
    given = request.query_params.multi_items()
    ((name, count),) = Counter(name for name, _ in given).most_common(1) or [("", 0)]
    if count > 1:
        raise InvalidRequestError(f"expected every parameter once, received one {count} times", field=name[:100])
    return parse(orjson.dumps(dict(given)), model)
