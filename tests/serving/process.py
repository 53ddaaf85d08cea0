"""The real server in a process of its own, for end-to-end tests and benchmarks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx2 as httpx


class Process(Protocol):
    """What is asked of a process, whichever way it was started."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self, seconds: float | None = None, /) -> int: ...


@dataclass
class ServerProcess:
    process: Process
    url: str
    started: float

    def wait_until_ready(self, seconds: float = 90) -> float:
        """Seconds from exec to the first 200 on /readyz."""
        deadline = self.started + seconds
        with httpx.Client(base_url=self.url) as client:
            while time.perf_counter() < deadline:
                if self.process.poll() is not None:
                    raise RuntimeError(f"server exited with {self.process.returncode}")
                with suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        return time.perf_counter() - self.started
                time.sleep(0.02)
        raise TimeoutError(f"expected /readyz to say 200 within {seconds} s")

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def until(holds: Callable[[], object], what: str = "a condition to hold", seconds: float = 20) -> None:
    """Wait for something; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"expected {what} within {seconds:g} s"
        time.sleep(0.02)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(parent: int) -> dict[int, bytes]:
    """Command lines of the living children of a process, by id."""
    commands: dict[int, bytes] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, of, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if int(of) == parent and state != "Z":
                commands[int(path.name)] = (path / "cmdline").read_bytes()
    return commands


def build_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """This process's own environment with settings in it."""
    return os.environ | {f"LONGTAIL_{name.upper()}": str(value) for name, value in settings.items()}


@contextmanager
def server(releases: Path, log: Path, **settings: object) -> Iterator[ServerProcess]:
    """Run `python -m longtail.serving run RELEASES` on a free port of loopback; `settings` from the environment."""
    port = free_port()
    command = [sys.executable, "-m", "longtail.serving", "run", str(releases), "--port", str(port)]
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=build_environment(settings), stdout=output, stderr=subprocess.STDOUT)
    with ended_after(ServerProcess(process, f"http://127.0.0.1:{port}", started)) as service:
        yield service


@contextmanager
def ended_after(service: ServerProcess) -> Iterator[ServerProcess]:
    """Kill a service at the end, if it still runs."""
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
