"""A polite client beside a greedy one: how long its answers take, alone and in that company.

    python -m benchmarks.fairness RELEASES [--python OTHER/.venv/bin/python] [--seconds 6]

One worker. The polite client asks one query for 10 labels, one request after the other with a pause between; the
greedy one, with another key and in a process of its own, has 16 requests of 256 queries for 100 labels under way all
the time. In turns: alone; beside it; beside it with a service of its own, which shares nothing with the polite one's
but the machine; and beside a process that takes the CPU time that the greedy client took to send and read, and sends
nothing. So what the last two rows say is the machine's share, and the rest the service's. Other programs on the machine
count too: of all rounds those are taken, a half, in which they had least CPU time; how much is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.request import Request, urlopen

import numpy as np
import typer

from benchmarks.paired_rate import Client, Served, load, request, served

_POLITE, _GREEDY = "polite-0123456789abcdef", "greedy-0123456789abcdef"
_QUERIES, _K, _CONNECTIONS = 256, 100, 16
_PAUSE_SECONDS = 0.01
_TURN_SECONDS = 0.002
_ALONE, _BESIDE = "alone", "beside the greedy"
_COLUMNS = {
    "p50 ms": 9, "p99 ms": 9, "/ alone": 9, "not 200": 9, "company queries/s": 18, "cores": 9, "others": 9,
}  # fmt: skip


def _features(port: int) -> object:
    with urlopen(Request(f"http://127.0.0.1:{port}/v1/release", headers={"X-API-Key": _POLITE})) as answer:
        return json.load(answer)["example"]


def _body(features: object, queries: int, k: int) -> bytes:
    return json.dumps({"queries": [{"features": features, "k": k}] * queries}).encode()


_Results = SimpleQueue[tuple[float, float]]
"""Queries answered a second, and the share of a core that it took."""
_Company = Callable[[float, _Results], None]
"""What is beside the polite client for some seconds."""


def _be_greedy(port: int, message: bytes, seconds: float, results: _Results) -> None:
    began = _own_seconds()
    done, whole, refused = load(port, [message], _CONNECTIONS, seconds)
    results.put(((done - refused) * _QUERIES / whole, (_own_seconds() - began) / whole))


def _be_busy(share: float, seconds: float, results: _Results) -> None:
    """Take this share of a core, some of every turn."""
    until, began = time.perf_counter() + seconds, _own_seconds()
    while (turn := time.perf_counter()) < until:
        while time.perf_counter() - turn < share * _TURN_SECONDS:
            pass
        time.sleep((1 - share) * _TURN_SECONDS)
    results.put((0.0, (_own_seconds() - began) / seconds))


def _be_polite(port: int, message: bytes, seconds: float) -> tuple[list[float], int]:
    """Milliseconds of each answer, and how many were not 200."""
    client, took, refused = Client(port), [], 0
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        client.send(message)
        while (status := client.read()) is None:
            pass
        took.append(1e3 * (time.perf_counter() - began))
        refused += status != 200
        time.sleep(_PAUSE_SECONDS)
    client.socket.close()
    return took, refused


@dataclass(frozen=True)
class Round:
    """What one round saw: milliseconds, refusals, the company's queries a second and cores, and cores others took."""

    p50: float
    p99: float
    refused: int
    queries: float
    company: float
    others: float


def _busy_seconds() -> float:
    """CPU time of all programs since the machine was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds(*services: Served) -> float:
    """CPU time of this process, of those it has waited for, and of services."""
    of = os.times()
    own = of.user + of.system + of.children_user + of.children_system
    return own + sum(service.cpu_seconds for service in services)


def _round(services: Sequence[Served], polite: bytes, company: _Company | None, seconds: float) -> Round:
    results: _Results = multiprocessing.SimpleQueue()
    queries, share, began = 0.0, 0.0, time.perf_counter()
    busy, own = _busy_seconds(), _own_seconds(*services)
    if company is not None:
        process = multiprocessing.Process(target=company, args=(seconds + 0.5, results))
        process.start()
        time.sleep(0.3)
    took, refused = _be_polite(services[0].port, polite, seconds)
    if company is not None:
        queries, share = results.get()
        process.join()
    others = (_busy_seconds() - busy - _own_seconds(*services) + own) / (time.perf_counter() - began)
    p50, p99 = np.quantile(took, [0.5, 0.99])
    return Round(float(p50), float(p99), refused, queries, share, others)


def _measure(services: Sequence[Served], seconds: float, rounds: int) -> list[dict[str, Round]]:
    """Rounds of each kind, in turns; the polite client's service is the first."""
    features = _features(services[0].port)
    polite = request(_body(features, 1, 10), X_API_Key=_POLITE)
    greedy = request(_body(features, _QUERIES, _K), X_API_Key=_GREEDY)
    here, elsewhere = (partial(_be_greedy, service.port, greedy) for service in services)
    for company in (here, elsewhere):
        _round(services, polite, company, 1)
    measured = []
    for _ in range(rounds):
        of: dict[str, Round] = {}
        for name, company in ((_ALONE, None), (_BESIDE, here), ("greedy elsewhere", elsewhere)):
            of[name] = _round(services, polite, company, seconds)
        share = of[_BESIDE].company
        of["busy process"] = _round(services, polite, partial(_be_busy, share), seconds)
        measured.append(of)
    return measured


def main(
    releases: Path,
    python: Annotated[str, typer.Option(help="Python of the environment whose service is measured.")] = sys.executable,
    seconds: float = 3,
    rounds: int = 6,
) -> None:
    """Measure and print."""
    with ExitStack() as stack:
        services = [
            stack.enter_context(
                served(
                    python,
                    releases,
                    Path(stack.enter_context(TemporaryDirectory())),
                    api_keys=f"{_POLITE},{_GREEDY}",
                )
            )
            for _ in range(2)
        ]
        measured = _measure(services, seconds, rounds)
    measured.sort(key=lambda of: sum(each.others for each in of.values()))
    measured = measured[: (rounds + 1) // 2]
    print(f"{releases}: one worker, medians of {len(measured)} of {rounds} rounds of {seconds:g} s")
    columns = "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())
    print(f"{'polite client':20}{columns}")
    for name in measured[0]:
        of = [each[name] for each in measured]
        ratio = statistics.median(each[name].p99 / each[_ALONE].p99 for each in measured)
        p50, p99, queries, company, others = (
            statistics.median(getattr(each, field) for each in of)
            for field in ("p50", "p99", "queries", "company", "others")
        )
        print(
            f"{name:20}{p50:9.2f}{p99:9.2f}{ratio:9.1f}{sum(each.refused for each in of):9}"
            f"{queries:18,.0f}{company:9.2f}{others:9.2f}"
        )


if __name__ == "__main__":
    typer.run(main)
