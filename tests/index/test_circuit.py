"""Test the circuit breaker of Milvus requests on a fake clock."""

from __future__ import annotations

from longtail.index.search.milvus_server import Circuit
from tests.clock import Clock


def failing(circuit: Circuit, times: int) -> None:
    for _ in range(times):
        wait, began = circuit.admit(1.0)
        assert wait == 0
        circuit.failed(began)


def test_failures_open_the_circuit_and_a_success_closes_it() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    failing(circuit, 2)
    circuit.succeeded()
    failing(circuit, 2)
    assert not circuit.open
    failing(circuit, 1)
    assert circuit.open
    assert circuit.admit(1.0)[0] == 0.5
    clock.now += 0.5
    assert circuit.admit(1.0)[0] == 0
    circuit.succeeded()
    assert not circuit.open
    assert [circuit.admit(1.0)[0] for _ in range(5)] == [0] * 5


def test_only_one_request_is_the_trial() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    failing(circuit, 3)
    clock.now += 0.5
    assert circuit.admit(2.0)[0] == 0
    assert circuit.admit(2.0)[0] == 2
    clock.now += 2  # nobody knows what became of it
    assert circuit.admit(2.0)[0] == 0


def test_concurrent_failures_open_the_circuit_once() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    begun = [circuit.admit(1.0)[1] for _ in range(16)]
    clock.now += 1
    for began in begun:
        circuit.failed(began)
    assert circuit.admit(1.0)[0] == 0.5
    clock.now += 0.5
    assert circuit.admit(1.0)[0] == 0
    circuit.failed(begun[0])  # late, and says nothing of the one that tries
    assert circuit.admit(1.0)[0] == 1


def test_failed_trials_lengthen_the_wait_up_to_a_limit() -> None:
    clock = Clock()
    circuit = Circuit(clock)
    failing(circuit, 3)
    waits = []
    for _ in range(6):
        wait = circuit.admit(1.0)[0]
        waits.append(wait)
        clock.now += wait
        failing(circuit, 1)
    assert waits == [0.5, 1, 2, 4, 5, 5]
