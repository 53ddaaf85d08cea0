"""Blocking work beside the searches: in a thread of its own, with a bound on what waits and on how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from longtail.serving.errors import QueueFullError, TimedOutError

Result = TypeVar("Result")


class Apart:
    """One thread that does one thing after the other for callers in an event loop.

    Args:
        name: the thread's.
        most: works that wait, at most.
        patience: seconds that a caller waits for its result; the work goes on.
        begin: called first in the thread.
    """

    def __init__(self, name: str, *, most: int, patience: float, begin: Callable[[], None] | None = None) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=begin)
        self._most = most
        self._patience = patience
        self._waiting = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """The work's result, or whatever it raises.

        Raises:
            QueueFullError: too much waits already.
            TimedOutError: it takes too long; it is done all the same, unless the process ends.
        """
        if self._waiting >= self._most:
            raise QueueFullError(f"expected at most {self._most} such requests waiting, found as many")
        self._waiting += 1
        under_way = asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)
        under_way.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(under_way), self._patience)
        except TimeoutError:
            raise TimedOutError(
                f"expected an answer within {self._patience:g} s, found the disk or the service too busy; "
                "what was asked may be done yet, and may be asked again"
            ) from None

    def close(self) -> None:
        """End the thread when it has finished what it does."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _done(self, under_way: asyncio.Future[Result]) -> None:
        self._waiting -= 1
        if not under_way.cancelled():
            under_way.exception()  # seen, even if its caller has given up
