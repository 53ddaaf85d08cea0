"""Several worker processes on one port: started, watched, started again when they die, stopped together."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
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
from types import FrameType

from prometheus_client import multiprocess

from longtail.serving import logs
from longtail.serving.errors import StateError
from longtail.serving.monitoring.prometheus import MULTIPROCESS
from longtail.serving.process.server import run
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_SHORT_LIFE_SECONDS = 10.0
_SHORT_LIVES = 5
"""Workers in a row that may die young before the service gives up."""
_PAUSE_SECONDS = 0.5


class Supervisor:
    """The parent process of the workers, which answers no request itself.

    Args:
        settings: settings of the service; `workers` processes are started.
        listener: from `longtail.serving.process.server.listen`.
        log_level: log level of the workers.
    """

    def __init__(self, settings: Settings, listener: socket.socket, log_level: str) -> None:
        self._settings = settings
        self._listener = listener
        self._log_level = log_level
        self._spawn = get_context("spawn")
        self._alive: dict[int, BaseProcess] = {}
        self._started: dict[int, float] = {}
        self._short_lives = 0
        self._stopping = self._failed = False
        # Workers hold the other end: it closes when this process is gone, however it went.
        self._ours, self._theirs = self._spawn.Pipe()

    def run(self) -> int:
        """Run until a signal comes, or workers only die; returns the exit status."""
        figures = self._settings.state_directory / "prometheus"
        shutil.rmtree(figures, ignore_errors=True)
        figures.mkdir(parents=True)
        os.environ[MULTIPROCESS] = str(figures)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        # Started with the first worker it would let SIGINT through to that one.
        resource_tracker.ensure_running()
        for worker in range(self._settings.workers):
            self._start(worker)
        while self._alive:
            connection.wait([process.sentinel for process in self._alive.values()], timeout=1)
            for worker, process in list(self._alive.items()):
                if not process.is_alive():
                    self._worker_ended(worker, process)
        return int(self._failed)

    def _start(self, worker: int) -> None:
        process = self._spawn.Process(
            target=_run_worker, args=(self._settings, self._listener, worker, self._log_level, self._theirs)
        )
        # A worker amid its imports would show a Ctrl-C, or lose it: it comes to it when `_run_worker` has begun.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._alive[worker], self._started[worker] = process, time.monotonic()
        if self._stopping:
            process.terminate()

    def _worker_ended(self, worker: int, process: BaseProcess) -> None:
        del self._alive[worker]
        multiprocess.mark_process_dead(process.pid or 0, os.environ[MULTIPROCESS])  # type: ignore[no-untyped-call]
        if self._stopping:
            return
        short = time.monotonic() - self._started[worker] < _SHORT_LIFE_SECONDS
        self._short_lives = self._short_lives + 1 if short else 0
        logger.error("worker %d (process %s) ended with %s", worker, process.pid, process.exitcode)
        if self._short_lives >= _SHORT_LIVES:
            logger.error("%d workers in a row died young: stopping the service", self._short_lives)
            self._stopping = self._failed = True
            for other in self._alive.values():
                other.terminate()
            return
        time.sleep(_PAUSE_SECONDS)
        if not self._stopping:
            self._start(worker)

    def _stop(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stopping = True
        for process in self._alive.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, sig)


def _run_worker(settings: Settings, listener: socket.socket, worker: int, log_level: str, parent: Connection) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Ctrl-C reaches the whole foreground group; the parent passes it on once.
    os.setpgid(0, 0)
    logs.configure(settings.log_format, log_level)
    Thread(target=_stop_with_parent, args=(parent,), daemon=True).start()
    run(settings, listener, worker=worker)


def _stop_with_parent(parent: Connection) -> None:
    """Stop, as on SIGTERM, when the parent is gone."""
    try:
        parent.recv()
    except EOFError:
        os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: Settings, listener: socket.socket, log_level: str) -> None:
    """One process, or several and their parent; returns or exits when a signal has come.

    Raises:
        StateError: the state directory cannot be used, or another service uses it.
        TracingError: of a single process: tracing is asked for and not installed.
    """
    with _exclusive(settings.state_directory):
        if settings.workers == 1:
            run(settings, listener)
        else:
            sys.exit(Supervisor(settings, listener, log_level).run())


@contextmanager
def _exclusive(state: Path) -> Iterator[None]:
    """Keep other services out of a state directory; the system lets go of it when this process ends."""
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
