"""Micro-batching: requests that wait at the same time share one encoding and one search.

An idle service searches at once. While a search is under way the next requests gather, for as long as the window
lets them or until no more fit one search; the busier the service, the larger its batches and the less each costs.
The queue is bounded, and so is the time that a request spends here. Tenants share both fairly (fair_queue): large
work is done in parts, with other tenants' between them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar, cast

from longtail.serving.core.fair_queue import FairQueue
from longtail.serving.errors import QueueFullError, TimedOutError

Work = TypeVar("Work")
Result = TypeVar("Result")

_SWEEPS = 10
"""Looks at what has waited too long, in the time that it may wait."""


_COST_OF_BATCH = 128.0
"""Of a batch, for each of its largest size: one of small works never comes near it."""
_SHARED = 2, 8
"""Batches and parts are so much smaller while several tenants share the service, who wait for each other's."""


class Part(NamedTuple, Generic[Work]):
    """Some of a work that is divided.

    Attributes:
        work: that is done now.
        cost: of it.
        rest: the work that is left.
    """

    work: Work
    cost: float
    rest: Work


@dataclass(eq=False, slots=True)
class _Job(Generic[Work, Result]):
    key: Hashable
    work: Work
    size: int
    cost: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]
    since: float
    parts: list[Result | Exception | None] = field(default_factory=list)
    """Of a divided work: results so far, None of those under way."""
    begun: bool = False
    """Whether it is divided, and a part of it was begun."""
    divided: bool = False
    """Whether some of the work waits still."""
    dropped: bool = False
    """Whether what is left of it is never done."""


