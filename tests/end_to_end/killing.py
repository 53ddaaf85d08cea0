"""Processes to be killed: forked from one that has imported everything, so that their first moment is their work."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from longtail.serving import cli, logs
from longtail.serving.process.supervisor import serve
from longtail.serving.settings import Settings
from tests.serving.process import ServerProcess, build_environment, children, ended_after, free_port, until

KILLS = int(os.environ.get("LONGTAIL_KILLS", "3"))
"""Of each kind of process; the rare moments want hundreds."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["longtail.index.cli", "longtail.serving.cli", "pyarrow.parquet", __name__])


def start(target: Callable[..., object], *args: object, daemon: bool = True) -> ForkServerProcess:
    """A process of its own that calls `target`, which must be importable; one that has children is no daemon."""
    process = _forks.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


def kill(process: ForkServerProcess, after: float = 0.0, *, observe: Callable[[], object] | None = None) -> bool:
    """SIGKILL some seconds after the start, or after something is seen; False if the process had ended by itself."""
    while observe is not None and process.is_alive() and not observe():
        time.sleep(1e-4)
    process.join(after)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def measure_seconds(target: Callable[..., object], *args: Any) -> float:
    """How long a process takes that nobody kills; it must succeed."""
    began = time.perf_counter()
    process = start(target, *args)
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - began


def moments(rng: random.Random) -> Iterator[float]:
    """Without end: random numbers from 0 to 1, as many in every tenth as in the others, in random order."""
    while True:
        for tenth in rng.sample(range(10), 10):
            yield (tenth + rng.random()) / 10


@dataclass
class KilledService:
    """A service that was started: its parent, or only, process. Maybe not ready yet."""

    process: ForkServerProcess
    url: str

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def workers(self) -> list[int]:
        """Ids of the workers of a service of several, ascending."""
        return sorted(id_ for id_, command in children(self.pid).items() if b"spawn_main" in command)

    def wait_until_ready(self, seconds: float = 90) -> float:
        """How many seconds it takes."""
        began = time.monotonic()
        with httpx.Client(base_url=self.url) as client:
            while time.monotonic() < began + seconds:
                assert self.process.is_alive(), f"the service ended with {self.process.exitcode}"
                with suppress(httpx.TransportError):
                    if client.get("/readyz").status_code == 200:
                        return time.monotonic() - began
                time.sleep(0.01)
        raise TimeoutError(f"expected /readyz to say 200 within {seconds} s")

    def kill(self) -> None:
        """SIGKILL to every process; the parent is held first, so that it starts no other."""
        os.kill(self.pid, signal.SIGSTOP)
        for pid in [*children(self.pid), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        until(self._port_is_free, "the port to be free")

    def _port_is_free(self) -> bool:
        """Whether all have let go of it: orphans that were killed do so a moment later."""
        address = urlsplit(self.url)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.hostname, address.port))
            return True
        return False

    def kill_worker(self, rng: random.Random) -> None:
        """SIGKILL to one worker of several."""
        os.kill(rng.choice(self.workers), signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        self.process.join(40)
        assert self.process.exitcode is not None, "expected the service to end"
        return self.process.exitcode


def _serve(settings: Settings, log: Path, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    logs.configure("warning")
    serve(settings.model_copy(update={"log_level": "warning"}))


@contextmanager
def serving(
    settings: Settings, log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[KilledService]:
    """What `longtail-serve run` runs, on the settings' port; all of it is killed at the end at the latest."""
    service = KilledService(
        start(_serve, settings, log, dict(environment), daemon=False), f"http://127.0.0.1:{settings.port}"
    )
    try:
        yield service
    finally:
        if service.process.is_alive():
            service.kill()


class Forked:
    """What tests use of `subprocess.Popen`, of a process that was forked."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        assert self.returncode is not None, f"expected the process to end within {seconds} s"
        return self.returncode


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    cli.main(["run", *arguments])


def check_log(log: Path, *keys: str) -> None:
    """Check that each line is JSON, that nothing broke, and that no key is in it."""
    for line in log.read_text().rstrip("\n").split("\n"):  # JSON may hold what else ends a line
        entry = json.loads(line)
        assert entry["level"] in ("info", "warning"), line
        assert "exception" not in entry, line
        assert not any(key in line for key in keys)


@contextmanager
def server(releases: Path, log: Path, **settings: object) -> Iterator[ServerProcess]:
    """`tests.serving.process.server`, seconds sooner."""
    port, started = free_port(), time.perf_counter()
    log.touch()
    process = Forked(start(_run, [str(releases), "--port", str(port)], log, build_environment(settings), daemon=False))
    with ended_after(ServerProcess(process, f"http://127.0.0.1:{port}", started)) as service:
        yield service
