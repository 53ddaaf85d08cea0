"""Serve the pages at / and /dashboard.

The latter is one file that reads /v1/monitoring, /v1/release(/staged) and /v1/retrieve.

`index.html` is the shell; `style.css` and the scripts, in the order of `SCRIPTS`, are inserted, so that the page needs
no further request for itself and works under a policy that forbids all other content.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

__all__ = ["csp", "home", "home_csp", "page"]

SCRIPTS = (
    "format", "dom", "series", "chart", "time", "verdict", "shares", "recall", "asked", "dial", "operations", "query",
    "staged", "app",
)  # fmt: skip


@cache
def page() -> bytes:
    """Assemble the operator's page, which holds no data."""
    return Template(_read("index.html")).substitute(style=_style(), script=_script()).encode()


@cache
def csp() -> str:
    """Create the page's Content-Security-Policy.

    It allows the page's own style and script by their hashes, and requests to its own origin, nothing else. It requires
    trusted types and allows no policy for them, so a script that parsed text as HTML would throw.
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


@cache
def home() -> bytes:
    """Assemble the page at /, which holds no data."""
    return Template(_read("home.html")).substitute(style=_read("home.css")).encode()


@cache
def home_csp() -> str:
    """Create the Content-Security-Policy of the page at /."""
    style = _source(_read("home.css"))
    return f"default-src 'none'; style-src {style}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style() -> str:
    return _read("style.css")


def _script() -> str:
    return "".join(_read(f"{name}.js") for name in SCRIPTS)


def _read(name: str) -> str:
    return (files("longtail.serving.dashboard") / name).read_text(encoding="utf-8")
