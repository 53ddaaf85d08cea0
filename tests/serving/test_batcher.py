"""Micro-batching: who shares a batch, who waits, who is turned away, and that one's failure is one's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving.batcher import Batcher
from serving.errors import QueueFullError, TimedOutError

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


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def batcher(gate: Gate, threads: ThreadPoolExecutor, **changes: Any) -> Batcher[int, int]:
    options = {"slots": 1, "window": 0.0, "most": 8, "limit": 100, "patience": 5.0} | changes
    return Batcher(gate.run, threads, **options)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_an_idle_batcher_does_not_wait_for_company(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        # A window that nobody would sit out: the first starts at once all the same.
        batches = batcher(gate, threads, slots=2, window=60.0)
        assert await batches.submit("a", 1, 1) == 2
        assert await batches.submit("a", 2, 1) == 4

    run(work)
    assert gate.batches == [("a", [1]), ("a", [2])]


def test_what_arrives_during_a_search_shares_the_next(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, most=4)
        gate.open.clear()
        futures = [batches.submit("a", number, 1) for number in range(10)]
        assert batches.depth == 9
        gate.open.set()
        assert await asyncio.gather(*futures) == [2 * number for number in range(10)]
        assert batches.depth == 0

    run(work)
    assert [len(works) for _, works in gate.batches] == [1, 4, 4, 1]


def test_a_second_slot_gathers_for_the_window_and_no_longer(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, slots=2, window=0.05)
        gate.open.clear()
        futures = [batches.submit("a", 0, 1)]
        for number in (1, 2, 3):
            futures.append(batches.submit("a", number, 1))
            await asyncio.sleep(0.005)
        assert len(gate.batches) == 1
        await until(lambda: len(gate.batches) == 2)
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1, 2, 3])]


def test_a_full_batch_does_not_sit_the_window_out(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, slots=2, window=60.0, most=3)
        gate.open.clear()
        futures = [batches.submit("a", number, 1) for number in range(4)]
        await until(lambda: len(gate.batches) == 2)
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1, 2, 3])]


def test_batches_are_of_one_key_and_keep_the_order_of_each(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads)
        gate.open.clear()
        futures = [batches.submit(key, number, 1) for number, key in enumerate("xabab")]
        gate.open.set()
        assert await asyncio.gather(*futures) == [0, 2, 4, 6, 8]

    run(work)
    assert gate.batches == [("x", [0]), ("a", [1, 3]), ("b", [2, 4])]


def test_work_larger_than_a_batch_runs_alone(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, most=8)
        gate.open.clear()
        futures = [batches.submit("a", 0, 1), batches.submit("a", 1, 50), batches.submit("a", 2, 1)]
        gate.open.set()
        await asyncio.gather(*futures)

    run(work)
    assert gate.batches == [("a", [0]), ("a", [1]), ("a", [2])]


def test_beyond_the_limit_work_is_refused_and_what_waits_is_answered(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, limit=5)
        gate.open.clear()
        futures = [batches.submit("a", 0, 1), batches.submit("a", 1, 3)]
        with pytest.raises(QueueFullError, match="expected at most 5 queries waiting, found 3 and received 3 more"):
            batches.submit("a", 2, 3)
        futures.append(batches.submit("a", 3, 2))
        gate.open.set()
        assert await asyncio.gather(*futures) == [0, 2, 6]
        assert await batches.submit("a", 4, 5) == 8

    run(work)


def test_a_failure_is_one_works_own(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads)
        gate.open.clear()
        futures = [batches.submit("a", number, 1) for number in (0, 12, 13, 14)]
        gate.open.set()
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [str(each) for each in done] == ["0", "24", "13", "28"]

    run(work)


def test_a_batch_that_breaks_fails_its_works_and_no_other(threads: ThreadPoolExecutor) -> None:
    def broken(key: Any, works: Sequence[int], _: Sequence[float]) -> list[int | Exception]:
        if key == "broken":
            raise MemoryError("no room")
        return list(works)

    async def work() -> None:
        batches = Batcher(broken, threads, slots=1, window=0.0, most=8, limit=100, patience=5.0)
        with pytest.raises(MemoryError):
            await batches.submit("broken", 1, 1)
        assert await batches.submit("whole", 2, 1) == 2

    run(work)


def test_patience_ends_for_what_waits_and_for_what_runs(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads, patience=0.1)
        gate.open.clear()
        futures = [batches.submit("a", 0, 1), batches.submit("a", 1, 1)]
        done = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(each) for each in done] == [TimedOutError, TimedOutError]
        assert batches.depth == 0
        gate.open.set()
        assert await batches.submit("a", 2, 1) == 4

    run(work)
    assert gate.batches == [("a", [0]), ("a", [2])]


def test_a_client_that_left_does_not_disturb_its_batch(gate: Gate, threads: ThreadPoolExecutor) -> None:
    async def work() -> None:
        batches = batcher(gate, threads)
        gate.open.clear()
        futures = [batches.submit("a", number, 1) for number in range(3)]
        futures[1].cancel()
        gate.open.set()
        assert await futures[0] == 0
        assert await futures[2] == 4

    run(work)
