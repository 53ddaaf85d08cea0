"""Documents request bodies, which the routes read from bytes themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from longtail.serving.http.schemas import ErrorAnswer, FeedbackRequest, LabelsRequest, RetrieveRequest, SimilarRequest

_REFERENCE = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's OpenAPI entry that says: the body is this model, as JSON."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of a route's OpenAPI entry that says: these statuses have the one shape of an error."""
    return {status: {"model": ErrorAnswer} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the routes with the schemas of their bodies; made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in (RetrieveRequest, SimilarRequest, LabelsRequest, FeedbackRequest)],
            ref_template=_REFERENCE,
        )
        schema["components"]["schemas"].update(bodies["$defs"])
        _drop_unused_validation_errors(schema)
        schema["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        # Any of them, or none: a service on loopback may have no keys.
        schema["security"] = [{"bearer": []}, {"key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema


def _drop_unused_validation_errors(schema: dict[str, Any]) -> None:
    """FastAPI documents its own 422 for every route with a parameter; no route here answers it."""
    theirs = {"$ref": _REFERENCE.format(model="HTTPValidationError")}
    for operations in schema["paths"].values():
        for operation in operations.values():
            answer = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
            if answer.get("schema") == theirs:
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
