"""The one middleware: a request's id, key, headers, count and duration, and a plain 500 when something breaks."""

from __future__ import annotations

import logging
import os
import re
from http import HTTPStatus
from random import Random
from time import perf_counter

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longtail.serving.core.service import Service
from longtail.serving.http.auth import Keys
from longtail.serving.http.requests import RequestRoute
from longtail.serving.http.responses import error_response, serving_error
from longtail.serving.http.tracing import Tracing
from longtail.serving.logs import current
from longtail.serving.monitoring.prometheus import UNKNOWN_ROUTE

logger = logging.getLogger(__name__)
audit = logging.getLogger("longtail.serving.audit")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_CLOSED_REQUEST, _TOO_LARGE = 499, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
_MOST_HEADERS = 100
_INTERNAL = "the request could not be answered; the server's log has the details under this request id"
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
"""Headers of every answer."""
_NO_CONTENT = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
"""The content policy of an answer that sets none of its own."""
_SEED_BYTES = 64
_COMPRESSED_FROM_BYTES = 1024
_COMPRESSION_LEVEL = 1
"""gzip's fastest: JSON of labels shrinks to a quarter already, and level 9 takes six times as long."""

_random = Random(os.urandom(_SEED_BYTES))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(_SEED_BYTES)))


def new_id() -> str:
    """Return 128 random bits as 32 hex digits: a unique name, not a secret.

    Drawn without a call of the system, after which this thread would wait for a search to hand back the interpreter.
    """
    return f"{_random.getrandbits(128):032x}"


class RequestMiddleware:
    """Surrounds every request, and lets only those pass whose key may.

    Takes X-Request-ID if it is sane (1 to 128 letters, digits, `.`, `_`, `:` or `-`), otherwise makes one, and
    sends it back. Refuses a request without a Host, with two, or of more
    than 100 headers. As gateways may give several requests one id, every request has a `name` of the service's own. An
    exception that nothing else answered is logged in full and answered with a 500 that shows none of it. Every answer
    forbids caching, framing and sniffing, and all content unless it is a page with a policy of its own. While the
    service drains, every answer closes its connection. Answers are compressed for clients that accept gzip. HEAD is
    answered as GET, without the body.

    Args:
        service: its monitoring counts every request; its settings say whether to log every one, not only failures.
        tracing: makes a span of every request; None makes none.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Keys, tracing: Tracing | None = None) -> None:
        self._app = app
        self._compressing = GZipMiddleware(app, _COMPRESSED_FROM_BYTES, _COMPRESSION_LEVEL)
        self._service = service
        self._keys = keys
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            Exception: the request broke after its answer had begun; the server closes the connection.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, method = perf_counter(), 0, scope["method"]
        headers = dict([*scope["headers"]][::-1])  # of two by one name the first counts
        own, sent_id = new_id(), headers.get(b"x-request-id", b"").decode("latin-1")
        id_ = sent_id if _SANE_ID.fullmatch(sent_id) else own
        state = {**scope.get("state", {}), "request_id": id_, "name": own}
        # The server leaves out the body of HEAD: its own scope still says so.
        scope = {**scope, "method": "GET" if method == "HEAD" else method, "state": state}
        current.set(id_)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = message["headers"] = [*message.get("headers", ()), *_HEADERS, (b"x-request-id", id_.encode())]
                if _NO_CONTENT[0] not in dict(sent):
                    sent.append(_NO_CONTENT)
                if self._service.draining:
                    sent.append((b"connection", b"close"))
            await send(message)

        try:
            app = self._compressing if b"gzip" in headers.get(b"accept-encoding", b"") else self._app
            hosts = [name for name, _ in scope["headers"]].count(b"host")
            if len(scope["headers"]) > _MOST_HEADERS:
                message, refused = f"expected at most {_MOST_HEADERS} headers, received more", _TOO_LARGE
                app = error_response(id_, refused, "headers_too_large", message)
            elif hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
                message = f"expected one Host, received {hosts or 'none'}"
                app = error_response(id_, HTTPStatus.BAD_REQUEST, "malformed_request", message)
            elif (error := self._keys.refusal(scope, headers)) is not None:
                app = serving_error(id_, error)
            await app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = status or _CLIENT_CLOSED_REQUEST
        # The last stop before the server: the client gets an answer, and the log the cause.
        except Exception:
            logger.exception("request %s: %s %r failed", id_, method, scope["path"])
            if status:
                raise
            failed = error_response(id_, HTTPStatus.INTERNAL_SERVER_ERROR, "internal", _INTERNAL)
            await failed(scope, receive, send_with_headers)
        finally:
            status, seconds = status or HTTPStatus.INTERNAL_SERVER_ERROR, perf_counter() - started
            found = scope.get("route")
            route = found.path if isinstance(found, RequestRoute) else UNKNOWN_ROUTE
            self._service.monitoring.count_request(route, status, seconds, preview=state.get("preview", False))
            if self._tracing is not None:
                self._tracing.record(method, route, status, seconds, headers, id_)
            logged, audited = self._service.settings.access_log, state.get("audited")
            if logged or audited:
                client = (scope.get("client") or (None,))[0]
                fields = {"status": status, "milliseconds": round(seconds * 1e3, 3), "client": client}
                if logged:
                    logger.info("%s %s", method, route, extra={"fields": fields})
                if audited:
                    audit.info("%s %s", method, route, extra={"fields": fields | audited})
