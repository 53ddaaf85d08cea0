"""Workers in processes of their own: their figures add up, and a kill -9 loses and doubles nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from longtail.serving.monitoring import AnswerFeedback, LiveFigures
from tests.serving.monitoring.shop import BASELINE, BUCKETS, Clock, answered

pytestmark = pytest.mark.process

_WORKER = """
import sys
from pathlib import Path
import longtail.serving.monitoring.live_figures
from longtail.serving.monitoring import AnswerFeedback, LiveFigures
from tests.serving.monitoring.shop import BASELINE, BUCKETS, answered

# So that a kill meets the background work in the middle.
longtail.serving.monitoring.live_figures._TICK_SECONDS = 0.005
state, worker, batches = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
live = LiveFigures(state, worker=worker, max_answers=100_000)
live.begin_release("r1", BUCKETS, BASELINE)
for number in range(batches):
    names = [f"w{worker}-{number}-{place}" for place in range(4)]
    live.count_answers(answered([[0, 4], [1, 8], [0, 5], [9]], names=names))
    live.record_feedback([AnswerFeedback(name, 0, ["item-0", "item-8"], [0, 2]) for name in names])
    print(number + 1, flush=True)
live.close()
"""
ROOT = Path(__file__).parents[3]


def worker(state: Path, number: int, batches: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(state), str(number), str(batches)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_add_up(tmp_path: Path) -> None:
    processes = [worker(tmp_path, number, 25) for number in range(2)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    live = LiveFigures(tmp_path, max_answers=100_000)
    live.begin_release("r1", BUCKETS, BASELINE)
    live.flush()
    figures = live.report()["windows"]["24h"]
    live.close()
    assert figures["queries"] == 2 * 25 * 4
    assert figures["exposures"]["head"]["count"] == 2 * 25 * 3
    # Of item-0 and item-8 asked of four answers each, two and one were answered.
    recall = figures["recall"]["feedback"]
    assert (recall["head"]["positives"], recall["head"]["hits"]) == (200, 100)
    assert (recall["tail"]["positives"], recall["tail"]["hits"]) == (200, 50)


@pytest.mark.parametrize("after", [1, 37, 90])
def test_a_kill_loses_nothing_acknowledged_and_counts_nothing_twice(tmp_path: Path, after: int) -> None:
    process = worker(tmp_path, 0, 1_000_000)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(after)]
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait(60)
    process.stdout.close()
    acknowledged = len([line for line in said if line])

    live = LiveFigures(tmp_path, max_answers=100_000)
    live.begin_release("r1", BUCKETS, BASELINE)
    live.flush()
    figures = live.report()["windows"]["24h"]
    # The batch it was killed in may be counted, no other.
    assert acknowledged * 4 <= figures["queries"] <= (acknowledged + 1) * 4
    with closing(sqlite3.connect(tmp_path / "feedback.sqlite")) as connection:
        (held,) = connection.execute("SELECT count(*) FROM feedback").fetchone()
        (marked,) = connection.execute("SELECT count(*) FROM feedback WHERE state = 1").fetchone()
    assert acknowledged * 8 <= held <= (acknowledged + 1) * 8
    # What was marked is what was counted. Answers of the last half second may not have reached the file.
    assert figures["recall"]["feedback"]["all"]["positives"] == marked

    # The same answers and the same events once more: the clients try again.
    for number in range(acknowledged + 1):
        names = [f"w0-{number}-{place}" for place in range(4)]
        live.count_answers(answered([[0, 4], [1, 8], [0, 5], [9]], names=names))
        live.record_feedback([AnswerFeedback(name, 0, ["item-0", "item-8"], [0, 2]) for name in names])
    live.close()
    clock = Clock(time.time() + 10)
    live = LiveFigures(tmp_path, max_answers=100_000, clock=clock)
    live.begin_release("r1", BUCKETS, BASELINE)
    live.flush()
    recall = live.report()["windows"]["24h"]["recall"]["feedback"]
    live.close()
    assert (recall["head"]["positives"], recall["head"]["hits"]) == ((acknowledged + 1) * 4, (acknowledged + 1) * 2)
    assert (recall["tail"]["positives"], recall["tail"]["hits"]) == ((acknowledged + 1) * 4, acknowledged + 1)
