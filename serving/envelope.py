"""What surrounds every request: its id, its count and duration, and a plain answer when something breaks."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.edge import internal_error
from serving.monitoring import UNMATCHED, Monitor

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_CLOSED_REQUEST = 499


class Envelope:
    """ASGI middleware, outermost of ours.

    Takes X-Request-ID if it is sane (1 to 128 letters, digits, `.`, `_`, `:` or `-`), else makes one, and
    sends it back. An exception that nothing else answered is logged in full and answered with a 500 that
    shows none of it.
    """

    def __init__(self, app: ASGIApp, monitor: Monitor) -> None:
        self._app = app
        self._monitor = monitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        id_ = asked if _SANE_ID.fullmatch(asked) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = id_
        started = perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id_.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = status or _CLIENT_CLOSED_REQUEST
        # The last stop before the server: whatever it is, the client gets an answer and the log the cause.
        except Exception:
            logger.exception("request %s: %s %r failed", id_, scope["method"], scope["path"])
            if status is not None:
                raise
            await internal_error(id_)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", UNMATCHED)
            self._monitor.request(route, status or HTTPStatus.INTERNAL_SERVER_ERROR, perf_counter() - started)
