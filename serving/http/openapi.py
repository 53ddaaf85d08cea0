"""The OpenAPI document, request bodies included, which the routes read from bytes themselves; and its page, /docs."""

from __future__ import annotations

import base64
import copy
import hashlib
import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from longtail.serving.core.retriever import Retriever
from longtail.serving.http.responses import PROBLEM
from longtail.serving.http.schemas.labels import LabelIdsRequest, LabelsRequest
from longtail.serving.http.schemas.monitoring import FeedbackRequest
from longtail.serving.http.schemas.operations import ErrorAnswer
from longtail.serving.http.schemas.retrieval import EmbedRequest, RetrieveRequest, SimilarRequest

_REFERENCE = "#/components/schemas/{model}"
_PHRASES = {"413": "Request Entity Too Large", "422": "Unprocessable Entity"}
"""Of the statuses that Python 3.13 calls otherwise: the document is the same whatever runs the service."""
_EXAMPLE_K = 10
_BODIES = (RetrieveRequest, SimilarRequest, EmbedRequest, LabelsRequest, LabelIdsRequest, FeedbackRequest)
_ASSETS = "/docs/assets"
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def json_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """The part of a route's OpenAPI entry that says: the body is this model, as JSON, for example so."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's OpenAPI entry that says: these may stand in the query string."""
    parameters = [
        {"name": name, "in": "query", "required": False, "description": schema.pop("description", ""), "schema": schema}
        for name, schema in model.model_json_schema()["properties"].items()
    ]
    return {"parameters": parameters}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of a route's OpenAPI entry that says: these statuses have the one shape of an error."""
    return {status: {"model": ErrorAnswer} for status in statuses}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the routes with the schemas of their bodies; made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in _BODIES],
            ref_template=_REFERENCE,
        )
        schema["components"]["schemas"].update(bodies["$defs"])
        _drop_unused_validation_errors(schema)
        _keep_phrases(schema)
        _errors_are_problems(schema)
        schema["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        # Any of them, or none: a service on loopback may have no keys.
        schema["security"] = [{"bearer": []}, {"key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema


def _with_examples(document: dict[str, Any], retriever: Retriever) -> dict[str, Any]:
    """The document with examples that a release answers, of its own features and labels."""
    label, features = retriever.catalogue.answered_id(), retriever.release_json()["example"]
    k = min(_EXAMPLE_K, len(retriever.catalogue))
    bodies = {
        "/v1/retrieve": {"queries": [{"features": features, "k": k}]},
        "/v1/similar": {"id": label, "k": k},
        "/v1/embed": {"queries": [{"features": features}]},
        "/v1/labels": {"labels": [{"id": label}]},
        "/v1/labels/delete": {"ids": [label]},
        "/v1/labels/restore": {"ids": [label]},
        "/v1/feedback": {"events": [{"features": features, "labels": [label]}]},
    }
    paths = copy.deepcopy(document["paths"])
    for path, operations in paths.items():
        for operation in operations.values():
            if path in bodies and "requestBody" in operation:
                operation["requestBody"]["content"]["application/json"]["example"] = bodies[path]
            for parameter in operation.get("parameters", ()):
                if path.startswith("/v1/labels/") and parameter["name"] == "id":
                    parameter["example"] = label
    return {**document, "paths": paths}


def install_documentation(app: FastAPI) -> None:
    """Serve /openapi.json, with examples of the release's own, and /docs, which loads nothing from elsewhere."""
    app.mount(_ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]), name="docs-assets")
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{app.title}: documentation",
        swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{_ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{_ASSETS}/favicon.png",
    )
    scripts = [f"'sha256-{_sha256(script)}'" for script in _INLINE.findall(bytes(page.body))]
    policy = (
        f"default-src 'none'; script-src 'self' {' '.join(scripts)}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def document(request: Request) -> Response:
        static, retriever = openapi_document(app), app.state.service.served
        # The names of the release's features and labels are only for clients with a key.
        shown = retriever is not None and request.state.may_ask
        return JSONResponse(_with_examples(static, retriever) if shown else static)

    app.add_route("/openapi.json", document, include_in_schema=False)

    async def docs(_: Request) -> Response:
        return HTMLResponse(page.body, headers={"Content-Security-Policy": policy})

    app.add_route("/docs", docs, include_in_schema=False)


def _keep_phrases(schema: dict[str, Any]) -> None:
    for operations in schema["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                answer["description"] = _PHRASES.get(status, answer["description"])


def _errors_are_problems(schema: dict[str, Any]) -> None:
    for operations in schema["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= HTTPStatus.BAD_REQUEST and "content" in answer:
                    answer["content"] = {PROBLEM: answer["content"]["application/json"]}


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


def _sha256(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
