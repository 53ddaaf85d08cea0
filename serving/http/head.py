"""A request's headers by name, looked through once for all that ask; and the path that it asked for."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope


def read_head(scope: Scope) -> dict[bytes, bytes]:
    """Headers by name in lower case, as they came; of several by one name, the first. Kept for `head_of`."""
    head = dict(reversed(scope["headers"]))
    state: dict[str, Any] = scope.setdefault("state", {})
    state["head"] = head
    return head


def head_of(scope: Scope) -> dict[bytes, bytes]:
    """The headers that the request middleware has read."""
    head: dict[bytes, bytes] = scope["state"]["head"]
    return head


def asked_path(scope: Scope) -> str:
    """The path as the client has it, which of a further model has its name in it."""
    path: str = scope.get("longtail.path", scope["path"])
    return path
