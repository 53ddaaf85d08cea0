"""The search queue: which requests share a batch, which wait, which are refused; and the bounded executor."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from longtail.serving.core.queue import BoundedExecutor, Cost, SearchQueue, WaitingCost
from longtail.serving.errors import QueueFullError, TimedOutError

LIMIT = Cost(100, 1_000, 10_000)


class NumberGate:
    """Doubles numbers, batch by batch, while it is open; 13 fails, and a batch with −1 breaks."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = threading.Event()
        self.open.set()

    def run(self, works: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        assert len(works) == len(waited)
        assert min(waited) >= 0
        self.batches.append(list(works))
        assert self.open.wait(10)
        if -1 in works:
            raise MemoryError("no room")
        return [ValueError("13") if work == 13 else 2 * work for work in works]


@pytest.fixture
def gate() -> NumberGate:
    return NumberGate()


class NumberQueue(SearchQueue[int, int]):
    """A queue whose batches all pass a gate."""

    def __init__(self, gate: NumberGate, **options: Any) -> None:
        super().__init__(**options)
        self.run = gate.run


def make_queue(gate: NumberGate, **changes: Any) -> NumberQueue:
    options = {"threads": 1, "window": 0.0, "max_batch": 8, "limit": LIMIT, "timeout": 5.0} | changes
    return NumberQueue(gate, **options)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def ask(queue: NumberQueue, work: int, key: str = "a", queries: int = 1, **more: Any) -> asyncio.Task[int]:
    client = more.pop("client", "")

    async def submit() -> int:
        (result,) = await queue.submit(key, queue.run, [work], [Cost(queries, **more)], client)
        return result

    return asyncio.create_task(submit())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def busy(queue: NumberQueue, gate: NumberGate) -> asyncio.Task[int]:
    """Start a batch that ends when the gate is opened."""
    gate.open.clear()
    task = ask(queue, 0)
    await until(lambda: gate.batches)
    return task


async def waiting(queue: NumberQueue, queries: int) -> None:
    await until(lambda: queue._waiting.queries == queries)


def test_closing_answers_what_waits_and_ends_the_threads(gate: NumberGate) -> None:
    before = threading.active_count()

    async def work() -> None:
        queue = make_queue(gate, threads=3)
        tasks = [await busy(queue, gate), ask(queue, 1)]
        await asyncio.sleep(0.01)
        gate.open.set()
        await asyncio.to_thread(queue.close)
        assert await asyncio.gather(*tasks) == [0, 2]

    run(work)
    assert threading.active_count() <= before + 1


def test_an_idle_queue_does_not_wait_for_its_window(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, threads=2, window=60.0)
        assert [await ask(queue, 1), await ask(queue, 2)] == [2, 4]

    run(work)
    assert gate.batches == [[1], [2]]


def test_what_arrives_during_a_search_shares_the_next(gate: NumberGate) -> None:
    depths: list[int] = []

    async def work() -> None:
        queue = make_queue(gate, max_batch=4, set_depth=depths.append)
        tasks = [await busy(queue, gate), *(ask(queue, number) for number in range(1, 10))]
        await waiting(queue, 9)
        gate.open.set()
        assert await asyncio.gather(*tasks) == [2 * number for number in range(10)]

    run(work)
    assert gate.batches == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert depths == [9, 5, 1, 0]


@pytest.mark.parametrize(("window", "max_batch"), [(0.5, 8), (60.0, 3)])
def test_a_second_thread_gathers_until_the_window_ends_or_its_batch_is_full(
    gate: NumberGate, window: float, max_batch: int
) -> None:
    async def work() -> None:
        queue = make_queue(gate, threads=2, window=window, max_batch=max_batch)
        tasks = [await busy(queue, gate)]
        for number in (1, 2, 3):
            assert len(gate.batches) == 1
            tasks.append(ask(queue, number))
            await asyncio.sleep(0.005)
        await until(lambda: len(gate.batches) == 2)
        gate.open.set()
        await asyncio.gather(*tasks)

    run(work)
    assert gate.batches == [[0], [1, 2, 3]]


def test_a_batch_has_one_key_and_takes_clients_in_turns(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=4)
        tasks = [await busy(queue, gate)]
        tasks += [ask(queue, number, client="greedy") for number in (1, 2, 3, 4)]
        tasks += [ask(queue, 5, key="b", client="other"), ask(queue, 6, queries=9, client="large")]
        tasks += [ask(queue, 7, client="polite"), ask(queue, 8, client="polite")]
        await waiting(queue, 16)
        gate.open.set()
        await asyncio.gather(*tasks)

    run(work)
    # What does not fit a batch stays before those that are answered now, and a large request has one of its own.
    assert gate.batches == [[0], [1, 7, 2, 8], [5], [6], [3, 4]]


def test_turns_are_by_cost(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=1, limit=Cost(100, 10_000_000, 10_000))
        tasks = [await busy(queue, gate)]
        for client in ("explains", "explains as well"):
            tasks += [ask(queue, number, labels=1_000, client=client) for number in (11, 12)]
        tasks += [ask(queue, number, client="polite") for number in range(1, 9)]
        await waiting(queue, 12)
        gate.open.set()
        await asyncio.gather(*tasks)

    run(work)
    # A query costs as much as 200 labels: six cheap ones for each of the two that explain, who start level.
    assert [number for (number,) in gate.batches[1:]] == [11, 11, 1, 2, 3, 4, 5, 6, 12, 12, 7, 8]


def test_a_returning_client_resumes_after_its_earlier_work(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=1, limit=Cost(100, 10_000_000, 10_000))
        tasks = [await busy(queue, gate), ask(queue, 11, labels=700, client="explains")]
        tasks += [ask(queue, number, client="polite") for number in range(1, 9)]
        await waiting(queue, 9)
        gate.open.set()
        await tasks[1]
        tasks.append(ask(queue, 12, labels=700, client="explains"))
        await asyncio.gather(*tasks)
        assert queue._starts == {}  # names of clients that are gone do not pile up

    def slowly(works: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        time.sleep(0.05)
        return NumberGate.run(gate, works, waited)

    gate.run = slowly  # type: ignore[method-assign]
    run(work)
    order = [number for (number,) in gate.batches]
    assert order[:2] == [0, 11]
    assert 5 <= order.index(12) - order.index(11) <= 6  # 900 labels are four and a half queries of 200


def test_labels_bound_a_batch_too(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=8)
        tasks = [await busy(queue, gate), *(ask(queue, number, labels=200) for number in (1, 2, 3))]
        await waiting(queue, 3)
        gate.open.set()
        await asyncio.gather(*tasks)

    run(work)
    assert gate.batches == [[0], [1, 2], [3]]


def test_a_piece_of_many_labels_shares_no_batch(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=64, limit=Cost(100, 10_000_000, 10_000))
        tasks = [await busy(queue, gate)]
        tasks += [ask(queue, number, labels=1_500 if number in (2, 5) else 20) for number in range(1, 7)]
        await waiting(queue, 6)
        gate.open.set()
        await asyncio.gather(*tasks)

    run(work)
    assert gate.batches == [[0], [1], [2], [3, 4], [5], [6]]


def test_what_goes_on_leaves_three_turns_of_four_to_what_begins(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=1)
        tasks: list[Awaitable[Any]] = [await busy(queue, gate)]
        begun = time.perf_counter()
        tasks += [queue.submit("a", queue.run, [-number], [Cost(1)], begun=begun) for number in range(2, 5)]
        gathered = asyncio.gather(*tasks, *(ask(queue, number) for number in range(1, 7)))
        await waiting(queue, 9)
        gate.open.set()
        await gathered

    run(work)
    order = [number for (number,) in gate.batches[1:]]
    assert [number for number in order if number > 0] == [1, 2, 3, 4, 5, 6]
    assert [number for number in order if number < 0] == [-2, -3, -4]
    assert order == [1, 2, 3, -2, 4, 5, 6, -3, -4]


def test_others_are_answered_between_the_pieces_of_a_request(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=2)
        tasks = [await busy(queue, gate)]
        large = asyncio.create_task(queue.submit("a", queue.run, [1, 2, 3], [Cost(2)] * 3, "large"))
        await waiting(queue, 6)
        tasks += [ask(queue, number, client="polite") for number in (7, 8, 9)]
        await waiting(queue, 9)
        gate.open.set()
        assert await large == [2, 4, 6]
        await asyncio.gather(*tasks)
        assert queue._waiting == WaitingCost()

    run(work)
    assert gate.batches == [[0], [1], [7, 8], [2], [9], [3]]


@pytest.mark.parametrize("failing", [True, False])
def test_the_other_pieces_of_a_request_that_fails_or_is_cancelled_are_dropped(gate: NumberGate, failing: bool) -> None:
    def closing_after_13(works: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        results = NumberGate.run(gate, works, waited)
        if 13 in works:
            gate.open.clear()
        return results

    gate.run = closing_after_13  # type: ignore[method-assign]

    async def work() -> None:
        queue = make_queue(gate, max_batch=1)
        tasks = [await busy(queue, gate)]
        large = asyncio.create_task(queue.submit("a", queue.run, [1, 13, 3, 4, 5], [Cost(1)] * 5))
        await waiting(queue, 5)
        if failing:
            gate.open.set()
        else:
            large.cancel()
        with pytest.raises(ValueError if failing else asyncio.CancelledError):
            await large
        assert queue._waiting == WaitingCost()
        gate.open.set()
        assert await ask(queue, 6) == 12
        await asyncio.gather(*tasks)

    run(work)
    # The thread may start the next piece before the loop has the failure.
    batches = [batch for batch in gate.batches if batch != [3]]
    assert batches == ([[0], [1], [13], [6]] if failing else [[0], [6]])


@pytest.mark.parametrize(
    ("cost", "named"),
    [({"queries": 60}, "100 queries"), ({"labels": 600}, "1000 labels"), ({"bytes": 6_000}, "10000 b")],
)
def test_a_client_may_have_as_much_waiting_as_is_free_and_another_finds_room(
    gate: NumberGate, cost: dict[str, Any], named: str
) -> None:
    half = {name: value // 2 for name, value in cost.items()}

    async def work() -> None:
        queue = make_queue(gate)
        tasks = [await busy(queue, gate), ask(queue, 1, client="greedy", **cost)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match=f"expected at most {named}"):
            await ask(queue, 2, client="greedy", **half)
        tasks.append(ask(queue, 3, client="polite", **half))
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError):
            await ask(queue, 4, client="polite", **half)
        gate.open.set()
        assert await asyncio.gather(*tasks) == [0, 2, 6]
        # A request alone is answered, however large it is.
        assert await ask(queue, 5, labels=9_999) == 10

    run(work)


def test_a_failed_work_does_not_fail_its_batch(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate)
        tasks = [await busy(queue, gate), *(ask(queue, number) for number in (12, 13, 14)), ask(queue, -1, "b")]
        await waiting(queue, 4)
        gate.open.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(item) for item in done] == ["0", "24", "13", "28", "no room"]
        assert await ask(queue, 2) == 4

    run(work)


def test_the_timeout_ends_for_what_waits_and_for_what_runs(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, timeout=0.1)
        done = await asyncio.gather(await busy(queue, gate), ask(queue, 1), return_exceptions=True)
        assert [type(item) for item in done] == [TimedOutError, TimedOutError]
        assert queue._waiting == WaitingCost()
        gate.open.set()
        assert await ask(queue, 2) == 4

    run(work)
    assert gate.batches == [[0], [2]]


def test_the_works_of_cancelled_callers_are_dropped_and_disturb_no_batch(gate: NumberGate) -> None:
    async def work() -> None:
        queue = make_queue(gate, max_batch=2)
        tasks = [await busy(queue, gate), *(ask(queue, number) for number in (1, 2, 3, 4))]
        await waiting(queue, 4)
        for remaining in (tasks[0], tasks[1], tasks[3]):
            remaining.cancel()
        await waiting(queue, 2)
        gate.open.set()
        assert await asyncio.gather(tasks[2], tasks[4]) == [4, 8]

    run(work)
    assert gate.batches == [[0], [2, 4]]


def test_excess_work_is_refused_and_slow_work_times_out() -> None:
    gate, done = threading.Event(), []

    async def work() -> None:
        executor = BoundedExecutor("test", max_pending=2, timeout=0.1)
        slow = [executor.run(lambda: done.append(gate.wait(10))), executor.run(lambda: done.append(True))]
        tasks = [asyncio.create_task(item) for item in slow]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="expected at most 2"):
            await executor.run(lambda: None)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TimedOutError, TimedOutError]
        gate.set()
        await until(lambda: len(done) == 2)
        assert await executor.run(lambda: "again") == "again"
        executor.close()

    run(work)
