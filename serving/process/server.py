"""One server process: the socket, uvicorn on it, and a shutdown that drops no request."""

from __future__ import annotations

import logging
import resource
import signal
import socket
from contextlib import suppress
from threading import Timer
from types import FrameType

import uvicorn
from threadpoolctl import threadpool_limits

from longtail.serving.core.service import Service
from longtail.serving.errors import AddressTakenError
from longtail.serving.http.app import create_app
from longtail.serving.process.protocol import HttpConnection
from longtail.serving.settings import Settings

_BACKLOG = 2048


class Server(uvicorn.Server):
    """Stops in steps on SIGTERM: /readyz says 503, requests are still taken for a while, then those under way end.

    SIGINT (Ctrl-C) or a second signal skips the while, a third one the rest.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal. uvicorn's own handler raises it again at the end: the process would not exit with 0."""
        first = not self._service.draining
        self._service.drain()
        if first and sig == signal.SIGTERM:
            timer = Timer(self._service.settings.drain_seconds, self._leave)
            timer.daemon = True
            timer.start()
        elif self.should_exit:
            self.force_exit = True
        else:
            self._leave()

    def _leave(self) -> None:
        self.should_exit = True


def listen(settings: Settings) -> socket.socket:
    """The socket of the settings' address; workers share it.

    Raises:
        AddressTakenError: another process listens there, or it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise AddressTakenError(
            f"expected a free address, found {settings.host} port {settings.port}: {error.strerror}"
        ) from None
    listener.listen(_BACKLOG)
    listener.set_inheritable(True)
    logging.getLogger(__name__).info("listening on http://%s:%d", settings.host, listener.getsockname()[1])
    return listener


def run(settings: Settings, listener: socket.socket, *, worker: int = 0) -> None:
    """Serve until a signal comes.

    Args:
        settings: settings of the service.
        listener: from `listen`.
        worker: this process' number, from 0, among those that share the settings.

    Raises:
        StateError, TracingError: as `create_app`.
    """
    # NumPy's pool of threads, for the whole process; FAISS and ONNX Runtime are told where they search.
    threadpool_limits(1)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Every idle client holds a file. macOS names a limit that it does not take.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    app = create_app(settings, worker=worker)
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    Server(config, app.state.service).run(sockets=[listener])
