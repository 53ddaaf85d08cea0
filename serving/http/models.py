"""Several models in one process: which of them a path asks, and the path that the application of that one knows it by.

Every model has an application of its own, with the routes of a service of one model. `/v1/models/NAME/retrieve` is
`/v1/retrieve` of NAME's, and `/v1/models/NAME/dashboard`, `/docs`, `/openapi.json` and `/readyz` are those pages of it.
There is no one prefix that the paths of a model have in common with those of its application, so none is told it as
`root_path`: its pages and its document name the paths in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from starlette.types import Scope

PREFIX = "/v1/models/"
MODEL, PATH = "longtail.model", "longtail.path"
"""Keys of a scope: the model that a path named, and the path."""
_PAGES = frozenset({"dashboard", "docs", "openapi.json", "readyz"})

App = TypeVar("App")


def base_of(name: str) -> str:
    """What the paths of a model begin with."""
    return f"{PREFIX}{name}"


def public_path(name: str, path: str) -> str:
    """What a path of a model's application is called from outside: `/v1/retrieve` is `/v1/models/NAME/retrieve`."""
    return base_of(name) + path.removeprefix("/v1")


def asked_model(path: str) -> str | None:
    """The name of a model that a path begins with, whether there is such a model or not."""
    return path.removeprefix(PREFIX).partition("/")[0] if path.startswith(PREFIX) else None


def find(scope: Scope, models: Mapping[str, App]) -> tuple[App, Scope] | None:
    """The application that a request's path names, and the request as it knows it; None if it names none that there is.

    Args:
        scope: of an HTTP request. One that was found a model already is found no other.
        models: by name.
    """
    root, path = scope.get("root_path", ""), scope["path"]
    if root and path.startswith(root):
        path = path[len(root) :]
    else:
        root = ""
    if not path.startswith(PREFIX) or MODEL in scope:
        return None
    name, slash, rest = path[len(PREFIX) :].partition("/")
    app = models.get(name)
    if app is None or not slash:
        return None
    inner = f"/{rest}" if rest.partition("/")[0] in _PAGES else f"/v1/{rest}"
    return app, {**scope, "path": root + inner, MODEL: name, PATH: scope["path"]}
