"""A real S3 server (moto's) on loopback, in a thread of the tests, whose answers can be torn, garbled or errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from werkzeug.serving import BaseWSGIServer, make_server

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "longtail"

Fault = Callable[[str, str], str | None]
"""Of a method and a path: what goes wrong, as one of `S3Server.FAULTS`, or None."""


class S3Server:
    """Started at once, stopped and started again over the same objects.

    Attributes:
        fault: decides what goes wrong from now on; None: nothing.
        seen: method and path of every request.
    """

    FAULTS = ("fail", "lose", "tear", "garble", "hang", "overwrite", "terse")

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app  # where a server is wanted alone

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = self._started(0)
        self.port = self._server.port
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str]] = []
        self._going_on = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it."""
        return {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def url(self) -> str:
        """Of a folder that nothing else has."""
        return f"s3://{BUCKET}/{uuid4().hex}"

    def stop(self) -> None:
        """Refuse every connection from now on."""
        self._going_on.set()
        self._server.shutdown()
        self._server.server_close()

    def start(self) -> None:
        self._server = self._started(self.port)

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """While this lasts; what hangs ends with it."""
        self._going_on.clear()
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None
            self._going_on.set()

    def _started(self, port: int) -> BaseWSGIServer:
        server = make_server("127.0.0.1", port, self._answer, threaded=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        fault = None if self.fault is None else self.fault(method, path)
        if fault == "fail":
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if fault == "hang":
            self._going_on.wait()
        if fault == "overwrite":
            environ.pop("HTTP_IF_NONE_MATCH", None)
            environ.pop("HTTP_IF_MATCH", None)
        if fault == "lose":  # it is done, and nobody is told
            b"".join(self._moto(environ, lambda *_: None))
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer = b"".join(self._moto(environ, start))
        if fault == "terse":  # servers other than AWS do not say which condition does not hold
            return [re.sub(rb"<Condition>.*</Condition>", lambda match: b" " * len(match[0]), answer)]
        if fault == "tear":
            # The head says how long it is; the connection ends before.
            return [answer[: len(answer) // 2]]
        return [bytes(byte ^ 1 for byte in answer)] if fault == "garble" else [answer]
