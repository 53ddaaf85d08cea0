"""One server process: the socket, uvicorn on it, and a stop that drops no request."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import math
import resource
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from threading import Lock, Thread, Timer
from types import FrameType

import uvicorn
from fastapi import FastAPI
from threadpoolctl import threadpool_limits

from longtail.serving.allocator import use_one_heap
from longtail.serving.http.app import apply_settings, create_app
from longtail.serving.monitoring.workers import Workers
from longtail.serving.process.listening import BACKLOG, stop_listening
from longtail.serving.process.protocol import HttpConnection, Keeping
from longtail.serving.process.reloading import Terminal, read_again, refuse, take_hangups
from longtail.serving.settings import Settings

_LOOK_SECONDS = 0.02
_YOUNG_OBJECTS = 20_000
"""Objects that the garbage collector lets come before it looks at them: at Python's own 700 it looks at the requests
under way, which leave no cycles behind, over and over."""


class Server(uvicorn.Server):
    """Stops on SIGTERM without dropping a request that has reached it.

    In steps:

    1. For `drain_seconds`, /readyz says 503 and requests are taken as before, on new connections too. From here on
       every answer says `Connection: close` and is the last of its connection.
    2. Nobody new is let in; those who have connected already are, and their requests are answered.
    3. A connection that is left has no request under way. It is kept for as long as ever, `keep_alive_seconds` from
       its last answer on: a client that never uses one which has been idle for longer loses nothing.
    4. What is under way after `shutdown_seconds`, counted from step 2, is cut off.

    SIGINT (Ctrl-C) or a second signal goes to step 2 and closes idle connections at once, a third ends everything.
    SIGHUP reads settings and keys again; from a terminal that was closed it is SIGTERM.

    Args:
        config: of uvicorn.
        app: what `config` serves.
        keeping: what the connections share.
        workers: says whether the other processes that share the socket stop as well; this is the only one if None.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, keeping: Keeping, workers: Workers | None = None) -> None:
        super().__init__(config)
        self._app = app
        self._service = app.state.service
        self._keeping = keeping
        self._workers = workers
        self._hurried = False
        self._terminal = Terminal()
        self._reloading = Lock()

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle SIGHUP."""
        if self._terminal.closed:
            self.handle_exit(signal.SIGTERM, frame)
        else:
            Thread(target=self._reload, daemon=True).start()

    def _reload(self) -> None:
        with self._reloading:
            settings = read_again(self._service.settings)
            if settings is None:
                return
            try:
                apply_settings(self._app, settings)
            except (ValueError, OSError) as error:
                refuse(error)
                return
            self._keeping.seconds = settings.keep_alive_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal. uvicorn's own handler raises it again at the end: the process would not exit with 0."""
        first = not self._service.draining
        for model in self._app.state.models.values():
            model.state.service.drain()
        self._keeping.last = True
        for connection in self._connections():
            connection.end_with_answer()
        if first and sig == signal.SIGTERM:
            timer = Timer(self._service.settings.drain_seconds, self._leave)
            timer.daemon = True
            timer.start()
        elif self._hurried:
            self.force_exit = True
        else:
            self._hurried = True
            self._leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Steps 2 to 4. An answer whose head was written before the first signal does not say that it is the last."""
        deadline = time.monotonic() + self._service.settings.shutdown_seconds
        alone = self._workers is None or self._workers.stopping
        for listener in (sockets or []) if alone else []:
            await stop_listening(listener, lambda: self.force_exit or time.monotonic() > deadline)
        for server in self.servers:
            server.close()
        while not (self._hurried or self.force_exit or time.monotonic() > deadline):
            if all(connection.answering for connection in self._connections()):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        self.config.timeout_graceful_shutdown = max(0, math.ceil(deadline - time.monotonic()))
        await super().shutdown(sockets)

    def _connections(self) -> list[HttpConnection]:
        return [each for each in list(self.server_state.connections) if isinstance(each, HttpConnection)]

    def _leave(self) -> None:
        self.should_exit = True


def run(settings: Settings, listener: socket.socket, *, worker: int = 0, workers: Workers | None = None) -> None:
    """Serve until a signal comes.

    Args:
        settings: settings of the service.
        listener: from `longtail.serving.process.listening.listen`.
        worker: this process' number, from 0, among those that share the settings.
        workers: what they know of each other; there is but this one if None.

    Raises:
        StateError, TracingError: as `create_app`.
    """
    # A file of a release that is cut off while it is mapped ends the process: not without a word.
    faulthandler.enable(all_threads=False)
    gc.set_threshold(_YOUNG_OBJECTS)
    use_one_heap()
    # NumPy's pool of threads, for the whole process; FAISS and ONNX Runtime are told where they search.
    threadpool_limits(1)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Every idle client holds a file. macOS names a limit that it does not take.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    app = create_app(settings, worker=worker, workers=workers)
    keeping = Keeping(settings.keep_alive_seconds)
    config = uvicorn.Config(
        app,
        http=partial(HttpConnection, keeping=keeping),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
    )
    server = Server(config, app, keeping, workers)
    take_hangups(server.handle_hangup)
    server.run(sockets=[listener])