class _Run(NamedTuple, Generic[Work, Result]):
    """A job, or a part of one, that a thread works on."""

    job: _Job[Work, Result]
    work: Work
    waited: bool
    place: int | None


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
        divide: some of a work that costs more than this, at most so much of it; None of a work that cannot be divided.
        join: one result of those of all parts, in order; called where `run` is.
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
        divide: Callable[[Work, float], Part[Work] | None] = lambda _work, _cost: None,
        join: Callable[[Hashable, Sequence[Result]], Result] = lambda _key, parts: parts[0],
        initializer: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._window = window
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._timeout = timeout
        self._divide, self._join = divide, join
        self._initializer = initializer
        self._changed = threading.Condition()
        self._waiting: FairQueue[_Job[Work, Result]] = FairQueue()
        self._running: set[_Job[Work, Result]] = set()
        self._batches = 0
        self._closed = False
        self._unannounced = 0
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._threads = [
            threading.Thread(target=self._run_batches, name=f"search-{slot}", daemon=True) for slot in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Size of all that waits."""
        return self._waiting.size

    def has_room(self, tenant: Hashable = None) -> bool:
        """Whether to read what a tenant asks: the queue is not half full, or it has less than its share of it."""
        if not self._waiting.size:
            return True
        with self._changed:
            return self._waiting.has_share(tenant, self._max_pending, perf_counter())

    def submit(
        self, key: Hashable, work: Work, size: int, *, tenant: Hashable = None, cost: float = 0.0
    ) -> asyncio.Future[Result]:
        """Queue work; the future has its result. Called in an event loop, always the same one.

        Where the queue is full, the newest work of the tenant that has most of it makes room for that of one with less.

        Args:
            key: works of one batch have equal keys.
            work: for `run`.
            size: how much of a batch the work takes, in the unit of `max_batch`, such as queries.
            tenant: whose work it is.
            cost: how long it takes, in any unit.

        Raises:
            QueueFullError: what waits already and this are more than the limit. The future has it, too, where the work
                made room for another's.
        """
        loop = asyncio.get_running_loop()
        job = _Job(key, work, size, cost, loop, loop.create_future(), perf_counter())
        with self._changed:
            while self.depth + size > self._max_pending:
                if not (self._waiting and self._waiting.may_displace(tenant, size)):
                    raise QueueFullError(
                        f"expected at most {self._max_pending} queries waiting, found {self.depth} and received "
                        f"{size} more"
                    )
                displaced = self._waiting.displace()
                self._forget([displaced])
                if not displaced.future.done():
                    displaced.future.set_exception(
                        QueueFullError(
                            f"expected at most {self._max_pending} queries waiting, shared fairly, found that others "
                            "with fewer need the room"
                        )
                    )
            self._waiting.append(tenant, job)
        if not self._unannounced:
            loop.call_soon(self._announce)
        self._unannounced += 1
        if self._sweep_timer is None:
            self._sweep_timer = loop.call_later(self._timeout / _SWEEPS, self._time_out_late)
        return job.future

    def drop_left(self) -> None:
        """Forget what waits and whose caller has left; what is under way is let finish."""
        with self._changed:
            self._forget(self._waiting.drop(lambda job: job.future.done()))

    def _announce(self) -> None:
        """Have threads look: all that the event loop had read has been queued by now, and may share a batch."""
        with self._changed:
            self._changed.notify(self._unannounced)
        self._unannounced = 0

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
                waited = [now - run.job.since for run in batch if run.waited]
                outcomes = self._run(batch[0].job.key, [run.work for run in batch], waited)
            # Whatever happens to a batch, its callers learn of it and the next one is served.
            except Exception as error:
                outcomes = [error] * len(batch)
            with self._changed:
                self._batches -= 1
                whole = [
                    (run.job, outcome)
                    for run, outcome in zip(batch, outcomes, strict=True)
                    if run.place is None or self._completes(run.job, run.place, outcome)
                ]
                self._running.difference_update(job for job, _ in whole)
                self._changed.notify()
            if not whole:
                continue
            whole = [(job, self._joined(job, outcome)) for job, outcome in whole]
            # A loop that is closed has no callers that wait.
            with suppress(RuntimeError):
                batch[0].job.loop.call_soon_threadsafe(_deliver, whole)

    def _completes(self, job: _Job[Work, Result], place: int, outcome: Result | Exception) -> bool:
        """Whether a part of a job was its last; if it failed, no other part is begun."""
        job.parts[place] = outcome
        if isinstance(outcome, Exception) and job.divided:
            self._forget(self._waiting.drop(lambda waiting: waiting is job))
        return not job.divided and None not in job.parts

    def _forget(self, jobs: Sequence[_Job[Work, Result]]) -> None:
        """What is left of jobs will not be done."""
        for job in jobs:
            job.divided, job.dropped = False, True
            if None not in job.parts:
                self._running.discard(job)

    def _joined(self, job: _Job[Work, Result], outcome: Result | Exception) -> Result | Exception:
        """The outcome of a job whose last part has this one."""
        if not job.parts:
            return outcome
        failed = [part for part in job.parts if isinstance(part, Exception)]
        if failed or job.dropped:
            return failed[0] if failed else outcome
        try:
            return self._join(job.key, cast(list[Result], job.parts))
        except Exception as error:
            return error

    def _next_batch(self) -> list[_Run[Work, Result]]:
        """The next batch, as soon as it may start; nothing when the batcher is closed."""
        with self._changed:
            while True:
                if self._waiting:
                    wait = self._window - (perf_counter() - self._waiting.oldest) if self._batches else 0.0
                    if self.depth >= self._max_batch or wait <= 0:
                        break
                    self._changed.wait(wait)
                elif self._closed:
                    return []
                else:
                    self._changed.wait()
            batch = self._take_batch()
            self._batches += 1
            self._running.update(run.job for run in batch)
            return batch

    def _take_batch(self) -> list[_Run[Work, Result]]:
        """The next job and those that fit its batch, or the next part of it."""
        cost = _COST_OF_BATCH * self._max_batch
        for_batch, for_part = _SHARED if self._waiting.tenants(perf_counter()) > 1 else (1, 1)
        job = self._waiting.next
        part = self._divide(job.work, cost / for_part) if job.cost > cost / for_part or job.begun else None
        if part is not None:
            job.work, job.divided = part.rest, True
            self._waiting.begin_next(part.cost)
        elif not job.begun:
            batch = self._waiting.take_batch(self._max_batch, cost / for_batch)
            return [_Run(job, job.work, True, None) for job in batch]
        else:
            self._waiting.begin_next(job.cost)
            self._waiting.drop(lambda waiting: waiting is job)
            job.divided = False
        job.parts.append(None)
        place = len(job.parts) - 1
        return [_Run(job, job.work if part is None else part.work, place == 0, place)]

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
        self.drop_left()
        with self._changed:
            busy = bool(self._waiting or self._running)
        if busy:
            self._sweep_timer = asyncio.get_running_loop().call_later(self._timeout / _SWEEPS, self._time_out_late)


def _deliver(outcomes: Sequence[tuple[_Job[Work, Result], Result | Exception]]) -> None:
    """Tell the callers, in their loop; some may have left."""
    for job, outcome in outcomes:
        if job.future.done():
            continue
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
