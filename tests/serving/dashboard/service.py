"""A tiny HTTP server in place of the service: the real page under its real policy, canned answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from longtail.serving.dashboard import csp, page
from tests.serving.dashboard import canned

Answer = tuple[int, dict[str, Any]]


def refusal(status: int, kind: str, message: str) -> Answer:
    """An error in the service's shape."""
    return status, {"error": {"type": kind, "message": message}, "request_id": "r-error"}


class Service:
    """Answers by path; a test replaces what it wants answered otherwise; `lost` hangs up.

    `requests` is what came in: path, body, authorization.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.lost = False
        self.monitoring: Callable[[], Answer] = lambda: (200, canned.monitoring())
        self.release: Callable[[], Answer] = lambda: (200, canned.release())
        self.ready: Callable[[], Answer] = lambda: (200, {"status": "ready"})
        self.staged: Callable[[], Answer] = lambda: refusal(404, "unknown_release", "expected a staged release")
        self.retrieve: Callable[[dict[str, Any]], Answer] = lambda body: (200, canned.retrieved(body))
        self.requests: list[tuple[str, Any, str | None]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._serve(None)

            def do_POST(self) -> None:
                self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _serve(self, body: Any) -> None:
                if service.lost:
                    self.close_connection = True
                    return None
                if self.path.endswith("/dashboard"):
                    return self._send(200, page(), "text/html; charset=utf-8")
                authorization = self.headers["Authorization"]
                service.requests.append((self.path, body, authorization))
                status, answer = service.answer(self.path, body, authorization)
                return self._send(status, json.dumps(answer).encode(), "application/json")

            def _send(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Security-Policy", csp())
                with suppress(ConnectionError):  # the tab was closed meanwhile
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/dashboard"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer(self, path: str, body: Any, authorization: str | None) -> Answer:
        """What the service says to one request."""
        if path == "/readyz":
            return self.ready()
        if self.key is not None and authorization != f"Bearer {self.key}":
            return refusal(401, "unauthorized", "expected an API key")
        if path == "/v1/retrieve":
            return self.retrieve(body)
        routes = {
            "/v1/monitoring": self.monitoring,
            "/v1/release": self.release,
            "/v1/release/staged": self.staged,
        }
        return routes[path]() if path in routes else refusal(404, "unknown_route", path)

    def asked(self, path: str) -> list[Any]:
        """The bodies that came to a path."""
        return [body for wanted, body, _ in list(self.requests) if wanted == path]

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
