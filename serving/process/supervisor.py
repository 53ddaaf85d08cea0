"""Run the service as one process or restarted workers."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from longtail.serving import logs
from longtail.serving.errors import StateError
from longtail.serving.monitoring.workers import Workers, WorkerState
from longtail.serving.process.server import BACKLOG, Terminal, run, take_hangups
from longtail.serving.refresh import refreshing
from longtail.serving.settings import Settings
from longtail.state import Postgres, StoreError, read_label_changes

logger = logging.getLogger(__name__)

_SHORT_LIFE_SECONDS = 10.0
_SHORT_LIVES = 5
"""Consecutive early deaths of workers after which the service gives up, if no worker is healthy."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Shortest and longest pause before a worker is restarted; an early death doubles the pause."""
_LOOK_SECONDS = 0.1


def serve(settings: Settings) -> None:
    """Serve until a signal comes.

    Raises StateError, which tells the operator what to change.
    """
    listener = _listen(settings)
    with _exclusive(settings.state_directory):
        _refuse_empty_database(settings)
        with refreshing(settings):
            if settings.workers == 1:
                run(settings, listener)
            else:
                sys.exit(Supervisor(settings, listener).run())


class Supervisor:
    """The parent process of the workers, which answers no requests.

    A worker that ends is restarted, after growing pauses if workers die early. The service ends when workers keep dying
    early and none is healthy; a healthy worker serves a release, or has lived for `_SHORT_LIFE_SECONDS`. At the stop
    the parent closes its copy of the listener.
    """

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings, self._listener = settings, listener
        # Not `fork`, which copies locks of threads that do not exist in the child.
        self._spawn = get_context("spawn")
        self._board = Workers(settings.workers, self._spawn.RawArray("q", Workers.count_cells(settings.workers)))
        for worker in range(settings.workers):
            self._board.start(worker, again=False)
        self._alive: dict[int, BaseProcess] = {}
        self._started: dict[int, float] = {}
        self._due = dict.fromkeys(range(settings.workers), 0.0)
        """Times on the monotonic clock for starting workers that do not run."""
        self._short_lives = 0
        self._stopping = self._failed = False
        self._signals: list[int] = []
        self._terminal = Terminal()
        # Workers hold the other end of this pipe, and notice when this process is gone, even by SIGKILL.
        self._ours, self._theirs = self._spawn.Pipe()

    def run(self) -> int:
        """Run until a signal or repeated deaths; returns the exit status."""
        # The handlers only set flags, so a signal is acted upon between two starts of workers, never during one.
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, lambda sig, _: self._signals.append(sig))
        take_hangups(lambda sig, _: self._signals.append(sig))
        # If the first worker's start launched the tracker, SIGINT would be unblocked for that worker.
        resource_tracker.ensure_running()
        while self._alive or self._due:
            while self._signals:
                self._handle(self._signals.pop(0))
            for worker in [worker for worker, at in self._due.items() if at <= time.monotonic()]:
                del self._due[worker]
                self._start(worker)
            connection.wait([process.sentinel for process in self._alive.values()], timeout=_LOOK_SECONDS)
            for worker, process in list(self._alive.items()):
                if not process.is_alive():
                    self._worker_ended(worker, process)
        return int(self._failed)

    def _handle(self, sig: int) -> None:
        if sig != signal.SIGHUP or self._terminal.closed:
            self._stop(signal.SIGTERM if sig == signal.SIGHUP else sig)
        elif not self._stopping:
            self._send_signal(sig)

    def _start(self, worker: int) -> None:
        self._board.start(worker, again=worker in self._started)
        process = self._spawn.Process(
            target=_run_worker,
            args=(self._settings, self._listener, worker, self._board, self._theirs),
        )
        # Blocked until the worker can handle them: during its imports they would end it with a traceback.
        held_back = {signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)
        self._alive[worker], self._started[worker] = process, time.monotonic()

    def _worker_ended(self, worker: int, process: BaseProcess) -> None:
        del self._alive[worker]
        self._board.set_state(worker, WorkerState.down)
        if self._stopping:
            return
        young = time.monotonic() - self._started[worker] < _SHORT_LIFE_SECONDS
        self._short_lives = self._short_lives + 1 if young else 0
        healthy = sum(map(self._healthy, self._alive))
        ended = f"worker {worker} (process {process.pid}) ended with {_describe_exit(process.exitcode)}"
        if self._short_lives >= _SHORT_LIVES and not healthy:
            logger.error("%s; %d workers in a row died young: stopping the service", ended, self._short_lives)
            self._failed = True
            self._stop(signal.SIGTERM)
            return
        # The exponent is bounded, because a float overflows after 1,024 doublings.
        pause = min(_PAUSE_SECONDS * 2.0 ** min(max(0, self._short_lives - 1), 30), _LONGEST_PAUSE_SECONDS)
        self._due[worker] = time.monotonic() + pause
        logger.error(
            "%s; another is started in %.1f s, %d of %d workers are healthy",
            ended, pause, healthy, self._settings.workers,
        )  # fmt: skip

    def _healthy(self, worker: int) -> bool:
        aged = time.monotonic() - self._started[worker] >= _SHORT_LIFE_SECONDS
        return aged or self._board.state(worker) is WorkerState.ready

    def _stop(self, sig: int) -> None:
        self._stopping = True
        self._due.clear()
        # While any process holds the listener open, the system accepts connections that no worker will answer.
        self._listener.close()
        self._send_signal(sig)

    def _send_signal(self, sig: int) -> None:
        for process in self._alive.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, sig)


