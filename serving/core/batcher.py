"""Micro-batching: requests that wait at the same time share one encoding and one search.

An idle service searches at once. While a search is under way the next requests gather, for as long as the window
lets them or until no more fit one search; the busier the service, the larger its batches and the less each costs.
The queue is bounded, and so is the time that a request spends here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

from longtail.serving.errors import QueueFullError, TimedOutError

Work = TypeVar("Work")
Result = TypeVar("Result")

_SWEEPS = 10
"""Looks at what has waited too long, in the time that it may wait."""


@dataclass(eq=False, slots=True)
class _Job(Generic[Work, Result]):
    key: Hashable
    work: Work
    size: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]
    since: float


class Batcher(Generic[Work, Result]):
    """Runs blocking work of many callers in batches, in threads of its own.

    A thread that has finished a batch takes the next one itself: it does not wait for the event loop, which may have
    a crowd of new requests to read first.

    Args:
        run: what a thread does: the batch's works, all of one key, and how long each has waited, in seconds, to
            one result or exception for each.
        threads: threads, and so batches under way at once.
        window: seconds that a batch may gather while another is under way.
        max_batch: largest size of a batch, unless a single work is larger.
        max_pending: largest size of all that waits.
        timeout: seconds from `submit` to a result or `TimedOutError`.
        initializer: called first in every thread.
    """

    def __init__(
        self,
        run: Callable[[Hashable, Sequence[Work], Sequence[float]], Sequence[Result | Exception]],
        *,
        threads: int,
        window: float,
        max_batch: int,
        max_pending: int,
        timeout: float,
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._window = window
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._timeout = timeout
        self._initializer = initializer
        self._changed = threading.Condition()
        self._waiting: deque[_Job[Work, Result]] = deque()
        self._running: set[_Job[Work, Result]] = set()
        self._batches = 0
        self._closed = False
        self.depth = 0
        """Size of all that waits."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._threads = [
            threading.Thread(target=self._run_batches, name=f"search-{slot}", daemon=True) for slot in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, work: Work, size: int) -> asyncio.Future[Result]:
        """Queue work; the future has its result. Called in an event loop, always the same one.

        Args:
            key: works of one batch have equal keys.
            work: for `run`.
            size: how much of a batch the work takes, in the unit of `max_batch`, such as queries.

        Raises:
            QueueFullError: what waits already and this are more than the limit.
        """
        loop = asyncio.get_running_loop()
        job = _Job(key, work, size, loop, loop.create_future(), perf_counter())
        with self._changed:
            if self.depth + size > self._max_pending:
                raise QueueFullError(
                    f"expected at most {self._max_pending} queries waiting, found {self.depth} and received {size} more"
                )
            self._waiting.append(job)
            self.depth += size
            self._changed.notify()
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._timeout / _SWEEPS, self._time_out_late)
        return job.future

    def close(self) -> None:
        """End the threads when nothing waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_batches(self) -> None:
        """One thread: batch after batch."""
        self._initializer()
        while batch := self._next_batch():
            now = perf_counter()
            try:
                outcomes = self._run(batch[0].key, [job.work for job in batch], [now - job.since for job in batch])
            # Whatever happens to a batch, its callers learn of it and the next one is served.
            except Exception as error:
                outcomes = [error] * len(batch)
            with self._changed:
                self._batches -= 1
                self._running.difference_update(batch)
                self._changed.notify()
            # A loop that is closed has no callers that wait.
            with suppress(RuntimeError):
                batch[0].loop.call_soon_threadsafe(_deliver, batch, outcomes)

    def _next_batch(self) -> list[_Job[Work, Result]]:
        """The next batch, as soon as it may start; nothing when the batcher is closed."""
        with self._changed:
            while True:
                if self._waiting:
                    wait = self._window - (perf_counter() - self._waiting[0].since)
                    if not self._batches or self.depth >= self._max_batch or wait <= 0:
                        break
                    self._changed.wait(wait)
                elif self._closed:
                    return []
                else:
                    self._changed.wait()
            batch = self._pop_batch()
            self._batches += 1
            self._running.update(batch)
            return batch

    def _pop_batch(self) -> list[_Job[Work, Result]]:
        """The first of the queue and those after it that fit its batch."""
        first = self._waiting.popleft()
        taken, size, others = [first], first.size, []
        while self._waiting and size < self._max_batch:
            job = self._waiting.popleft()
            if job.key == first.key and size + job.size <= self._max_batch:
                taken.append(job)
                size += job.size
            else:
                others.append(job)
        self._waiting.extendleft(reversed(others))
        self.depth -= size
        return taken

    def _time_out_late(self) -> None:
        """Answer those who have waited too long; what is under way for them is let finish and dropped."""
        self._sweep_timer = None
        late = perf_counter() - self._timeout
        with self._changed:
            for job in (*self._waiting, *self._running):
                if job.since < late and not job.future.done():
                    job.future.set_exception(
                        TimedOutError(f"expected an answer within {self._timeout:g} s, found the service too busy")
                    )
            alive = [job for job in self._waiting if not job.future.done()]
            if len(alive) < len(self._waiting):
                self._waiting = deque(alive)
                self.depth = sum(job.size for job in alive)
            busy = bool(self._waiting or self._running)
        if busy:
            self._sweep_timer = asyncio.get_running_loop().call_later(self._timeout / _SWEEPS, self._time_out_late)


def _deliver(batch: Sequence[_Job[Work, Result]], outcomes: Sequence[Result | Exception]) -> None:
    """Tell the callers, in their loop; some may have left."""
    for job, outcome in zip(batch, outcomes, strict=True):
        if job.future.done():
            continue
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
