"""Queue requests: one bounded queue of searches, answered in batches; and single threads for writes and reads.

An idle service searches at once. While a search runs, the next requests gather until the window has passed or a batch
is full: the busier the service, the larger its batches and the less each query costs. The queue serves the client with
the least work so far [start-time fair queueing, Goyal et al. 1996]. After an expensive request of one
client, other clients are served until they have cost the same. The waiting queries, labels and bytes of one client may
not exceed the free part of the queue [Choudhury and Hahne 1998]. So one client alone fills at most half of the
queue, and other clients always find room. A large request waits as several pieces, each with a turn of its own, so that
other clients are answered in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from time import perf_counter
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import faiss

from longtail.index import EngineUnavailableError
from longtail.serving.errors import QueueFullError, ServingError, TimedOutError

Work = TypeVar("Work")
Result = TypeVar("Result")

client: ContextVar[str] = ContextVar("client", default="")
"""The client of the request that this task answers: a key's fingerprint, or an address."""
_LABELS_A_QUERY = 200
"""Labels whose search costs about as much time as a query does besides."""
_TURNS = 4
"""Turns of a client of which one goes to requests that have begun, where others wait that have not."""
_LABELS_PER_QUERY = 64
"""Labels that a batch may request per query of `max_batch`; larger batches would keep other clients waiting."""
_LARGEST_SHARED = 1000
"""Labels per query from which a piece shares no batch: quick queries would wait for all of it."""


class Cost(NamedTuple):
    """Cost of one request, or of all waiting requests.

    Attributes:
        labels: k, or the size of the pool that max_per and mmr choose from, summed over the queries.
        bytes: estimated size of the answer as JSON.
        extra: labels whose search costs about as much as the rest, such as the entries of lists; it bounds turns alone.
    """

    queries: int = 0
    labels: int = 0
    bytes: float = 0.0
    extra: int = 0


@dataclass(slots=True)
class WaitingCost:
    """The costs that wait, of all clients or of one."""

    queries: int = 0
    labels: int = 0
    bytes: float = 0.0


Run: TypeAlias = Callable[[Sequence[Work], Sequence[float]], Sequence[Result]]
"""Answers works with equal keys in a thread, given the seconds that each has waited; a result is not None."""


@dataclass(eq=False, slots=True)
class _Job(Generic[Work, Result]):
    """A request: the pieces that wait for a turn, and the results of the others."""

    key: Hashable
    run: Run[Work, Result]
    pieces: deque[tuple[int, Work, Cost]]
    results: list[Result | None]
    future: asyncio.Future[list[Result]]
    since: float


_Piece: TypeAlias = tuple[_Job[Work, Result], int, Work]
"""A work with its request, and its position there."""


@dataclass(eq=False, slots=True)
class _Client(Generic[Work, Result]):
    """The waiting jobs of a client.

    Attributes:
        start: virtual time at which the next job may start.
        order: number of the client's turn, unique among all turns.
        begun: jobs that go on with a request, such as the steps of an explanation.
        turns: number of turns that the client has had since it began to wait.
    """

    start: int
    order: int
    turns: int = 0
    fresh: deque[_Job[Work, Result]] = field(default_factory=deque)
    begun: deque[_Job[Work, Result]] = field(default_factory=deque)
    load: WaitingCost = field(default_factory=WaitingCost)


