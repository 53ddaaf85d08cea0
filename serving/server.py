"""One uvicorn process that leaves without dropping a request."""

from __future__ import annotations

import signal
from threading import Timer
from types import FrameType

import uvicorn

from serving.app import create_app
from serving.service import Service
from serving.settings import Settings


class Server(uvicorn.Server):
    """Stops in steps on SIGTERM: /readyz says 503, requests are still taken for a while, then those under way end.

    SIGINT (Ctrl-C) or a second signal skips the while, a third one the rest.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stand in for uvicorn's own handler, which raises the signal again at the end: no exit with 0."""
        first = not self._service.draining
        self._service.draining = True
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


def run(settings: Settings) -> None:
    """Serve until a signal comes."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    Server(config, app.state.service).run()
