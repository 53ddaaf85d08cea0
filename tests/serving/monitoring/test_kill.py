"""Workers in processes of their own: their figures add up, and kill -9 loses and doubles none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longtail.serving.monitoring import Monitoring, Promises
from tests.serving.monitoring.shop import BASELINE, BUCKETS

pytestmark = pytest.mark.process

_WORKER = """
import sys, time
from pathlib import Path
from tests.serving.monitoring.shop import answered, chosen, count_batch, open_monitoring

state, worker, batches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
monitoring = open_monitoring(state, time.time, worker=worker)
for number in range(batches):
    count_batch(monitoring, answered([[0, 4], [1, 8]]))
    monitoring.count_choice(chosen([0, 8], [0, 4]))
    print(number, flush=True)
"""


def worker(state: Path, number: int, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WORKER, str(state), str(number), str(batches)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)


def figures(state: Path) -> tuple[int, int, int]:
    """Queries, and positives and hits of choices."""
    monitoring = Monitoring(state)
    monitoring.begin_release("r1", BUCKETS, Promises(BASELINE))
    figures_24h: dict[str, Any] = monitoring.report()["windows"]["24h"]
    monitoring.close()
    return figures_24h["queries"], *(figures_24h["recall"]["feedback"]["all"][name] for name in ("positives", "hits"))


def test_two_processes_add_up(tmp_path: Path) -> None:
    processes = [worker(tmp_path, number, 25) for number in range(2)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert figures(tmp_path) == (100, 100, 50)


@pytest.mark.parametrize("after", [1, 90])
def test_kill_keeps_every_count_once(tmp_path: Path, after: int) -> None:
    process = worker(tmp_path, 0, 1_000_000)
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(after)]
    os.kill(process.pid, signal.SIGKILL)
    printed += process.stdout.readlines()
    process.wait(60)
    process.stdout.close()
    done = len([line for line in printed if line.endswith("\n")])
    # The batch it was killed in may be counted, no other.
    assert all(
        of * done <= figures_24h <= of * (done + 1)
        for of, figures_24h in zip((2, 2, 1), figures(tmp_path), strict=True)
    )
