"""What surrounds every request: its id, headers, count and duration, and a plain answer when something breaks."""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.serving.core.service import Service
from longtail.serving.http.compression import pack
from longtail.serving.http.head import asked_path, read_head
from longtail.serving.http.ids import new_id
from longtail.serving.http.responses import internal_error
from longtail.serving.logs import Trace, current
from longtail.serving.logs import model as logged_model
from longtail.serving.monitoring.prometheus import UNKNOWN_ROUTE

logger = logging.getLogger(__name__)
audit = logging.getLogger("longtail.serving.audit")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_CLIENT_CLOSED_REQUEST = 499
_POLICY = b"content-security-policy"
HEADERS = [
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
"""Of every answer."""
_STRICT = [*HEADERS, (_POLICY, b"default-src 'none'; frame-ancestors 'none'")]
"""Of an answer that says nothing about its content."""


class RequestMiddleware:
    """The outermost ASGI middleware of the service.

    Takes X-Request-ID if it is sane (1 to 128 letters, digits, `.`, `_`, `:` or `-`), else makes one, and
    sends it back. As gateways may give several requests one id, every request has an `answer_id` of the service's own
    as well; without X-Request-ID the two are one. An exception that nothing else answered is logged in full and
    answered with a 500 that shows none of it. Every answer forbids caching, framing and sniffing, and all content
    unless it is a page with a policy of its own, and is compressed for clients that accept it. HEAD is answered as GET,
    without the body.

    Args:
        app: what answers.
        service: its monitoring counts every request; its settings say whether to log every one, not only those that
            fail.
        model: the name of the service's model, for the log, where the process serves several.
    """

    def __init__(self, app: ASGIApp, service: Service, model: str | None = None) -> None:
        self._app = app
        self._service = service
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            Exception: whatever broke after the answer had begun, for the server to close the connection.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = read_head(scope)
        asked, trace = head.get(b"x-request-id", b""), head.get(b"traceparent")
        own, method = new_id(), scope["method"]
        if method == "HEAD":
            # The server leaves out the body: its own scope still says HEAD.
            scope = {**scope, "method": "GET"}
        id_ = asked.decode() if _SANE_ID.fullmatch(asked) else own
        scope["state"].update(request_id=id_, answer_id=own)
        current.set((id_, Trace.parse(trace.decode("latin-1")) if trace else None))
        if self._model is not None:
            logged_model.set(self._model)
        started = perf_counter()
        status: int | None = None
        start: Message | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status, start
            if message["type"] == "http.response.start":
                own_headers = message.get("headers", ())
                others = HEADERS if _POLICY in dict(own_headers) else _STRICT
                message["headers"] = [*own_headers, *others, (b"x-request-id", id_.encode())]
                # Until its body has come, which may be compressed.
                start = message
                return
            try:
                if start is not None:
                    began, start = start, None
                    await pack(began, message, head.get(b"accept-encoding"), self._service)
                    status = began["status"]
                    await send(began)
                await send(message)
            except RuntimeError as error:
                # uvloop's, when a client that had sent more requests in the meantime has hung up.
                if "the handler is closed" not in str(error):
                    raise
                raise ClientDisconnect from None

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = status or _CLIENT_CLOSED_REQUEST
        # The last stop before the server: whatever it is, the client gets an answer and the log the cause.
        except Exception:
            logger.exception("request %s: %s %r failed", id_, method, asked_path(scope))
            if status is not None:
                raise
            await internal_error(id_)(scope, receive, send_with_headers)
        finally:
            self._ended(method, scope, status or HTTPStatus.INTERNAL_SERVER_ERROR, perf_counter() - started)

    def _ended(self, method: str, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
        preview = scope["state"].get("preview", False)
        self._service.monitoring.count_request(route, status, seconds, preview=preview)
        logged, audited = self._service.settings.access_log, scope["state"].get("audited")
        if not (logged or audited):
            return
        client, _ = scope.get("client") or (None, None)
        fields = {"status": status, "milliseconds": round(seconds * 1e3, 3), "client": client}
        if logged:
            logger.info("%s %s", method, route, extra={"fields": fields})
        if audited:
            audit.info("%s %s", method, route, extra={"fields": fields | audited})
