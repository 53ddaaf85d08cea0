"""A thread for blocking work that is not a search, with bounds on how much waits for it and on how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import faiss

from longtail.serving.errors import QueueFullError, TimedOutError

Result = TypeVar("Result")


class BoundedExecutor:
    """Runs blocking work of callers in an event loop, one piece after the other, in one thread.

    Args:
        name: the thread's.
        max_pending: works that wait, at most.
        timeout: seconds that a caller waits for its result; the work goes on.
        initializer: called first in the thread.
    """

    def __init__(
        self, name: str, *, max_pending: int, timeout: float, initializer: Callable[[], None] | None = None
    ) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initializer)
        self._max_pending = max_pending
        self._timeout = timeout
        self._waiting = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """The work's result, or whatever it raises.

        Raises:
            QueueFullError: too much waits already.
            TimedOutError: it takes too long; it is done all the same, unless the process ends.
        """
        if self._waiting >= self._max_pending:
            raise QueueFullError(f"expected at most {self._max_pending} such requests waiting, found as many")
        self._waiting += 1
        under_way = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        under_way.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(under_way), self._timeout)
        except TimeoutError:
            raise TimedOutError(
                f"expected an answer within {self._timeout:g} s, found the disk or the service too busy; "
                "what was asked may be done yet, and may be asked again"
            ) from None

    def close(self) -> None:
        """End the thread when it has finished what it does."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _done(self, under_way: asyncio.Future[Result]) -> None:
        self._waiting -= 1
        if not under_way.cancelled():
            under_way.exception()  # seen, even if its caller has given up


def one_openmp_thread() -> None:
    """Keep FAISS in the calling thread: OpenMP would start a pool for each thread that searches."""
    faiss.omp_set_num_threads(1)
