"""Start of commands, and installation of extras. Imports no package of an extra."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


@contextmanager
def importing() -> Iterator[None]:
    """Exclude a command's modules from garbage collection, a third of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
