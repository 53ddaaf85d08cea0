"""What the processes of a service know of each other: which serve, how often each was started again, what they hold."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableSequence
from enum import IntEnum
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PROC = Path("/proc")
_STOPPING, _WORKERS_FROM = 0, 1
_PID, _RESTARTS, _STATES_FROM = 0, 1, 2


class WorkerState(IntEnum):
    """What a worker does for a model; of several models, what it does for the one that it does least for."""

    down = 0
    """Its process has ended, and another is not there yet."""
    starting = 1
    """It has not looked for a release yet."""
    up = 2
    """It runs, and has no release that it could serve, or is about to stop."""
    ready = 3
    """It serves a release."""


class Workers:
    """A board that all processes of a service share; each number on it is written by one of them at a time.

    Args:
        workers: how many.
        cells: whole numbers, `cells_of(workers, models)` of them, all 0 at first; shared memory where there are several
            processes.
        models: that each of them serves.
    """

    def __init__(self, workers: int = 1, cells: MutableSequence[int] | None = None, models: int = 1) -> None:
        self.workers = workers
        self._models = models
        self._cells: MutableSequence[int] = [0] * self.cells_of(workers, models) if cells is None else cells

    @staticmethod
    def cells_of(workers: int, models: int = 1) -> int:
        """How many numbers a board has."""
        return _WORKERS_FROM + (_STATES_FROM + models) * workers

    @property
    def stopping(self) -> bool:
        """Whether the service ends, and not only one of its workers."""
        return bool(self._cells[_STOPPING])

    def stop(self) -> None:
        """The service ends."""
        self._cells[_STOPPING] = 1

    def start(self, worker: int, *, again: bool) -> None:
        """A process for this worker is about to be started, `again` if there was one before."""
        self._set(worker, _PID, 0)
        self._set(worker, _RESTARTS, self.restarts(worker) + again)
        self.become(worker, WorkerState.starting)

    def run(self, worker: int, model: int = 0) -> None:
        """The calling process is this worker, and will serve this model."""
        self._set(worker, _PID, os.getpid())
        self.become(worker, WorkerState.starting, model)

    def become(self, worker: int, state: WorkerState, model: int | None = None) -> None:
        """This worker does something else for a model from now on, or for all of them if None."""
        for each in range(self._models) if model is None else (model,):
            self._set(worker, _STATES_FROM + each, state)

    def state(self, worker: int, model: int | None = None) -> WorkerState:
        """What a worker does for a model; for the one that it does least for, if None."""
        asked = range(self._models) if model is None else (model,)
        return WorkerState(min(self._get(worker, _STATES_FROM + each) for each in asked))

    def restarts(self, worker: int) -> int:
        """How often a worker's process was replaced by another."""
        return self._get(worker, _RESTARTS)

    @property
    def ready(self) -> int:
        """How many serve a release of every model."""
        return self.ready_for(None)

    @property
    def complete(self) -> bool:
        """Whether no worker is being started for the first time."""
        return self.complete_for(None)

    def ready_for(self, model: int | None) -> int:
        """How many serve a release of a model, or of every model if None."""
        return sum(self.state(worker, model) is WorkerState.ready for worker in range(self.workers))

    def complete_for(self, model: int | None) -> bool:
        """Whether all workers have looked for a release of a model, or of every model if None."""
        return not any(
            self.state(worker, model) is WorkerState.starting and not self.restarts(worker)
            for worker in range(self.workers)
        )

    def collect(self) -> Iterator[Metric]:
        """The series of METRICS.md about workers, over all of them; for `CollectorRegistry.register`."""
        yield GaugeMetricFamily("longtail_workers", "Worker processes that there should be.", value=self.workers)
        ready = GaugeMetricFamily("longtail_worker_ready", "1 if a worker serves a release.", labels=["worker"])
        restarts = CounterMetricFamily(
            "longtail_worker_restarts", "Processes of a worker that ended and were replaced.", labels=["worker"]
        )
        held = {
            name: GaugeMetricFamily(f"longtail_worker_{name}", text, labels=["worker"])
            for name, text in {
                "resident_bytes": "Memory of a worker that is in RAM, files mapped by several among it.",
                "private_bytes": "The part of it that no file backs: a worker's own.",
                "open_files": "Files, sockets and pipes that a worker has open.",
            }.items()
        }
        for worker in range(self.workers):
            name = str(worker)
            ready.add_metric([name], float(self.state(worker) is WorkerState.ready))
            restarts.add_metric([name], self.restarts(worker))
            for family, value in zip(held.values(), _held(self._get(worker, _PID)), strict=True):
                family.add_metric([name], value)
        yield from (ready, restarts, *held.values())

    def _get(self, worker: int, cell: int) -> int:
        return self._cells[self._place(worker, cell)]

    def _set(self, worker: int, cell: int, value: int) -> None:
        self._cells[self._place(worker, cell)] = value

    def _place(self, worker: int, cell: int) -> int:
        return _WORKERS_FROM + (_STATES_FROM + self._models) * worker + cell


class Seat(Collector):
    """One worker's place at the board, for one of its models.

    Args:
        workers: the board.
        worker: the number of this process.
        model: the number of the model, from 0.
    """

    def __init__(self, workers: Workers, worker: int, model: int = 0) -> None:
        self.workers = workers
        self.worker = worker
        self.model = model
        workers.run(worker, model)

    def set_ready(self, ready: bool) -> None:
        """This worker serves a release of the model, or does not any more."""
        self.workers.become(self.worker, WorkerState.ready if ready else WorkerState.up, self.model)

    @property
    def ready(self) -> bool:
        """Whether /readyz of this worker says ready for the model: it serves a release of it, and no worker is started
        for the first time.
        """
        ready = self.workers.state(self.worker, self.model) is WorkerState.ready
        return ready and self.workers.complete_for(self.model)

    def has_looked(self) -> None:
        """This worker has looked for a release, whatever it found."""
        if self.waited_for:
            self.set_ready(False)

    @property
    def waited_for(self) -> bool:
        """Whether this worker has not looked for a release of the model yet."""
        return self.workers.state(self.worker, self.model) is WorkerState.starting

    @property
    def replaces(self) -> bool:
        """Whether another process was this worker before."""
        return self.workers.restarts(self.worker) > 0

    def collect(self) -> Iterator[Metric]:
        """What this worker says of itself; for `CollectorRegistry.register`."""
        yield GaugeMetricFamily("longtail_ready", "1 if /readyz says ready.", value=self.ready)


def _held(pid: int) -> tuple[float, float, float]:
    """Resident and private bytes and open files of a process; NaN where the system does not tell."""
    process = _PROC / str(pid)
    try:
        resident, backed = map(int, (process / "statm").read_text().split()[1:3])
        page = os.sysconf("SC_PAGE_SIZE")
        return resident * page, (resident - backed) * page, len(os.listdir(process / "fd"))
    except (OSError, ValueError):
        return math.nan, math.nan, math.nan
