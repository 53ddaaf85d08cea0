"""Processes to be killed: forked from one that has imported everything, so that their first moment is their work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

import httpx

from longtail.serving import logs
from longtail.serving.process.listening import listen
from longtail.serving.process.server import run
from longtail.serving.settings import Settings

KILLS = int(os.environ.get("LONGTAIL_KILLS", "6"))
"""Of each kind of process; the rare moments want hundreds."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["longtail.index.cli", "longtail.serving.cli", "pyarrow.parquet", __name__])


def start(target: Callable[..., object], *args: object) -> ForkServerProcess:
    """A process of its own that calls `target`, which must be importable."""
    process = _forks.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def kill(process: ForkServerProcess, after: float = 0.0, *, seen: Callable[[], object] | None = None) -> bool:
    """SIGKILL some seconds after the start, or after something is seen; False if the process had ended by itself."""
    while seen is not None and process.is_alive() and not seen():
        time.sleep(1e-4)
    process.join(after)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def seconds_of(target: Callable[..., object], *args: Any) -> float:
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
class Killable:
    """A server that was started; maybe not ready yet."""

    process: ForkServerProcess
    client: httpx.Client

    def first_answer(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The first answer that is none of "connection refused" and 503: that of a client who could not wait."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self.process.is_alive(), f"the server ended with {self.process.exitcode}"
            try:
                response = self.client.request(method, path, **request)
            except httpx.TransportError:
                time.sleep(0.005)
                continue
            if response.status_code != 503:
                return response
            time.sleep(0.002)
        raise TimeoutError("expected an answer within 30 s")


def _serve(settings: Settings) -> None:
    logs.configure("text", "warning")
    run(settings, listen(settings))


@contextmanager
def serving(settings: Settings) -> Iterator[Killable]:
    """The real server on the settings' port; killed at the end at the latest."""
    process = start(_serve, settings)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{settings.port}", timeout=20) as client:
            yield Killable(process, client)
    finally:
        kill(process)
