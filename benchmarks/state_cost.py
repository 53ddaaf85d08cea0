"""What a service pays for its state: SQLite beside PostgreSQL, each on this machine.

    python -m benchmarks.state_cost [--rounds 200]

Medians of the clock, and the CPU time of the service's own process, per call: a label changed, looked whether others
have changed any, another's change read from the moment that it was acknowledged, an event of feedback, and 100 answers
kept and joined. PostgreSQL is a server of its own on loopback; its own CPU time is not in it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import typer

from longtail.bundle import Hide
from longtail.serving.monitoring import AnswerFeedback
from longtail.serving.monitoring.feedback_store import FeedbackStore, StoredAnswer
from longtail.state import LabelPosition, LabelStore, Place, read_place
from tests.postgres import postgres


def _per_call(work: Callable[[int], object], rounds: int) -> str:
    seconds, began = [], time.process_time()
    for number in range(rounds):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    cpu = (time.process_time() - began) / rounds
    return f"{1e3 * float(np.median(seconds)):.2f} / {1e3 * cpu:.2f}"


def _figures(place: Place, rounds: int) -> list[str]:
    labels, other = LabelStore(place), LabelStore(place)
    feedback = FeedbackStore(place, max_answers=100_000)
    now, position = time.time(), LabelPosition("", 0)

    def change(number: int) -> None:
        labels.append([Hide(id=f"label-{number}", at=datetime.now(UTC))])

    def hear(number: int) -> None:
        nonlocal position
        change(number)
        while not (read := other.read_from(position)).records:
            time.sleep(0.0005)
        assert read.position is not None
        position = read.position

    def look(_: int) -> None:
        nonlocal position
        position = other.read_from(position).position or position

    def event(number: int) -> None:
        feedback.record_feedback([AnswerFeedback(f"answer-{number}-0", 0, ["label"], [0])], now)

    def keep(number: int) -> None:
        feedback.keep_answers(
            [StoredAnswer(f"answer-{number}-{place}", 0, "r1", b"1234" * 20, b"0" * 20) for place in range(100)], now
        )
        feedback.join(now + number)

    try:
        change(0)
        read = other.read_from(None)
        assert read.position is not None
        position = read.position
        return [_per_call(work, rounds) for work in (change, look, hear, event, keep)]
    finally:
        for store in (labels, other, feedback):
            store.close()


def main(rounds: int = 200) -> None:
    """Print a row for each engine: ms of the clock / ms of CPU."""
    print("| | a label changed | looked | changed and read elsewhere | an event | 100 answers kept, joined |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        print("| SQLite | " + " | ".join(_figures(Path(folder), rounds)) + " |", flush=True)
    with postgres() as server:
        print("| PostgreSQL | " + " | ".join(_figures(read_place(server.url()), rounds)) + " |")


if __name__ == "__main__":
    typer.run(main)
