"""Serve one release in a thread, for notebooks and tests."""

from __future__ import annotations

import socket
import threading
import time
from tempfile import TemporaryDirectory

import uvicorn

from longtail.serving.core.retriever import Retriever
from longtail.serving.http.app import create_app
from longtail.serving.settings import Settings

_LOOK_SECONDS = 0.01


class BackgroundServer:
    """Serves one release in a thread; stopping deletes its state.

    Args:
        port: port to bind; 0 lets the system choose one.

    Attributes:
        url: where the service answers, such as `http://127.0.0.1:8000`.

    Raises:
        OSError: the address is not free.
        ValueError: the address is not loopback, and LONGTAIL_API_KEYS is not set.
    """

    def __init__(self, retriever: Retriever, host: str = "127.0.0.1", port: int = 0) -> None:
        self._state = TemporaryDirectory(prefix="longtail-")
        settings = Settings(releases=self._state.name, host=host, port=port)
        self._listener = socket.create_server((host, port))
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        app = create_app(settings, retriever=retriever)
        self._server = uvicorn.Server(uvicorn.Config(app, ws="none", access_log=False, log_config=None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()
        # A thread that has ended could not start the server.
        while not self._server.started and self._thread.is_alive():
            time.sleep(_LOOK_SECONDS)

    def stop(self) -> None:
        """Finish running requests and stop; a second call does nothing."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self._state.cleanup()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"BackgroundServer({self.url!r}, {'serving' if self._thread.is_alive() else 'stopped'})"
