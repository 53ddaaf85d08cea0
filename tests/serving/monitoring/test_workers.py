"""The board of the workers: what each does, and the series about them."""

from __future__ import annotations

import pytest

from longtail.serving.monitoring.workers import Workers, WorkerSlot, WorkerState


def series(workers: Workers) -> dict[str, float]:
    samples = (sample for metric in WorkerSlot(workers, 0).collect(8) for sample in metric.samples)
    return {f"{sample.name}{sample.labels}": sample.value for sample in samples}


def test_service_is_complete_after_every_first_start() -> None:
    workers = Workers(3)
    for worker in range(3):
        workers.start(worker, again=False)
    first, second = WorkerSlot(workers, 0), WorkerSlot(workers, 1)
    first.set_ready(True)
    assert (workers.ready, workers.complete) == (1, False)
    second.end_start()
    assert (workers.ready, workers.complete, second.is_starting) == (1, False, False)
    workers.set_state(2, WorkerState.down)
    assert workers.complete
    workers.start(2, again=True)
    assert workers.complete
    third = WorkerSlot(workers, 2)
    assert (third.replaces, first.replaces) == (True, False)
    third.set_ready(True)
    third.end_start()
    assert (workers.ready, workers.state(2), workers.state(1)) == (2, WorkerState.ready, WorkerState.up)
    assert (workers.ready, workers.restarts(2)) == (2, 1)


@pytest.mark.parametrize(
    ("connections", "surplus"),
    [
        ([12, 0], [6, 0]),
        ([10, 2], [4, 0]),
        ([9, 3], [0, 0]),  # one and a half times a share: chance
        ([2, 0], [0, 0]),
        ([4, 0], [2, 0]),
        ([1000, 400], [0, 0]),
        ([12, 0, 0, 0], [9, 0, 0, 0]),
        ([6, 6, 6, 6, 0], [2, 2, 2, 2, 0]),  # a successor; none holds one and a half times a share
        ([7, 5, 6, 6, 3], [0, 0, 0, 0, 0]),
        ([0, 0], [0, 0]),
        ([5], [0]),
    ],
)
def test_workers_give_up_connections_above_their_share(connections: list[int], surplus: list[int]) -> None:
    workers = Workers(len(connections))
    for worker, count in enumerate(connections):
        workers.set_state(worker, WorkerState.ready)
        workers.set_connections(worker, count)
    assert [workers.surplus(worker) for worker in range(len(connections))] == surplus
    named = {f"longtail_worker_connections{{'worker': '{worker}'}}": count for worker, count in enumerate(connections)}
    assert named.items() <= series(workers).items()


def test_idle_workers_have_no_share_of_connections() -> None:
    workers = Workers(3)
    for worker, state in enumerate((WorkerState.ready, WorkerState.ready, WorkerState.up)):
        workers.set_state(worker, state)
        workers.set_connections(worker, [8, 0, 20][worker])
    assert [workers.surplus(worker) for worker in range(3)] == [4, 0, 0]
    workers.set_state(1, WorkerState.starting)
    assert workers.surplus(0) == 0
    workers.set_state(0, WorkerState.down)
    assert workers.connections(0) == 0
