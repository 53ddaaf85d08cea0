"""Processes to be killed: forked from one that has imported everything, so that their first moment is their work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

KILLS = int(os.environ.get("LONGTAIL_KILLS", "6"))
"""Of each kind of process; the rare moments want hundreds."""

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["longtail.index.cli", "pyarrow.parquet", __name__])


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
