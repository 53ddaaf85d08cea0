"""Micro-batching: requests that wait at the same time share one encoding and one search.

An idle service searches at once. While a search is under way the next requests gather, for as long as the window
lets them or until no more fit one search; the busier the service, the larger its batches and the less each costs.
The queue is bounded, and so is the time that a request spends here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Generic, TypeVar

from serving.errors import QueueFullError, TimedOutError

Work = TypeVar("Work")
Result = TypeVar("Result")

_SWEEPS = 10
"""Looks at what has waited too long, in the time that it may wait."""


@dataclass(eq=False, slots=True)
class _Job(Generic[Work, Result]):
    key: Hashable
    work: Work
    size: int
    future: asyncio.Future[Result]
    since: float


class Batcher(Generic[Work, Result]):
    """Runs blocking work of many callers in batches on a few threads. Used from one event loop.

    Args:
        run: what a thread does: the batch's works, all of one key, and how long each has waited, in seconds, to
            one result or exception for each.
        threads: where.
        slots: batches under way at once.
        window: seconds that a batch may gather while another is under way.
        most: size of a batch, unless a single work is larger.
        limit: size of all that waits.
        patience: seconds from `submit` to a result or `TimedOutError`.
    """

    def __init__(
        self,
        run: Callable[[Hashable, Sequence[Work], Sequence[float]], Sequence[Result | Exception]],
        threads: ThreadPoolExecutor,
        *,
        slots: int,
        window: float,
        most: int,
        limit: int,
        patience: float,
    ) -> None:
        self._run = run
        self._threads = threads
        self._slots = slots
        self._window = window
        self._most = most
        self._limit = limit
        self._patience = patience
        self._waiting: deque[_Job[Work, Result]] = deque()
        self._running: set[_Job[Work, Result]] = set()
        self._batches = 0
        self.depth = 0
        """Size of all that waits."""
        self._gathering: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    def submit(self, key: Hashable, work: Work, size: int) -> asyncio.Future[Result]:
        """Queue work; the future has its result.

        Args:
            key: works of one batch have equal keys.
            work: for `run`.
            size: its share of a batch.

        Raises:
            QueueFullError: what waits already and this are more than the limit.
        """
        if self.depth + size > self._limit:
            raise QueueFullError(
                f"expected at most {self._limit} queries waiting, found {self.depth} and received {size} more"
            )
        loop = asyncio.get_running_loop()
        job = _Job(key, work, size, loop.create_future(), perf_counter())
        self._waiting.append(job)
        self.depth += size
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._patience / _SWEEPS, self._sweep)
        self._pump()
        return job.future

    def _pump(self) -> None:
        """Start what may start now."""
        while self._waiting and self._batches < self._slots:
            wait = self._window - (perf_counter() - self._waiting[0].since)
            if self._batches and self.depth < self._most and wait > 0:
                if self._gathering is None:
                    self._gathering = asyncio.get_running_loop().call_later(wait, self._gathered)
                return
            self._start(self._take())

    def _gathered(self) -> None:
        self._gathering = None
        self._pump()

    def _take(self) -> list[_Job[Work, Result]]:
        """The first of the queue and those after it that fit its batch."""
        first = self._waiting.popleft()
        taken, size, others = [first], first.size, []
        while self._waiting and size < self._most:
            job = self._waiting.popleft()
            if job.key == first.key and size + job.size <= self._most:
                taken.append(job)
                size += job.size
            else:
                others.append(job)
        self._waiting.extendleft(reversed(others))
        self.depth -= size
        return taken

    def _start(self, batch: list[_Job[Work, Result]]) -> None:
        loop = asyncio.get_running_loop()
        self._batches += 1
        self._running.update(batch)
        now = perf_counter()
        under_way = loop.run_in_executor(
            self._threads, self._run, batch[0].key, [job.work for job in batch], [now - job.since for job in batch]
        )
        under_way.add_done_callback(partial(self._done, batch))

    def _done(self, batch: list[_Job[Work, Result]], under_way: asyncio.Future[Sequence[Result | Exception]]) -> None:
        self._batches -= 1
        self._running.difference_update(batch)
        if under_way.cancelled():
            outcomes: Sequence[Result | Exception] = [
                TimedOutError("expected an answer, the service is stopping")
            ] * len(batch)
        elif (error := under_way.exception()) is not None:
            outcomes = [error if isinstance(error, Exception) else RuntimeError(repr(error))] * len(batch)
        else:
            outcomes = under_way.result()
        for job, outcome in zip(batch, outcomes, strict=True):
            if job.future.done():
                continue
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
        self._pump()

    def _sweep(self) -> None:
        """Answer those who have waited too long; what is under way for them is let finish and dropped."""
        self._sweeping = None
        late = perf_counter() - self._patience
        for job in (*self._waiting, *self._running):
            if job.since < late and not job.future.done():
                job.future.set_exception(
                    TimedOutError(f"expected an answer within {self._patience:g} s, found the service too busy")
                )
        alive = [job for job in self._waiting if not job.future.done()]
        if len(alive) < len(self._waiting):
            self._waiting = deque(alive)
            self.depth = sum(job.size for job in alive)
        if self._waiting or self._running:
            self._sweeping = asyncio.get_running_loop().call_later(self._patience / _SWEEPS, self._sweep)
