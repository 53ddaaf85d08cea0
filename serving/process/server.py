"""Run a server process that stops without dropping requests."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread, Timer
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from threadpoolctl import threadpool_limits

from longtail.serving.allocator import use_one_heap
from longtail.serving.http.app import create_app
from longtail.serving.monitoring.workers import Workers
from longtail.serving.process.protocol import BoundedHeadProtocol
from longtail.serving.settings import Settings

BACKLOG = 2048
"""Connections that the system completes before a process accepts them."""
_YOUNG_OBJECTS = 20_000
"""New objects between two runs of the garbage collector: with Python's default of 700 it would examine the running
requests, which leave no cycles, again and again."""

_TICKS_A_SECOND = 10
"""Calls of `on_tick` by uvicorn."""
_FIRST_REQUEST_SECONDS = 1.0
"""Time that a stop waits for the first request of new connections."""


class Server(uvicorn.Server):
    """Stops on SIGTERM without dropping a request.

    For `drain_seconds` /readyz returns 503, and requests are answered as before, each with `Connection: close`. Then
    the server accepts no more connections, waits for the first requests of new ones, and uvicorn stops: it closes idle
    connections and finishes running requests for up to `shutdown_seconds`. SIGINT or a second signal skips the
    draining, a third ends the process. SIGHUP reloads the key files; if it comes from a closed terminal, it acts like
    SIGTERM.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._app = app
        self._service = app.state.service
        self._terminal = Terminal()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle SIGTERM and SIGINT; the exit status is 0."""
        first = not self._service.draining
        self._service.drain()
        if first and sig == signal.SIGTERM:
            # A thread's timer, because a signal handler runs outside of the event loop.
            timer = Timer(self._service.settings.drain_seconds, self._leave)
            timer.daemon = True
            timer.start()
        elif self.should_exit:
            self.force_exit = True
        else:
            self._leave()

    async def on_tick(self, counter: int) -> bool:
        """Count connections; each second give up a surplus.

        After a worker's death the others hold its clients' connections, and its successor none.
        """
        slot = self._service.monitoring.slot
        slot.workers.set_connections(slot.worker, len(self.server_state.connections))
        if counter % _TICKS_A_SECOND == 0:
            self._service.surplus_connections = slot.workers.surplus(slot.worker)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; wait for new connections' first requests.

        uvicorn treats a connection whose request it has not read yet as idle, and resets it.
        """
        for server in self.servers:
            server.close()
        until = time.monotonic() + _FIRST_REQUEST_SECONDS
        await asyncio.sleep(0.01)
        while not self.force_exit and time.monotonic() < until and any(map(_is_new, self.server_state.connections)):
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle SIGHUP."""
        if self._terminal.closed:
            self.handle_exit(signal.SIGTERM, frame)
        else:
            # In a thread: the disk may be slow, and a handler must not hold up the loop.
            Thread(target=self._app.state.keys.read_again, daemon=True).start()

    def _leave(self) -> None:
        self.should_exit = True


def _is_new(connection: Any) -> bool:
    return connection.cycle is None


class Terminal:
    """The terminal of a process; closing it sends SIGHUP."""

    def __init__(self) -> None:
        self._was_one = os.isatty(0)

    @property
    def closed(self) -> bool:
        """Return whether the terminal is gone."""
        return self._was_one and not os.isatty(0)


_pending_hangups: list[int] = []


def hold_hangups() -> None:
    """Hold back SIGHUP until the service can handle it."""
    # Blocking the signal is not enough, because threads that NumPy has started do not block it.
    signal.signal(signal.SIGHUP, lambda sig, _: _pending_hangups.append(sig))


def take_hangups(handle: Callable[[int, FrameType | None], None]) -> None:
    """Install the handler of SIGHUP; handle a held one."""
    signal.signal(signal.SIGHUP, handle)
    # The supervisor starts workers with SIGHUP blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if _pending_hangups:
        handle(_pending_hangups.pop(), None)


def run(settings: Settings, listener: socket.socket, *, worker: int = 0, workers: Workers | None = None) -> None:
    """Serve on a shared socket until a signal comes."""
    # Reading a mapped file that was truncated ends the process with SIGBUS: this prints where.
    faulthandler.enable(all_threads=False)
    gc.set_threshold(_YOUNG_OBJECTS)
    use_one_heap()
    # NumPy's pool of threads, for the whole process; FAISS and ONNX Runtime are limited where they search.
    threadpool_limits(1)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Every idle client needs a file descriptor. macOS reports a hard limit that it does not accept.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    app = create_app(settings, worker=worker, workers=workers)
    config = uvicorn.Config(
        app,
        # uvicorn only calls it.
        http=partial(BoundedHeadProtocol, head_seconds=settings.request_seconds),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        # A client must not choose its own address, by which the queue is shared.
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    server = Server(config, app)
    take_hangups(server.handle_hangup)
    server.run(sockets=[listener])
