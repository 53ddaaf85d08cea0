"""Blocking work beside the searches: one after the other, bounded in number and time."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from longtail.serving.core.executor import BoundedExecutor
from longtail.serving.errors import QueueFullError, TimedOutError


def test_results_and_errors_are_the_callers_own() -> None:
    async def work() -> None:
        executor = BoundedExecutor("test", max_pending=4, timeout=5)
        results = await asyncio.gather(*(executor.run(lambda n=n: 6 / n) for n in (1, 2, 0, 3)), return_exceptions=True)
        assert [str(result) for result in results] == ["6.0", "3.0", "division by zero", "2.0"]
        executor.close()

    asyncio.run(work())


def test_too_much_is_refused_and_too_long_is_given_up_but_done() -> None:
    gate, done = threading.Event(), []

    async def work() -> None:
        executor = BoundedExecutor("test", max_pending=2, timeout=0.1)
        slow = [executor.run(lambda: done.append(gate.wait(10))), executor.run(lambda: done.append(True))]
        tasks = [asyncio.create_task(each) for each in slow]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="expected at most 2"):
            await executor.run(lambda: None)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimedOutError, TimedOutError]
        gate.set()
        while len(done) < 2:
            await asyncio.sleep(0.001)
        assert await executor.run(lambda: "again") == "again"
        executor.close()

    asyncio.run(work())


def test_the_thread_knows_which_request_it_works_for() -> None:
    request: ContextVar[str] = ContextVar("request")

    async def work() -> None:
        executor = BoundedExecutor("test", max_pending=2, timeout=5)
        request.set("r-1")
        assert await executor.run(request.get) == "r-1"
        executor.close()

    asyncio.run(work())
