"""The board of the workers: what each does, and the series about them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


_HOLDING = """
import mmap, os
from longtail.serving.monitoring.workers import Seat, Workers

workers = Workers()
Seat(workers, 0)

def show():
    print(*(sample.value for metric in workers.collect() for sample in metric.samples[:1]
            if metric.name.endswith(("resident_bytes", "private_bytes", "open_files"))))

show()
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
block = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(block), mmap.PAGESIZE):
    block[page] = 1
show()
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what a process holds")
def test_what_a_worker_holds_is_what_the_system_says() -> None:
    """In a process of its own: what ran in this one before may take memory, or give it back, meanwhile."""
    said = subprocess.run([sys.executable, "-c", _HOLDING], check=True, capture_output=True, text=True).stdout
    before, after = ([float(value) for value in line.split()] for line in said.splitlines())
    resident, private, files = (then - first for first, then in zip(before, after, strict=True))
    assert files == 20
    assert 35 << 20 < private < 60 << 20
    assert 35 << 20 < resident < 60 << 20
