"""A polite client beside a greedy one: how long its answers take, alone and in that company.

    python -m benchmarks.fairness RELEASES [--python OTHER/.venv/bin/python] [--seconds 6]

One worker. The polite client asks one query for 10 labels, one request after the other with a pause between; the
greedy one, with another key and in a process of its own, has 16 requests of 256 queries for 100 labels under way all
the time. Alone, beside it, alone, beside it: medians over the rounds, as other programs on the machine count too.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
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


def _round(service: Served, polite: bytes, greedy: bytes | None, seconds: float) -> tuple[float, float, int, float]:
    """p50 and p99 of the polite client, its refusals, and the greedy one's answered queries a second."""
    results: multiprocessing.Queue[tuple[int, float, int]] = multiprocessing.Queue()
    queries = 0.0
    if greedy is not None:
        process = multiprocessing.Process(target=_be_greedy, args=(service.port, greedy, seconds + 1, results))
        process.start()
        time.sleep(0.7)
    took, refused = _be_polite(service.port, polite, seconds)
    if greedy is not None:
        done, whole, not_ok = results.get()
        process.join()
        queries = (done - not_ok) * _QUERIES / whole
    p50, p99 = np.quantile(took, [0.5, 0.99])
    return float(p50), float(p99), refused, queries


def main(
    releases: Path,
    python: Annotated[str, typer.Option(help="Python of the environment whose service is measured.")] = sys.executable,
    seconds: float = 6,
    rounds: int = 3,
) -> None:
    """Measure and print."""
    with TemporaryDirectory() as state, served(
        python, releases, Path(state), api_keys=f"{_POLITE},{_GREEDY}"
    ) as service:  # fmt: skip
        features = _features(service.port)
        polite = request(_body(features, 1, 10), X_API_Key=_POLITE)
        greedy = request(_body(features, _QUERIES, _K), X_API_Key=_GREEDY)
        _round(service, polite, greedy, 1)
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(_round(service, polite, None, seconds))
            beside.append(_round(service, polite, greedy, seconds))
    print(f"{releases}: one worker, medians of {rounds} rounds of {seconds:g} s")
    print(f"{'polite client':20}{'p50 ms':>9}{'p99 ms':>9}{'not 200':>9}{'greedy queries/s':>18}")
    for name, of in (("alone", alone), ("beside the greedy", beside)):
        p50, p99, queries = (statistics.median(r[column] for r in of) for column in (0, 1, 3))
        print(f"{name:20}{p50:9.2f}{p99:9.2f}{sum(r[2] for r in of):9}{queries:18,.0f}")
    ratio = statistics.median(b[1] / a[1] for a, b in zip(alone, beside, strict=True))
    print(f"p99 beside / alone: {ratio:.1f}")


if __name__ == "__main__":
    typer.run(main)
