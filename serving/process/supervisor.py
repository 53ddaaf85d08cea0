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
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from longtail.serving.monitoring.workers import Workers, WorkerState
from longtail.serving.process.reloading import Terminal, read_again, take_hangups
from longtail.serving.process.server import run
from longtail.serving.settings import Settings
from longtail.state import Postgres, StoreError, read_label_changes

logger = logging.getLogger(__name__)

_SHORT_LIFE_SECONDS = 10.0
_SHORT_LIVES = 5
"""Workers in a row that may die young before the service gives up, if none is healthy."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Before a worker is started again; doubled whenever it dies young."""
_WATCH_SECONDS = 1.0


class Supervisor:
    """The parent process of the workers, which answers no request itself.

    A worker that ends is started again, one that dies young ever later, up to `_LONGEST_PAUSE_SECONDS`. Where workers
    only die young and none is healthy, which is one that serves a release or has lived for `_SHORT_LIFE_SECONDS`, the
    service ends.

    Args:
        settings: settings of the service; `workers` processes are started.
        listener: from `longtail.serving.process.listening.listen`; closed at the stop, when only workers need it.
        log_level: log level of the workers.
    """

    def __init__(self, settings: Settings, listener: socket.socket, log_level: str) -> None:
        self._settings = settings
        self._listener = listener
        self._log_level = log_level
        self._spawn = get_context("spawn")
        models = 1 + len(settings.models)
        cells = self._spawn.RawArray("q", Workers.cells_of(settings.workers, models))
        self._workers = Workers(settings.workers, cells, models)
        for worker in range(settings.workers):
            self._workers.start(worker, again=False)
        self._alive: dict[int, BaseProcess] = {}
        self._started: dict[int, float] = {}
        self._due = dict.fromkeys(range(settings.workers), 0.0)
        """When to start workers that do not run, on the monotonic clock."""
        self._died_young: Counter[int] = Counter()
        self._short_lives = 0
        self._stopping = self._failed = False
        self._signals: list[int] = []
        self._terminal = Terminal()
        self._woken, self._waker = socket.socketpair()
        # Workers hold the other end: it closes when this process is gone, however it went.
        self._ours, self._theirs = self._spawn.Pipe()

    def run(self) -> int:
        """Run until a signal comes, or workers only die; returns the exit status."""
        figures = self._settings.state_directory / "prometheus"
        shutil.rmtree(figures, ignore_errors=True)
        figures.mkdir(parents=True)
        os.environ[MULTIPROCESS] = str(figures)
        self._take_signals()
        # Started with the first worker it would let SIGINT through to that one.
        resource_tracker.ensure_running()
        while self._alive or self._due:
            self._handle_signals()
            self._start_due()
            watched: list[socket.socket | int] = [self._woken, *(process.sentinel for process in self._alive.values())]
            connection.wait(watched, timeout=self._patience())
            for worker, process in list(self._alive.items()):
                if not process.is_alive():
                    self._worker_ended(worker, process)
        return int(self._failed)

    def _take_signals(self) -> None:
        """Signals only leave a note: what they ask for must not come in between the start of a worker."""
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        take_hangups(self._note)

    def _note(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signals.append(sig)

    def _handle_signals(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._signals:
            sig = self._signals.pop(0)
            if sig != signal.SIGHUP or self._terminal.closed:
                self._stop(signal.SIGTERM if sig == signal.SIGHUP else sig)
            elif not self._stopping and (settings := read_again(self._settings)) is not None:
                self._settings = settings
                self._pass_on(sig)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker, at in self._due.items() if at <= now]:
            del self._due[worker]
            self._start(worker)

    def _patience(self) -> float:
        """Seconds until something is to be done that nothing wakes for."""
        return max(0.0, min([_WATCH_SECONDS, *(at - time.monotonic() for at in self._due.values())]))

    def _start(self, worker: int) -> None:
        self._workers.start(worker, again=worker in self._started)
        process = self._spawn.Process(
            target=_run_worker,
            args=(self._settings, self._listener, worker, self._workers, self._log_level, self._theirs),
        )
        # A worker amid its imports would show a Ctrl-C, or lose it, and die of SIGHUP: both come to it when it can
        # handle them.
        held_back = {signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held_back)
        self._alive[worker], self._started[worker] = process, time.monotonic()

    def _worker_ended(self, worker: int, process: BaseProcess) -> None:
        del self._alive[worker]
        self._workers.become(worker, WorkerState.down)
        multiprocess.mark_process_dead(process.pid or 0, os.environ[MULTIPROCESS])  # type: ignore[no-untyped-call]
        if self._stopping:
            return
        short = time.monotonic() - self._started[worker] < _SHORT_LIFE_SECONDS
        self._short_lives = self._short_lives + 1 if short else 0
        self._died_young[worker] = self._died_young[worker] + 1 if short else 0
        ended = f"worker {worker} (process {process.pid}) ended with {_how(process.exitcode)}"
        healthy = sum(map(self._healthy, self._alive))
        if self._short_lives >= _SHORT_LIVES and not healthy:
            logger.error("%s; %d workers in a row died young: stopping the service", ended, self._short_lives)
            self._failed = True
            self._stop(signal.SIGTERM)
            return
        pause = min(_PAUSE_SECONDS * 2 ** max(0, min(self._died_young[worker], 30) - 1), _LONGEST_PAUSE_SECONDS)
        self._due[worker] = time.monotonic() + pause
        logger.error(
            "%s; another is started in %.1f s, %d of %d workers are healthy",
            ended, pause, healthy, self._settings.workers,
        )  # fmt: skip

    def _healthy(self, worker: int) -> bool:
        aged = time.monotonic() - self._started[worker] >= _SHORT_LIFE_SECONDS
        return aged or self._workers.state(worker) is WorkerState.ready

    def _stop(self, sig: int) -> None:
        self._stopping = True
        self._workers.stop()
        self._due.clear()
        # As long as any process has it the system connects clients that nobody will answer.
        self._listener.close()
        self._pass_on(sig)

    def _pass_on(self, sig: int) -> None:
        for process in self._alive.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, sig)