class SearchQueue(Generic[Work, Result]):
    """Runs blocking work of many clients in batches.

    Args:
        window: seconds that requests may gather while another batch runs.
        max_batch: largest number of queries in a batch; a single piece with more runs alone.
        limit: largest cost that may wait.
        timeout: longest time from `submit` to a result, in seconds.
        set_depth: called after every batch with the number of waiting queries.
    """

    def __init__(
        self,
        *,
        threads: int,
        window: float,
        max_batch: int,
        limit: Cost,
        timeout: float,
        set_depth: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._set_depth = set_depth
        self._window = window
        self._max_batch = max_batch
        self._limit = limit
        self._timeout = timeout
        self._changed = threading.Condition()
        self._clients: dict[str, _Client[Work, Result]] = {}
        self._time, self._order = 0, count()
        self._starts: dict[str, int] = {}
        """Virtual times before which clients may not start again that left while others waited."""
        self._waiting = WaitingCost()
        self._running = 0
        self._closed = False
        self._unannounced = 0
        self._threads = [
            threading.Thread(target=self._answer_batches, name=f"search-{slot}", daemon=True) for slot in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def submit(
        self,
        key: Hashable,
        run: Run[Work, Result],
        works: Sequence[Work],
        costs: Sequence[Cost],
        client: str = "",
        *,
        begun: float | None = None,
    ) -> list[Result]:
        """Queue the pieces of a request, and return their results.

        If the caller is cancelled or a piece fails, the pieces that still wait are dropped.

        Args:
            key: only works with equal keys, and so with one `run`, share a batch.
            run: answers a batch in a thread.
            client: name of the client, for its share of the queue.
            begun: `perf_counter()` at the begin of a request that goes on: it is not refused, and has the rest of its
                time. None: the request begins.

        Raises:
            QueueFullError, TimedOutError: the queue is full, or there is no result in time.
        """
        loop = asyncio.get_running_loop()
        pieces = deque(zip(range(len(works)), works, costs, strict=True))
        job = _Job[Work, Result](key, run, pieces, [None] * len(works), loop.create_future(), perf_counter())
        cost = costs[0] if len(costs) == 1 else _add_up(costs)
        with self._changed:
            waiting_client = self._clients.get(client)
            if waiting_client is None:  # its turn is at the present virtual time, or after the work that it has taken
                waiting_client = _Client(max(self._starts.get(client, 0), self._time), next(self._order))
            # An empty queue takes any request, so that one larger than the limits is answered too.
            mine, waiting, limit = waiting_client.load, self._waiting, self._limit
            if (
                waiting.queries
                and begun is None
                and (
                    mine.queries + cost.queries > limit.queries - waiting.queries
                    or mine.labels + cost.labels > limit.labels - waiting.labels
                    or mine.bytes + cost.bytes > limit.bytes - waiting.bytes
                )
            ):
                raise self._full(mine, cost)
            self._clients[client] = waiting_client
            (waiting_client.fresh if begun is None else waiting_client.begun).append(job)
            self._count(waiting_client, cost, 1)
        # One wake-up per turn of the loop: requests that arrived together then share a batch.
        if not self._unannounced:
            loop.call_soon(self._announce)
        self._unannounced += 1
        seconds = self._timeout if begun is None else begun + self._timeout - perf_counter()
        late = loop.call_later(seconds, self._time_out, job)
        try:
            return await job.future
        finally:
            late.cancel()
            with self._changed:
                if job.pieces:  # the caller has left, or a piece has failed
                    waiting_client = self._clients[client]
                    (waiting_client.fresh if begun is None else waiting_client.begun).remove(job)
                    for _, _, cost in job.pieces:
                        self._count(waiting_client, cost, -1)
                    job.pieces.clear()
                    if not (waiting_client.fresh or waiting_client.begun):
                        self._starts[client] = self._clients.pop(client).start

    def close(self) -> None:
        """Stop the threads after the waiting requests are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _full(self, mine: WaitingCost, cost: Cost) -> QueueFullError:
        """Create the error of the first exceeded limit."""
        for name in ("queries", "labels", "bytes"):
            limit, waits, held_by_client, new = [
                getattr(cost, name) for cost in (self._limit, self._waiting, mine, cost)
            ]
            if held_by_client + new > limit - waits:
                break
        return QueueFullError(
            f"expected at most {limit:.0f} {name} waiting, and of one client no more than are free, found {waits:.0f}, "
            f"of this client {held_by_client:.0f}, and received {new:.0f} more"
        )

    def _announce(self) -> None:
        """Wake search threads after the loop has queued all requests."""
        with self._changed:
            self._changed.notify(self._unannounced)
        self._unannounced = 0

    def _time_out(self, job: _Job[Work, Result]) -> None:
        if not job.future.done():
            job.future.set_exception(
                TimedOutError(f"expected an answer within {self._timeout:g} s, found the service too busy")
            )

    def _answer_batches(self) -> None:
        """Answer batches until the queue is closed."""
        use_one_openmp_thread()
        while batch := self._take_batch():
            # Works with equal keys have equal `run`.
            now, run = perf_counter(), batch[0][0].run
            works, waited = [work for _, _, work in batch], [now - job.since for job, _, _ in batch]
            results: list[Result | Exception] = []
            try:
                results += run(works, waited)
            # Any error must reach the callers of the batch, and must not end this thread.
            except Exception as error:
                # One work is at fault: answered one by one, only that one fails, unless the index's server is away.
                results = [error] * len(batch)
                if len(batch) > 1 and not isinstance(error, EngineUnavailableError):
                    results = [_run_alone(run, work, wait) for work, wait in zip(works, waited, strict=True)]
            with self._changed:
                self._running -= 1
                self._changed.notify()
            # Without the lock, because a gauge may be a moment old.
            self._set_depth(self._waiting.queries)
            # RuntimeError: the loop is closed, so no caller waits any more.
            with suppress(RuntimeError):
                batch[0][0].future.get_loop().call_soon_threadsafe(_deliver, batch, results)

    def _take_batch(self) -> list[_Piece[Work, Result]]:
        """Wait for the next batch: pieces with equal keys, of the client with the least start each time.

        The batch is empty once the queue is closed.
        """
        with self._changed:
            while True:
                waiting = [jobs for client in self._clients.values() for jobs in (client.fresh, client.begun) if jobs]
                oldest = min([jobs[0].since for jobs in waiting], default=None)
                if oldest is None:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                # While a batch runs, requests gather until the next batch is full or the window has passed. On an idle
                # queue, gathering would cost more than it saves (benchmarks/RESULTS.md).
                seconds = oldest + self._window - perf_counter()
                if not self._running or self._waiting.queries >= self._max_batch or seconds <= 0:
                    break
                self._changed.wait(seconds)
            self._running += 1
            batch, queries, labels, key = list[_Piece[Work, Result]](), 0, 0, None
            in_turn = [(client.start, client.order, name) for name, client in self._clients.items()]
            heapify(in_turn)
            while in_turn and queries < self._max_batch:
                start, _, name = heappop(in_turn)
                client = self._clients[name]
                goes_on = client.begun and (not client.fresh or client.turns % _TURNS == _TURNS - 1)
                jobs = client.begun if goes_on else client.fresh
                job = jobs[0]
                position, work, cost = job.pieces[0]
                turn = cost.labels + cost.extra
                fits = (
                    queries + cost.queries <= self._max_batch and labels + turn <= _LABELS_PER_QUERY * self._max_batch
                )
                fits = fits and max(turn / cost.queries, labels / max(1, queries)) <= _LARGEST_SHARED
                if batch and not (fits and job.key == key):
                    continue  # its start stays: this client comes first in the next batch
                # Virtual time is the start of the turn being served: a new client begins there [Goyal et al. 1996].
                self._time = max(self._time, start)
                # Charged at once: the client's next turn comes after others have cost as much.
                client.start, client.order = start + _LABELS_A_QUERY * cost.queries + turn, next(self._order)
                client.turns += 1
                job.pieces.popleft()
                batch.append((job, position, work))
                queries, labels, key = queries + cost.queries, labels + turn, job.key
                self._count(client, cost, -1)
                if not job.pieces:
                    jobs.popleft()
                if client.fresh or client.begun:
                    heappush(in_turn, (client.start, client.order, name))
                else:  # its next turn is no earlier
                    self._starts[name] = self._clients.pop(name).start
            if not self._clients:  # what was taken while others waited is settled
                self._time = max(self._time, *self._starts.values())
                self._starts.clear()
            return batch

    def _count(self, client: _Client[Work, Result], cost: Cost, times: int) -> None:
        """Add a cost to the waiting ones `times` times."""
        for load in (client.load, self._waiting):
            load.queries += times * cost.queries
            load.labels += times * cost.labels
            load.bytes += times * cost.bytes


def _add_up(costs: Sequence[Cost]) -> Cost:
    """Add up some costs."""
    queries, labels, bytes_, extra = zip(*costs, strict=True)
    return Cost(sum(queries), sum(labels), sum(bytes_), sum(extra))


def cut(costs: Sequence[Cost], max_batch: int) -> list[tuple[slice, Cost]]:
    """Cut a request into pieces no larger than a batch."""
    starts, sums = [0], [costs[0]]
    for position, cost in enumerate(costs[1:], start=1):
        together = _add_up([sums[-1], cost])
        if together.queries > max_batch or together.labels + together.extra > _LABELS_PER_QUERY * max_batch:
            starts.append(position)
            sums.append(cost)
        else:
            sums[-1] = together
    ends = [*starts[1:], len(costs)]
    return [(slice(start, end), cost) for start, end, cost in zip(starts, ends, sums, strict=True)]


def _run_alone(run: Run[Work, Result], work: Work, waited: float) -> Result | Exception:
    """Answer one work of a failed batch; returns its error."""
    try:
        return run([work], [waited])[0]
    except Exception as error:
        return error


def _deliver(batch: Sequence[_Piece[Work, Result]], results: Sequence[Result | Exception]) -> None:
    """Store results in the event loop; answer complete requests."""
    for (job, position, _), result in zip(batch, results, strict=True):
        if job.future.done():  # its caller has left, or another piece has failed
            continue
        if isinstance(result, Exception):
            if isinstance(result, ServingError):
                result.piece = position
            job.future.set_exception(result)
            continue
        job.results[position] = result
        if None not in job.results:
            job.future.set_result(cast("list[Result]", job.results))


class BoundedExecutor:
    """Runs blocking work in one thread, within bounds.

    Args:
        max_pending: most works that may wait or run.
        timeout: seconds that a caller waits for the result; the work itself is not interrupted.
    """

    def __init__(
        self, name: str, *, max_pending: int, timeout: float, initializer: Callable[[], None] | None = None
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)
        self._max_pending = max_pending
        self._timeout = timeout
        self._waiting = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a work and return its result; raises QueueFullError or TimedOutError.

        After a TimedOutError the work is still carried out.
        """
        if self._waiting >= self._max_pending:
            raise QueueFullError(f"expected at most {self._max_pending} such requests waiting, found as many")
        self._waiting += 1
        running = asyncio.get_running_loop().run_in_executor(self._thread, copy_context().run, work)
        running.add_done_callback(self._done)
        # Shielded: cancelling the future would count the work as done while the thread still runs it.
        try:
            return await asyncio.wait_for(asyncio.shield(running), self._timeout)
        except TimeoutError:
            raise TimedOutError(
                f"expected an answer within {self._timeout:g} s, found the disk or the service too busy; the request "
                "may still be carried out, and may be sent again"
            ) from None

    def close(self) -> None:
        """Finish the running work, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _done(self, running: asyncio.Future[Result]) -> None:
        self._waiting -= 1
        if not running.cancelled():
            running.exception()  # marks the error as seen, as asyncio warns about it if the caller has given up


def use_one_openmp_thread() -> None:
    """Keep FAISS in the calling thread: OpenMP would start a pool for every searching thread."""
    faiss.omp_set_num_threads(1)
