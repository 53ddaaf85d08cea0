"""A polite client beside a greedy one: how long its answers take, alone and in that company.

    python -m benchmarks.fairness RELEASES [--python OTHER/.venv/bin/python] [--seconds 6]

One worker. The polite client asks one query for 10 labels, one request after the other with a pause between; the
greedy one, with another key and in a process of its own, has 16 requests of 256 queries for 100 labels under way all
the time. Alone, beside it, alone, beside it, and so on. Other programs on the machine count too: of all rounds those
are taken, a half, in which they had least CPU time; how much is printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
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


def _features(port: int) -> object:
    with urlopen(Request(f"http://127.0.0.1:{port}/v1/release", headers={"X-API-Key": _POLITE})) as answer:
        return json.load(answer)["example"]


def _body(features: object, queries: int, k: int) -> bytes:
    return json.dumps({"queries": [{"features": features, "k": k}] * queries}).encode()


def _be_greedy(
    port: int, message: bytes, seconds: float, results: multiprocessing.Queue[tuple[int, float, int]]
) -> None:
    results.put(load(port, [message], _CONNECTIONS, seconds))


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
    """What one round saw: milliseconds, refusals, the greedy one's queries a second, and cores that others took."""

    p50: float
    p99: float
    refused: int
    queries: float
    others: float


def _busy_seconds() -> float:
    """CPU time of all programs since the machine was started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds(service: Served) -> float:
    """CPU time of this process, of those it has waited for, and of the service."""
    of = os.times()
    return of.user + of.system + of.children_user + of.children_system + service.cpu_seconds


def _round(service: Served, polite: bytes, greedy: bytes | None, seconds: float) -> Round:
    results: multiprocessing.Queue[tuple[int, float, int]] = multiprocessing.Queue()
    queries, began = 0.0, time.perf_counter()
    busy, own = _busy_seconds(), _own_seconds(service)
    if greedy is not None:
        process = multiprocessing.Process(target=_be_greedy, args=(service.port, greedy, seconds + 0.5, results))
        process.start()
        time.sleep(0.3)
    took, refused = _be_polite(service.port, polite, seconds)
    if greedy is not None:
        done, whole, not_ok = results.get()
        process.join()
        queries = (done - not_ok) * _QUERIES / whole
    others = (_busy_seconds() - busy - _own_seconds(service) + own) / (time.perf_counter() - began)
    p50, p99 = np.quantile(took, [0.5, 0.99])
    return Round(float(p50), float(p99), refused, queries, others)


def main(
    releases: Path,
    python: Annotated[str, typer.Option(help="Python of the environment whose service is measured.")] = sys.executable,
    seconds: float = 3,
    rounds: int = 6,
) -> None:
    """Measure and print."""
    with TemporaryDirectory() as state, served(
        python, releases, Path(state), api_keys=f"{_POLITE},{_GREEDY}"
    ) as service:  # fmt: skip
        features = _features(service.port)
        polite = request(_body(features, 1, 10), X_API_Key=_POLITE)
        greedy = request(_body(features, _QUERIES, _K), X_API_Key=_GREEDY)
        _round(service, polite, greedy, 1)
        pairs = [
            (_round(service, polite, None, seconds), _round(service, polite, greedy, seconds)) for _ in range(rounds)
        ]
    pairs.sort(key=lambda pair: pair[0].others + pair[1].others)
    pairs = pairs[: (rounds + 1) // 2]
    print(f"{releases}: one worker, medians of {len(pairs)} of {rounds} rounds of {seconds:g} s")
    print(f"{'polite client':20}{'p50 ms':>9}{'p99 ms':>9}{'not 200':>9}{'greedy queries/s':>18}{'others, cores':>15}")
    for name, of in (("alone", [pair[0] for pair in pairs]), ("beside the greedy", [pair[1] for pair in pairs])):
        p50, p99 = statistics.median(r.p50 for r in of), statistics.median(r.p99 for r in of)
        queries, others = statistics.median(r.queries for r in of), statistics.median(r.others for r in of)
        print(f"{name:20}{p50:9.2f}{p99:9.2f}{sum(r.refused for r in of):9}{queries:18,.0f}{others:15.2f}")
    ratio = statistics.median(beside.p99 / alone.p99 for alone, beside in pairs)
    print(f"p99 beside / alone: {ratio:.1f}")


if __name__ == "__main__":
    typer.run(main)