def _run_worker(
    settings: Settings, listener: socket.socket, worker: int, workers: Workers, log_level: str, parent: Connection
) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Ctrl-C reaches the whole foreground group; the parent passes it on once.
    os.setpgid(0, 0)
    logs.configure(settings.log_format, log_level)
    Thread(target=_stop_with_parent, args=(parent, workers), daemon=True).start()
    run(settings, listener, worker=worker, workers=workers)


def _stop_with_parent(parent: Connection, workers: Workers) -> None:
    """Stop, as on SIGTERM, when the parent is gone."""
    try:
        parent.recv()
    except EOFError:
        workers.stop()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: Settings, listener: socket.socket, log_level: str) -> None:
    """One process, or several and their parent; returns or exits when a signal has come.

    Raises:
        StateError: the state directory cannot be used, or another service uses it.
        TracingError: of a single process: tracing is asked for and not installed.
    """
    with ExitStack() as states:
        for each in settings.by_model().values():
            states.enter_context(_exclusive(each.state_directory))
            _refuse_left_behind(each)
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


def _refuse_left_behind(settings: Settings) -> None:
    """Refuse a database without label changes where the directory has some: what is hidden would be seen again."""
    if not isinstance(settings.place, Postgres):
        return
    directory = settings.state_directory
    with suppress(FileNotFoundError):
        left = len(read_label_changes(directory).records())
        with suppress(StoreError):  # it may answer later, and is then served from
            try:
                found = len(read_label_changes(settings.place).records())
            except FileNotFoundError:
                found = 0
            if left and not found:
                raise StateError(
                    f"state {settings.place}: expected label changes, found none, and {left} in {directory}: copy them "
                    f"with longtail-serve copy-labels {directory}, or move {directory}/labels.sqlite away"
                )


def _how(exit_code: int | None) -> str:
    """An exit status, or the name of the signal that it stands for."""
    if exit_code is None or exit_code >= 0:
        return str(exit_code)
    if -exit_code == signal.SIGBUS:
        return "SIGBUS: a file that it serves was cut off, or its disk failed; `longtail-index verify` says which"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
