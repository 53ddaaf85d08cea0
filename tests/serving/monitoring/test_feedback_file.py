"""The SQLite file of answers and feedback: what is wrong with it, who waits for whom, and what looking up costs."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from longtail.serving.monitoring import AnswerFeedback, LiveFigures, ShadowPair
from longtail.serving.monitoring.feedback_store import FeedbackStore, StoredAnswer
from longtail.state import StoreError
from tests.serving.monitoring.shop import NOON, Clock, answered
from tests.serving.monitoring.test_feedback import Opening, event, recall


def connections_of(store: FeedbackStore) -> list[sqlite3.Connection]:
    """Those that answers are kept and joined by: as many as are ever open at once."""
    with store.lazy.connect() as one, store.lazy.connect() as other:
        return [each.connection.driver_connection for each in (one, other)]  # type: ignore[misc]


@pytest.mark.parametrize("content", ["garbage", "another version"])
def test_another_file_is_refused_and_stays(open_live: Opening, tmp_path: Path, content: str) -> None:
    path = tmp_path / "feedback.sqlite"
    if content == "garbage":
        path.write_bytes(b"not a database, but long enough for a header of one" * 10)
    else:
        open_live().close()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"damaged|of version 99, made before 0\.1"):
        open_live()
    assert path.read_bytes() == before


def test_trouble_with_the_file_is_said_once_and_scrapes_go_on(
    live: LiveFigures, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(tmp_path / "feedback.sqlite")) as connection:
        connection.execute("DROP TABLE recall")
    with pytest.raises(StoreError):
        live.report()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert {metric.name for metric in live.collect()} >= {"longtail_gini", "longtail_labels_added"}
    assert caplog.text.count("live figures, reading the figures") == 1
    with pytest.raises(StoreError):
        live.record_shadow("r1", [ShadowPair(np.array([0]), np.array([0]))])


def test_an_event_among_many_answers_costs_no_look_at_all_of_them(tmp_path: Path) -> None:
    store = FeedbackStore(tmp_path, max_answers=20_000)
    store.keep_answers([StoredAnswer(f"a{n}", 0, "r1", b"1234", b"0", request_id="same") for n in range(20_000)], NOON)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    for connection in connections_of(store):
        connection.set_progress_handler(step, 100)
    store.record_feedback([AnswerFeedback("a7", 0, ["x"], [0])], NOON)
    store.record_feedback([AnswerFeedback(None, 0, ["x"], [0], request_id="same")], NOON)
    store.join(NOON + 1)
    assert store.totals()["ambiguous"] == 1
    store.close()
    # In hundreds of instructions of SQLite's; a look at all answers takes thousands.
    assert steps < 100


def test_answers_wait_while_the_file_is_locked(live: LiveFigures, clock: Clock, tmp_path: Path) -> None:
    for connection in connections_of(live._store):
        connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(tmp_path / "feedback.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for name in ("a", "b"):
            live.count_answers(answered([[0]], names=[name]))
            live.flush()
        other.execute("ROLLBACK")
    live.record_feedback([event("a", 0), event("b", 0)])
    assert recall(live, clock)["all"] == (2, 2)
