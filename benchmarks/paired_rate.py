"""Two checkouts or settings of the service in one run: how many requests a second each answers, in turns.

    python -m benchmarks.paired_rate RELEASES --before OTHER/.venv/bin/python [--seconds 3] [--rounds 5]
    python -m benchmarks.paired_rate RELEASES --setting tracing=1 [--setting NAME=VALUE]
    python -m benchmarks.paired_rate RELEASES --echo

One worker each, both up all the time, loaded in turns (before, after, before, …) by one process over keep-alive
connections, each with one request after the other, the heads and bodies written beforehand. On a machine that does
other things as well only the ratio means something, and CPU seconds a request, which the system counts.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.request import urlopen

import typer

from benchmarks import echo
from tests.serving.process import free_port

_READ = 1 << 20


@dataclass(frozen=True)
class Rate:
    """Of one round: requests a second, the server's CPU microseconds for each, and how many were not answered 200."""

    requests: float
    cpu_us: float
    refused: int


def cpu_seconds(process: int) -> float:
    """User and system time of a process, and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Served:
    """A service that runs: where it listens, and its process."""

    port: int
    process: subprocess.Popen[bytes]
    path: str = "/v1/retrieve"

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads."""
        return cpu_seconds(self.process.pid)


@contextmanager
def served(python: str, releases: Path, state: Path, **settings: object) -> Iterator[Served]:
    """`python -m longtail.serving run RELEASES`, ready, with a state of its own."""
    port = free_port()
    environment = os.environ | {f"LONGTAIL_{name.upper()}": str(value) for name, value in settings.items()}
    command = [python, "-m", "longtail.serving", "run", str(releases.absolute()), "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--state", str(state)], env=environment, cwd=state, stderr=(state / "log").open("wb")
    )
    try:
        for _ in range(600):
            time.sleep(0.1)
            try:
                with urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        break
            except OSError:
                continue
        yield Served(port, process)
    finally:
        process.terminate()
        process.wait()


def request(body: bytes, path: str = "/v1/retrieve", **headers: str) -> bytes:
    """A POST of JSON as a client on a keep-alive connection sends it."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "User-Agent: bench", "Accept: */*"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Client:
    """One keep-alive connection with at most one request under way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = b""
        self._missing = 0

    def send(self, message: bytes) -> None:
        """Begin a request."""
        self.socket.sendall(message)

    def read(self) -> int | None:
        """Take what has come; the status when the answer is whole."""
        received = self.socket.recv(_READ)
        if not received:
            raise ConnectionError("expected an answer, found the connection closed")
        if self._missing:
            self._missing -= len(received)
        else:
            self._head += received
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return None
            start = self._head.lower().find(b"content-length: ", 0, end) + 16
            length = int(self._head[start : self._head.find(b"\r\n", start)])
            self._missing = length - (len(self._head) - end - 4)
        if self._missing:
            return None
        status, self._head = int(self._head[9:12]), b""
        return status


def load(ports: Sequence[int], requests: Sequence[bytes], connections: int, seconds: float) -> tuple[int, float, int]:
    """Answers, seconds and how many of the answers were not 200; connections take the ports in turns."""
    selector = DefaultSelector()
    clients = [Client(ports[number % len(ports)]) for number in range(connections)]
    turn = done = refused = 0
    began = time.perf_counter()
    for client in clients:
        selector.register(client.socket, EVENT_READ, client)
        client.send(requests[turn % len(requests)])
        turn += 1
    while time.perf_counter() - began < seconds:
        for key, _ in selector.select():
            if (status := key.data.read()) is not None:
                done, refused = done + 1, refused + (status != 200)
                key.data.send(requests[turn % len(requests)])
                turn += 1
    took = time.perf_counter() - began
    for client in clients:
        client.socket.close()
    return done, took, refused


def example_body(port: int, k: int) -> bytes:
    """Get the body of a request with the release's own example."""
    with urlopen(f"http://127.0.0.1:{port}/v1/release") as answer:
        features = json.load(answer)["example"]
    return json.dumps({"queries": [{"features": features, "k": k}]}).encode()


def measure(service: Served, requests: Sequence[bytes], connections: int, seconds: float) -> Rate:
    """One round of load."""
    before = service.cpu_seconds
    done, took, refused = load([service.port], requests, connections, seconds)
    return Rate(done / took, (service.cpu_seconds - before) / done * 1e6, refused)


def main(
    releases: Path,
    before: Annotated[str, typer.Option(help="Python of the other checkout's environment.")] = sys.executable,
    echoed: Annotated[bool, typer.Option("--echo", help="Before is benchmarks.echo, on the same body.")] = False,
    setting: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, of this checkout's service alone.")] = None,
    connections: int = 16,
    k: int = 10,
    seconds: float = 3,
    rounds: int = 5,
) -> None:
    """Load both in turns; medians, and the median of the rounds' ratios."""
    pythons = {"before": before, "after": sys.executable}
    settings = dict(change.split("=", 1) for change in setting or [])
    rates: dict[str, list[Rate]] = {name: [] for name in pythons}
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        services = {}
        for name, python in pythons.items():
            (state := Path(scratch, name)).mkdir()
            chosen = settings if name == "after" else {}
            if echoed and name == "before":
                services[name] = Served(*stack.enter_context(echo.running()), echo.PATH)
            else:
                services[name] = stack.enter_context(served(python, releases, state, **chosen))
        body = example_body(services["after"].port, k)
        requests = {name: [request(body, service.path)] for name, service in services.items()}
        for name, service in services.items():
            load([service.port], requests[name], connections, 1)
        for _ in range(rounds):
            for name, service in services.items():
                rates[name].append(measure(service, requests[name], connections, seconds))
    print(f"{releases}, k = {k}, {connections} connections, one worker, {rounds} rounds of {seconds:g} s each, medians")
    print(f"{'':8}{'requests/s':>12}{'CPU µs':>9}{'not 200':>9}")
    for name, of in rates.items():
        rate, cpu = statistics.median(r.requests for r in of), statistics.median(r.cpu_us for r in of)
        print(f"{name:8}{rate:12,.0f}{cpu:9.0f}{sum(r.refused for r in of):9}")
    pairs = list(zip(rates["before"], rates["after"], strict=True))
    ratios = sorted(b.requests / a.requests for a, b in pairs)
    print(
        f"after / before: {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f}) of the rate,",
        f"{statistics.median(b.cpu_us / a.cpu_us for a, b in pairs):.2f} of the CPU time",
    )


if __name__ == "__main__":
    typer.run(main)