def _run_worker(settings: Settings, listener: socket.socket, worker: int, board: Workers, parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Ctrl-C reaches the whole foreground group; in its own group the worker gets the signal from the parent alone.
    os.setpgid(0, 0)
    logs.configure(settings.log_level)
    Thread(target=_stop_with_parent, args=(parent,), daemon=True).start()
    run(settings, listener, worker=worker, workers=board)


def _stop_with_parent(parent: Connection) -> None:
    """Stop like on SIGTERM when the parent is gone."""
    with suppress(EOFError):
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(settings: Settings) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    # A restart must not wait for connections of the service before to time out.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        other_port = settings.port + 1 if settings.port < 65_535 else 8000
        raise StateError(
            f"expected a free address, found {settings.host} port {settings.port}: {error.strerror}"
            f"{f'; choose another port, for example --port {other_port}' if in_use else ''}"
        ) from None
    listener.listen(BACKLOG)
    listener.set_inheritable(True)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    logger.info("listening on %s", url, extra={"fields": {"dashboard": f"{url}/dashboard", "docs": f"{url}/docs"}})
    return listener


@contextmanager
def _exclusive(state: Path) -> Iterator[None]:
    """Lock a state directory against other services."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "service.lock").open("w")
    except OSError as error:
        raise StateError(f"state directory {state}: expected one to write to (--state), found: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateError(
                f"state directory {state}: expected one that no other service uses (--state), found one in use"
            ) from None
        yield


def _refuse_empty_database(settings: Settings) -> None:
    """Refuse an empty database while the directory has label changes."""
    if not isinstance(settings.state_location, Postgres):
        return
    directory = settings.state_directory
    with suppress(FileNotFoundError):
        file_changes = len(read_label_changes(directory).records())
        with suppress(StoreError):  # an unreachable database may answer later, so it does not prevent the start
            try:
                stored_changes = len(read_label_changes(settings.state_location).records())
            except FileNotFoundError:
                stored_changes = 0
            if file_changes and not stored_changes:
                raise StateError(
                    f"state {settings.state_location}: expected label changes, found none, and "
                    f"{file_changes} in {directory}: copy them with "
                    f"longtail-serve copy-labels {directory}, or move {directory}/labels.sqlite away"
                )


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return str(exit_code)
    if -exit_code == signal.SIGBUS:
        return "SIGBUS: a file that it serves was cut off, or its disk failed; `longtail-index verify` says which"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
