"""The board of the workers: what each does, and the series about them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from longtail.serving.monitoring.workers import Seat, Workers, WorkerState


def series(workers: Workers) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(workers)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_service_is_complete_when_every_worker_has_looked_or_died_once() -> None:
    workers = Workers(3)
    for worker in range(3):
        workers.start(worker, again=False)
    first, second = Seat(workers, 0), Seat(workers, 1)
    first.set_ready(True)
    assert (workers.ready, workers.complete) == (1, False)
    second.has_looked()
    assert (workers.ready, workers.complete, second.waited_for) == (1, False, False)
    workers.become(2, WorkerState.down)
    assert workers.complete
    workers.start(2, again=True)
    assert workers.complete
    third = Seat(workers, 2)
    assert (third.replaces, first.replaces) == (True, False)
    third.set_ready(True)
    third.has_looked()
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
def test_workers_give_up_what_is_above_their_share_where_one_has_too_much_or_little(
    connections: list[int], surplus: list[int]
) -> None:
    workers = Workers(len(connections))
    for worker, count in enumerate(connections):
        workers.become(worker, WorkerState.ready)
        workers.set_connections(worker, count)
    assert [workers.surplus(worker) for worker in range(len(connections))] == surplus
    named = {f'longtail_worker_connections{{worker="{worker}"}}': count for worker, count in enumerate(connections)}
    assert named.items() <= series(workers).items()


def test_workers_that_serve_nothing_have_no_share_of_the_connections() -> None:
    workers = Workers(3)
    for worker, state in enumerate((WorkerState.ready, WorkerState.ready, WorkerState.up)):
        workers.become(worker, state)
        workers.set_connections(worker, [8, 0, 20][worker])
    assert [workers.surplus(worker) for worker in range(3)] == [4, 0, 0]
    workers.become(1, WorkerState.starting)
    assert workers.surplus(0) == 0
    workers.become(0, WorkerState.down)
    assert workers.connections(0) == 0
