"""Micro-batching: who shares a batch, who waits, who is turned away, and that one's failure is one's own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from longtail.serving.core.batcher import Batcher
from longtail.serving.errors import QueueFullError, TimedOutError

Batches = list[tuple[str, list[int]]]


class Gate:
    """Doubles numbers, batch by batch, when it is let; one of 13 fails."""

    def __init__(self) -> None:
        self.batches: Batches = []
        self.open = threading.Event()
        self.open.set()

    def run(self, key: Any, works: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        assert len(works) == len(waited)
        assert min(waited) >= 0
        self.batches.append((key, list(works)))
        assert self.open.wait(10)
        return [ValueError("13") if work == 13 else 2 * work for work in works]


@pytest.fixture
def gate() -> Gate:
    return Gate()


def batcher(gate: Gate, **changes: Any) -> Batcher[int, int]:
    options = {"threads": 1, "window": 0.0, "max_batch": 8, "max_pending": 100, "timeout": 5.0} | changes
    return Batcher(gate.run, **options)


def test_closing_answers_what_waits_and_ends_the_threads(gate: Gate) -> None:
    before = threading.active_count()

    async def work() -> None:
        batches = batcher(gate, threads=3)
        futures = [await busy(batches, gate), batches.submit("a", 1, 1)]
        gate.open.set()
        await asyncio.to_thread(batches.close)
        assert await asyncio.gather(*futures) == [0, 2]

    run(work)
    assert threading.active_count() <= before + 1


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def busy(batches: Batcher[int, int], gate: Gate, key: str = "a", work: int = 0) -> asyncio.Future[int]:
    """A batch under way that ends when the gate is opened."""
    gate.open.clear()
    future = batches.submit(key, work, 1)
    await until(lambda: len(gate.batches) == 1)
    return future


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_requests_that_the_event_loop_reads_together_share_a_batch(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate)
        futures = []
        for number in range(8):
            futures.append(batches.submit("a", number, 1))
            time.sleep(0.01)  # reads the next: a thread that was woken by now would search the first alone
        assert await asyncio.gather(*futures) == [0, 2, 4, 6, 8, 10, 12, 14]
        assert gate.batches == [("a", [0, 1, 2, 3, 4, 5, 6, 7])]

    run(work)


def test_requests_read_together_that_share_no_batch_take_a_thread_each(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, threads=2)
        await asyncio.sleep(0.05)
        gate.open.clear()
        futures = [batches.submit(key, 1, 1) for key in "ab"]
        await asyncio.wait_for(until(lambda: len(gate.batches) == 2), 5)
        gate.open.set()
        assert await asyncio.gather(*futures) == [2, 2]
        batches.close()

    run(work)


def test_an_idle_batcher_does_not_wait_for_company(gate: Gate) -> None:
    async def work() -> None:
        # A window that nobody would sit out: the first starts at once all the same.
        batches = batcher(gate, threads=2, window=60.0)
        assert await batches.submit("a", 1, 1) == 2
        assert await batches.submit("a", 2, 1) == 4

    run(work)
    assert gate.batches == [("a", [1]), ("a", [2])]


def test_what_arrives_during_a_search_shares_the_next(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, max_batch=4)
        futures = [await busy(batches, gate), *(batches.submit("a", number, 1) for number in range(1, 10))]
        assert batches.depth == 9
        gate.open.set()
        assert await asyncio.gather(*futures) == [2 * number for number in range(10)]
        assert batches.depth == 0

    run(work)
    assert [len(works) for _, works in gate.batches] == [1, 4, 4, 1]


def test_a_second_slot_gathers_for_the_window_and_no_longer(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, threads=2, window=0.5)
        futures = [await busy(batches, gate)]
        for number in (1, 2, 3):
            futures.append(batches.submit("a", number, 1))
            await asyncio.sleep(0.005)
        assert len(gate.batches) == 1
        await until(lambda: len(gate.batches) == 2)
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1, 2, 3])]


def test_a_full_batch_does_not_sit_the_window_out(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, threads=2, window=60.0, max_batch=3)
        futures = [await busy(batches, gate), *(batches.submit("a", number, 1) for number in range(1, 4))]
        await until(lambda: len(gate.batches) == 2)
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1, 2, 3])]


def test_batches_are_of_one_key_and_keep_the_order_of_each(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate)
        futures = [await busy(batches, gate, "x")]
        futures += [batches.submit(key, number, 1) for number, key in enumerate("abab", 1)]
        gate.open.set()
        assert await asyncio.gather(*futures) == [0, 2, 4, 6, 8]

    run(work)
    assert gate.batches == [("x", [0]), ("a", [1, 3]), ("b", [2, 4])]


def test_work_larger_than_a_batch_runs_alone(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, max_batch=8)
        futures = [await busy(batches, gate), batches.submit("a", 1, 50), batches.submit("a", 2, 1)]
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1]), ("a", [2])]


def test_beyond_the_limit_work_is_refused_and_what_waits_is_answered(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, max_pending=5)
        futures = [await busy(batches, gate), batches.submit("a", 1, 3)]
        with pytest.raises(QueueFullError, match="expected at most 5 queries waiting, found 3 and received 3 more"):
            batches.submit("a", 2, 3)
        futures.append(batches.submit("a", 3, 2))
        gate.open.set()
        assert await asyncio.gather(*futures) == [0, 2, 6]
        assert await batches.submit("a", 4, 5) == 8

    run(work)


def test_a_failure_is_one_works_own(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate)
        futures = [await busy(batches, gate), *(batches.submit("a", number, 1) for number in (12, 13, 14))]
        gate.open.set()
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [str(each) for each in done] == ["0", "24", "13", "28"]

    run(work)


def test_a_batch_that_breaks_fails_its_works_and_no_other() -> None:
    def broken(key: Any, works: Sequence[int], _: Sequence[float]) -> list[int | Exception]:
        if key == "broken":
            raise MemoryError("no room")
        return list(works)

    async def work() -> None:
        batches = Batcher(broken, threads=1, window=0.0, max_batch=8, max_pending=100, timeout=5.0)
        with pytest.raises(MemoryError):
            await batches.submit("broken", 1, 1)
        assert await batches.submit("whole", 2, 1) == 2

    run(work)


def test_the_timeout_ends_for_what_waits_and_for_what_runs(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, timeout=0.1)
        futures = [await busy(batches, gate), batches.submit("a", 1, 1)]
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(each) for each in done] == [TimedOutError, TimedOutError]
        assert batches.depth == 0
        gate.open.set()
        assert await batches.submit("a", 2, 1) == 4

    run(work)
    assert gate.batches == [("a", [0]), ("a", [2])]


def test_what_clients_that_left_have_waiting_is_dropped(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate, max_batch=1, max_pending=3)
        futures = [await busy(batches, gate), *(batches.submit("a", number, 1) for number in (1, 2, 3))]
        for left in (futures[0], futures[1], futures[3]):
            left.cancel()
        batches.drop_left()
        assert batches.depth == 1
        futures += [batches.submit("a", number, 1) for number in (4, 5)]
        gate.open.set()
        assert await asyncio.gather(futures[2], *futures[4:]) == [4, 8, 10]

    run(work)
    assert [works for _, works in gate.batches] == [[0], [2], [4], [5]]


def test_a_client_that_left_does_not_disturb_its_batch(gate: Gate) -> None:
    async def work() -> None:
        batches = batcher(gate)
        futures = [await busy(batches, gate), *(batches.submit("a", number, 1) for number in (1, 2))]
        futures[1].cancel()
        gate.open.set()
        assert await futures[0] == 0
        assert await futures[2] == 4

    run(work)
