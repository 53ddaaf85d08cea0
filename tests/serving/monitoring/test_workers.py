"""The board of the workers: what each does, and the series about them."""

from __future__ import annotations

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
