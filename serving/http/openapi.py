"""Create the OpenAPI document of the routes, and the page /docs."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from longtail import __version__
from longtail.serving.http.responses import PROBLEM
from longtail.serving.http.routes import routes

_TITLE = "Longtail"
_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Requests may set "
    "`bias_removal`, the dial between the tail (0) and plain recall (1) if training's noise is "
    "near the label frequencies, and `popularity`, the weight of a prior for frequent labels. "
    "`cooccurrence` weighs labels chosen together with a query's last labels, if the release "
    "has them. A lock means that services with keys require one; a service on loopback may have "
    "none."
)
_PHRASES = {"413": "Request Entity Too Large", "422": "Unprocessable Entity"}
"""Phrases of statuses that Python 3.13 renamed, so that the document is the same with every version of Python."""
_ASSETS = "/docs/assets"
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


@cache
def openapi_document() -> dict[str, Any]:
    """Create the OpenAPI document of the routes."""
    schema = get_openapi(
        title=_TITLE, version=__version__, description=_DESCRIPTION, routes=routes, separate_input_output_schemas=False
    )
    for operation in (operation for path in schema["paths"].values() for operation in path.values()):
        responses = operation["responses"]
        for status, answer in list(responses.items()):
            answer["description"] = _PHRASES.get(status, answer["description"])
            content = answer.get("content", {})
            if "HTTPValidationError" in str(content):  # FastAPI's own, for routes with a parameter
                del responses[status]
            elif int(status) >= HTTPStatus.BAD_REQUEST and content:
                answer["content"] = {PROBLEM: content["application/json"]}
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    schema["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    # One of the two, or none: a service on loopback may have no keys.
    schema["security"] = [{"bearer": []}, {"key": []}, {}]
    return schema


def documentation() -> list[BaseRoute]:
    """Create the routes of /openapi.json and /docs."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{_TITLE}: documentation",
        swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{_ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{_ASSETS}/favicon.png",
    )
    # The policy allows Swagger's inline script by its hash.
    scripts = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
        for script in _INLINE.findall(bytes(page.body))
    ]
    policy = (
        f"default-src 'none'; script-src 'self' {' '.join(scripts)}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    async def document(_: Request) -> Response:
        return JSONResponse(openapi_document())

    async def docs(_: Request) -> Response:
        return HTMLResponse(page.body, headers={"Content-Security-Policy": policy})

    return [
        Route("/openapi.json", document),
        Route("/docs", docs),
        Mount(_ASSETS, StaticFiles(packages=[("fastapi_offline", "static")])),
    ]
