"""The page at /docs: Swagger UI from an installed package, so that it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

_ASSETS = "/docs/assets"
_INLINE = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def install_documentation(app: FastAPI) -> None:
    """Serve /docs and its assets."""
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

    async def docs(_: Request) -> Response:
        return HTMLResponse(page.body, headers={"Content-Security-Policy": policy})

    app.add_route("/docs", docs, include_in_schema=False)


def _sha256(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
