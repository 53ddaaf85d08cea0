"""The operator's page at /dashboard: one self-contained file that reads /v1/monitoring, /v1/release,
/v1/release/staged and /v1/retrieve.

`index.html` is the shell; `style.css` and the scripts, in the order of `SCRIPTS`, go into it, so that the page
needs no second request and works under a policy that allows nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

__all__ = ["csp", "page"]

SCRIPTS = (
    "format", "dom", "series", "chart", "time", "verdict", "shares", "recall", "asked", "dial", "operations", "query",
    "staged", "app",
)  # fmt: skip


@cache
def page() -> bytes:
    """The page as UTF-8 HTML, put together once; it holds no data, so it may be served without a key."""
    return Template(_read("index.html")).substitute(style=_style(), script=_script()).encode()


@cache
def csp() -> str:
    """The page's Content-Security-Policy: its own style and script by hash, requests to its own origin, nothing else.

    Trusted types are on and no policy may make one, so a script that parsed text as HTML would throw.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_source(_style())}",
            f"script-src {_source(_script())}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style() -> str:
    return _read("style.css")


def _script() -> str:
    return "".join(_read(f"{name}.js") for name in SCRIPTS)


def _read(name: str) -> str:
    return (files("longtail.serving.dashboard") / name).read_text(encoding="utf-8")
