"""Share the state of a service's processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableSequence
from enum import IntEnum
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_RESTARTS, _STATE, _CONNECTIONS, _QUEUE_DEPTH, _CELLS = 0, 1, 2, 3, 4
_UNEVEN_SHARE, _UNEVEN_CONNECTIONS = 0.5, 2
"""Differences to a fair share of the connections, relative and absolute, that are more than chance makes of new ones:
closing connections for less would never end."""


class WorkerState(IntEnum):
    """State of a worker."""

    down = 0
    """The process has ended, and its successor has not started yet."""
    starting = 1
    """The process has not looked for a release yet."""
    up = 2
    """The process runs, but has no release to serve, or is about to stop."""
    ready = 3
    """The process serves a release."""


class Workers:
    """A board shared by all processes; each number has one writer at a time.

    Args:
        cells: `count_cells(workers)` integers, initially 0; in shared memory if there are several processes.
    """

    def __init__(self, workers: int = 1, cells: MutableSequence[int] | None = None) -> None:
        self.workers = workers
        self._cells: MutableSequence[int] = [0] * self.count_cells(workers) if cells is None else cells

    @staticmethod
    def count_cells(workers: int) -> int:
        """Compute the size of a board."""
        return _CELLS * workers

    def start(self, worker: int, *, again: bool) -> None:
        """Note the start of a process; `again`: it replaces another."""
        self._cells[_CELLS * worker + _RESTARTS] += again
        self.set_state(worker, WorkerState.starting)

    def set_state(self, worker: int, state: WorkerState) -> None:
        """Set the state of a worker."""
        self._cells[_CELLS * worker + _STATE] = state
        if state is WorkerState.down:
            self.set_connections(worker, 0)
            self._cells[_CELLS * worker + _QUEUE_DEPTH] = 0

    def state(self, worker: int) -> WorkerState:
        """Get the state of a worker."""
        return WorkerState(self._cells[_CELLS * worker + _STATE])

    def restarts(self, worker: int) -> int:
        """Get the number of a worker's restarts."""
        return self._cells[_CELLS * worker + _RESTARTS]

    def set_connections(self, worker: int, connections: int) -> None:
        """Set the number of open connections."""
        self._cells[_CELLS * worker + _CONNECTIONS] = connections

    def connections(self, worker: int) -> int:
        """Get the number of open connections."""
        return self._cells[_CELLS * worker + _CONNECTIONS]

    def queue_depth_setter(self, worker: int) -> Callable[[int], None]:
        """Create the function that sets a worker's number of waiting queries."""
        return partial(self._cells.__setitem__, _CELLS * worker + _QUEUE_DEPTH)

    def surplus(self, worker: int) -> int:
        """Count a worker's connections above a fair share."""
        connections = {i: self.connections(i) for i in range(self.workers) if self.state(i) is WorkerState.ready}
        if worker not in connections:
            return 0
        share = sum(connections.values()) / len(connections)
        uneven = max(share - min(connections.values()), max(connections.values()) - share)
        if uneven <= _UNEVEN_SHARE * share or uneven < _UNEVEN_CONNECTIONS:
            return 0
        return max(0, math.ceil(connections[worker] - share))

    @property
    def ready(self) -> int:
        """Count the workers that serve a release."""
        return sum(self.state(worker) is WorkerState.ready for worker in range(self.workers))

    @property
    def complete(self) -> bool:
        """Whether no worker is being started for the first time."""
        return not any(
            self.state(worker) is WorkerState.starting and not self.restarts(worker) for worker in range(self.workers)
        )


class WorkerSlot:
    """One worker's slot on the board.

    Attributes:
        set_queue_depth: sets the number of waiting queries; called after every search.
    """

    def __init__(self, workers: Workers, worker: int) -> None:
        self.workers = workers
        self.worker = worker
        workers.set_state(worker, WorkerState.starting)
        self.set_queue_depth = workers.queue_depth_setter(worker)

    def set_ready(self, ready: bool) -> None:
        """Set whether this worker serves; signal handlers may call this."""
        self.workers.set_state(self.worker, WorkerState.ready if ready else WorkerState.up)

    @property
    def ready(self) -> bool:
        """Whether this worker serves and the first start is over."""
        return self.workers.state(self.worker) is WorkerState.ready and self.workers.complete

    def end_start(self) -> None:
        """Note that this worker has looked for a release."""
        if self.is_starting:
            self.set_ready(False)

    @property
    def is_starting(self) -> bool:
        """Whether this worker has not looked for a release yet."""
        return self.workers.state(self.worker) is WorkerState.starting

    @property
    def replaces(self) -> bool:
        """Whether another process was this worker before."""
        return self.workers.restarts(self.worker) > 0

    def collect(self, queue_limit: int) -> Iterator[Metric]:
        """Yield the series about this worker and all workers."""
        workers = self.workers
        cells = [workers._cells[_CELLS * worker :][:_CELLS] for worker in range(workers.workers)]
        yield GaugeMetricFamily("longtail_ready", "1 if /readyz says ready.", value=self.ready)
        yield GaugeMetricFamily("longtail_workers", "Worker processes that there should be.", value=workers.workers)
        depth = sum(row[_QUEUE_DEPTH] for row in cells)
        yield GaugeMetricFamily("longtail_queue_depth", "Queries that wait for a search.", value=depth)
        text = "Queries that may wait for a search in each process."
        yield GaugeMetricFamily("longtail_queue_limit", text, value=queue_limit)
        ready = GaugeMetricFamily("longtail_worker_ready", "1 if a worker serves a release.", labels=["worker"])
        text = "Processes of a worker that ended and were replaced."
        restarts = CounterMetricFamily("longtail_worker_restarts", text, labels=["worker"])
        connections = GaugeMetricFamily("longtail_worker_connections", "Open connections.", labels=["worker"])
        for worker, row in enumerate(cells):
            ready.add_metric([str(worker)], float(row[_STATE] == WorkerState.ready))
            restarts.add_metric([str(worker)], row[_RESTARTS])
            connections.add_metric([str(worker)], row[_CONNECTIONS])
        yield from (ready, restarts, connections)
