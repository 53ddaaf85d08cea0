"""What a polite client waits while another client attacks: its p50 and p99 alone and under each attack, in turns.

    python -m benchmarks.attacks [--seconds 3] [--attackers 2] [--random 5] [--only WORD]

The service is the real one, one worker, on a release with everything that costs time (`tests/serving/shapes.py`), in a
process of its own; so are the attackers, each with its own key or none. The polite client sends one query every 10 ms.
"Stall" is the longest wait for /livez, probed every 5 ms: the longest time in which the event loop did nothing else.
A round alone comes before each attack, and the ratio is that of the p99 of these two. The attackers and the clients
take CPU time of the same machine, so a ratio above 1 is not all of the service's making.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx2 as httpx
import numpy as np
import typer

from tests.serving.process import ServerProcess, server
from tests.serving.shapes import Shape, random_shape, shop_releases, worst_shapes

_POLITE, _GREEDY = "polite-key-0123456789", "greedy-key-0123456789"
_QUERY = {"queries": [{"features": {"user_id": "u1", "history": ["item-1", "item-2"]}, "k": 10}]}
_HEAD = b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-API-Key: %b\r\n" % (
    _GREEDY.encode()
)
_PAUSE_SECONDS, _PROBE_SECONDS = 0.01, 0.005
_KEPT = Path(tempfile.gettempdir()) / "longtail"


@dataclass(frozen=True)
class Waits:
    """Milliseconds of the polite client, and the longest of a probe of /livez."""

    p50: float
    p99: float
    stall: float
    failed: int


def main(
    labels: int = 20_000,
    seconds: Annotated[float, typer.Option(help="Length of each round.")] = 3.0,
    attackers: Annotated[int, typer.Option(help="Connections that attack at once.")] = 2,
    random_shapes: Annotated[int, typer.Option("--random", help="Random shapes, in addition to the worst ones.")] = 5,
    only: Annotated[str, typer.Option(help="Attacks whose name has this word.")] = "",
    dir: Annotated[Path, typer.Option(help="Where the release is kept.")] = _KEPT,
) -> None:
    """Measure every attack, and print a table."""
    releases = shop_releases(dir / f"shop-{labels}", labels)
    with tempfile.TemporaryDirectory() as state:
        keys = {"api_keys": _POLITE, "admin_keys": _GREEDY}
        with server(releases, Path(state) / "log", state=Path(state) / "state", drain_seconds=0, **keys) as process:
            process.wait_until_ready(120)
            answer = httpx.post(
                f"{process.url}/v1/retrieve",
                json={"queries": [{"features": {}}] * 256},
                headers={"X-API-Key": _GREEDY},
                timeout=30,
            )
            shapes = worst_shapes(labels, [result["answer_id"] for result in answer.json()["results"]])
            for seed in range(random_shapes):
                shapes[f"random, seed {seed}"] = random_shape(random.Random(seed), labels)
            attacks = _connection_attacks() | {name: _sending(shape) for name, shape in shapes.items()}
            print(f"{labels:,} labels, {attackers} attackers, {seconds:g} s each, load {os.getloadavg()[0]:.1f}")
            print("| attack | p50 alone | p99 alone | p50 | p99 | p99 / alone | stall |")
            print("|---|---:|---:|---:|---:|---:|---:|")
            ratios = {}
            for name, attack in attacks.items():
                if only in name:
                    ratios[name] = _compare(process, name, attack, attackers, seconds)
    worst = max(ratios, key=lambda name: ratios[name])
    within = sum(ratio <= 3 for ratio in ratios.values())
    print(f"within 3 times the p99 alone: {within} of {len(ratios)}; worst: {worst}, {ratios[worst]:.1f} times")


def _compare(process: ServerProcess, name: str, attack: Attack, attackers: int, seconds: float) -> float:
    """Measure alone and under an attack; returns the ratio of both p99."""
    alone = _waits(process.url, seconds)
    with _under(process, attack, attackers):
        time.sleep(0.3)
        under = _waits(process.url, seconds)
    time.sleep(1)  # for what still waits
    failed = f", {under.failed} failed" if under.failed else ""
    ratio = under.p99 / alone.p99
    print(
        f"| {name}{failed} | {alone.p50:.1f} | {alone.p99:.1f} | {under.p50:.1f} | {under.p99:.1f} | {ratio:.1f} "
        f"| {under.stall:.0f} |",
        flush=True,
    )
    return ratio


def _waits(url: str, seconds: float) -> Waits:
    """Send queries as a polite client, and probe the event loop."""
    probes, ended = list[float](), threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not ended.wait(_PROBE_SECONDS):
                started = time.perf_counter()
                client.get("/livez")
                probes.append(time.perf_counter() - started)

    probing = threading.Thread(target=probe)
    probing.start()
    waits, failed, until = list[float](), 0, time.perf_counter() + seconds
    with httpx.Client(base_url=url, headers={"X-API-Key": _POLITE}, timeout=30) as client:
        while time.perf_counter() < until:
            started = time.perf_counter()
            failed += client.post("/v1/retrieve", json=_QUERY).status_code != 200
            waits.append(time.perf_counter() - started)
            time.sleep(_PAUSE_SECONDS)
    ended.set()
    probing.join()
    p50, p99 = np.quantile(waits, [0.5, 0.99]) * 1e3
    return Waits(float(p50), float(p99), 1e3 * max(probes), failed)


Attack = Callable[[tuple[str, int]], None]
"""One attacker: attacks an address until it is ended."""


@contextmanager
def _under(process: ServerProcess, attack: Attack, attackers: int) -> Iterator[None]:
    url = httpx.URL(process.url)
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=attack, args=((url.host, url.port),), daemon=True) for _ in range(attackers)]
    for one in running:
        one.start()
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.join()


def _sending(shape: Shape) -> Attack:
    """Send a request again and again; after a refusal at once."""

    def attack(address: tuple[str, int]) -> None:
        headers = {"X-API-Key": _GREEDY, "Content-Type": "application/json"}
        with httpx.Client(base_url="http://{}:{}".format(*address), headers=headers, timeout=30) as client:
            while True:
                with suppress(httpx.TransportError):
                    client.request(shape.method, shape.path, content=shape.body)

    return attack


def _connection_attacks() -> dict[str, Attack]:
    """Attacks that need no key."""

    def connect(address: tuple[str, int]) -> socket.socket:
        return socket.create_connection(address, timeout=30)

    def endless(piece: bytes) -> Attack:
        def attack(address: tuple[str, int]) -> None:
            while True:
                with suppress(OSError), connect(address) as connection:
                    connection.sendall(_HEAD + b"X: ")
                    while True:
                        connection.sendall(piece)

        return attack

    def half_heads(address: tuple[str, int]) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(connect(address)) for _ in range(250)]
            while True:
                for connection in connections:
                    with suppress(OSError):
                        connection.sendall(b"X")
                time.sleep(1)

    def unread(address: tuple[str, int]) -> None:
        while True:
            with suppress(OSError), connect(address) as connection:
                connection.settimeout(1)
                while True:
                    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)

    return {
        "a header without an end": endless(b"a" * 65_536),
        "headers without an end": endless(b"a: b\r\n" * 10_000),
        "250 half heads, a byte a second": half_heads,
        "pipelined, answers not read": unread,
    }


if __name__ == "__main__":
    typer.run(main)
