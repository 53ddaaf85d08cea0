"""Wrap every request: ids, keys, headers, counts, unexpected errors."""

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
from longtail.serving.http.bridge import ServiceRoute
from longtail.serving.http.responses import error_response, serving_error
from longtail.serving.http.tracing import Tracing
from longtail.serving.logs import current
from longtail.serving.monitoring.outcomes import REFUSED_ROUTE, UNKNOWN_ROUTE

logger = logging.getLogger(__name__)
audit = logging.getLogger("longtail.serving.audit")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_CLOSED_REQUEST, _TOO_LARGE = 499, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
MOST_HEADERS = 100
_INTERNAL = "the request could not be answered; the server's log has the details under this request id"
HEADERS = [
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
"""Headers of every answer."""
NO_CONTENT = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
"""The content policy of an answer that sets none of its own."""
_SEED_BYTES = 64
_COMPRESSED_FROM_BYTES = 1024
_COMPRESSION_LEVEL = 1
"""gzip's fastest level: JSON of labels shrinks to a quarter already, and level 9 takes six times as long."""
_GZIP = re.compile(rb"gzip(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
"""Coding that a client accepts; a weight of 0 refuses it."""

_random = Random(os.urandom(_SEED_BYTES))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(_SEED_BYTES)))


random_bits = _random.getrandbits
"""Function that returns random bits of a unique name, which is no secret.

The bits come from a generator in this process: a system call would release the interpreter lock, and this thread would
then have to wait for a search to release it.
"""


class RequestMiddleware:
    """Wraps every request, and refuses requests without a valid key.

    A valid X-Request-ID (1 to 128 letters, digits, `.`, `_`, `:` or `-`) is returned with the answer; other requests
    get a new id. As gateways may reuse ids, every request also has a unique internal `name`. Requests without a Host,
    with two, with another Transfer-Encoding than chunked, or with more than 100 headers are refused. An unhandled
    exception is logged in full, and the client gets a 500 without details. Every answer forbids caching, framing and
    sniffing, and all content unless it is a page with its own policy. While the service drains, every answer closes its
    connection, and so do some of a worker that holds more connections than its share. Answers are compressed for
    clients that accept gzip. HEAD is answered like GET, without the body.

    Args:
        service: its monitoring counts every request; its settings decide whether all requests are logged, or failures
            alone.
        tracing: creates a span of every request; None: no spans.
    """

    def __init__(self, app: ASGIApp, service: Service, keys: Keys, tracing: Tracing | None = None) -> None:
        self._app = app
        # Apart, so that requests without gzip do not pass through it.
        self._compressing = GZipMiddleware(app, _COMPRESSED_FROM_BYTES, _COMPRESSION_LEVEL)
        self._service = service
        self._keys = keys
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request.

        Raises:
            Exception: the request failed after its answer had begun; the server closes the connection.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, method, unrouted = perf_counter(), 0, scope["method"], UNKNOWN_ROUTE
        headers = dict([*scope["headers"]][::-1])  # reversed, so that the first of equal names counts
        name, sent_id = f"{random_bits(128):032x}", headers.get(b"x-request-id", b"").decode("latin-1")
        id_ = sent_id if _SANE_ID.fullmatch(sent_id) else name
        state = {**scope.get("state", {}), "request_id": id_, "name": name}
        # The server has its own scope, which still says HEAD, and drops the body.
        scope = {**scope, "method": "GET" if method == "HEAD" else method, "state": state}
        current.set(id_)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = message["headers"] = [*message.get("headers", ()), *HEADERS, (b"x-request-id", id_.encode())]
                if NO_CONTENT[0] not in dict(sent):
                    sent.append(NO_CONTENT)
                service = self._service
                if (service.draining or service.surplus_connections) and service.closes_connection():
                    sent.append((b"connection", b"close"))
            await send(message)

        try:
            app = self._compressing if _GZIP.search(headers.get(b"accept-encoding", b"")) else self._app
            hosts = [name for name, _ in scope["headers"]].count(b"host")
            if len(scope["headers"]) > MOST_HEADERS:
                message, refused = f"expected at most {MOST_HEADERS} headers, received more", _TOO_LARGE
                app = error_response(id_, refused, "headers_too_large", message)
            # A proxy may read such requests differently, which lets one request hide another (smuggling).
            elif hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
                message = f"expected one Host, received {hosts or 'none'}"
                app = error_response(id_, HTTPStatus.BAD_REQUEST, "malformed_request", message)
            elif headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
                message = "expected no Transfer-Encoding but chunked, received another one"
                app = error_response(id_, HTTPStatus.BAD_REQUEST, "malformed_request", message)
            elif (error := self._keys.refusal(scope, headers)) is not None:
                app, unrouted = serving_error(id_, error), REFUSED_ROUTE
            await app(scope, receive, send_with_headers)
        except ClientDisconnect:
            # No client gets this status: it tells those who hung up from errors in the figures.
            status = status or _CLIENT_CLOSED_REQUEST
        # The last place to handle an error: the client gets an answer, and the log gets the cause.
        except Exception:
            logger.exception("request %s: %s %r failed", id_, method, scope["path"])
            # The answer has begun, so the server can only close the connection.
            if status:
                raise
            failed = error_response(id_, HTTPStatus.INTERNAL_SERVER_ERROR, "internal", _INTERNAL)
            await failed(scope, receive, send_with_headers)
        finally:
            status, seconds = status or HTTPStatus.INTERNAL_SERVER_ERROR, perf_counter() - started
            matched = scope.get("route")
            route = matched.path if isinstance(matched, ServiceRoute) else unrouted
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
