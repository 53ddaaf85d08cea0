"""Say how to install an extra. Imports nothing that an extra brings."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def pip_install(extra: str) -> str:
    """Return the command that installs an extra from where Longtail came from."""
    return f"pip install '{_source()}[{extra}]'"


def _source() -> str:
    """Return what pip installs Longtail from: a clone or a wheel on this machine, or an index."""
    try:
        record = distribution("longtail").read_text("direct_url.json")
    except PackageNotFoundError:  # a checkout that is only on Python's path
        return "."
    url = urlsplit(json.loads(record or "{}").get("url", ""))
    return unquote(url.path) if url.scheme == "file" else "longtail"
