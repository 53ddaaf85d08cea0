"""Answers and feedback of replicas in one PostgreSQL: nobody ends in a deadlock, and a reader reads one moment."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.serving.monitoring import AnswerFeedback, feedback_of
from longtail.serving.monitoring.feedback_store import FeedbackStore, StoredAnswer
from longtail.state import Place, StoreError, read_place
from tests.postgres import PostgresServer
from tests.serving.monitoring.shop import NOON


@pytest.mark.process
def test_replicas_that_write_at_once_never_wait_for_each_other_for_good(
    database_server: PostgresServer,
) -> None:
    place = read_place(database_server.url())
    stores = [FeedbackStore(place, max_answers=10_000) for _ in range(3)]
    failures: list[StoreError] = []

    def work(number: int) -> None:
        rng, store = random.Random(number), stores[number]
        for turn in range(12):
            names = [f"{number}-{turn}-{place}" for place in range(40)]
            answers = [StoredAnswer(name, 0, "r1", b"1234", b"\0", run="run", arm=name[0], unit=turn) for name in names]
            try:
                store.keep_answers(answers, NOON)
                store.record_feedback([AnswerFeedback(name, 0, ["x"], [0]) for name in rng.sample(names, 20)], NOON)
                store.join(NOON + turn)
            except StoreError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].join(NOON + 30)
    assert failures == []
    with feedback_of(place) as feedback:
        assert len([*feedback.arm_answers("run", 0, NOON + 99)]) == 3 * 12 * 40
        assert len([*feedback.arm_choices("run", 0, NOON + 99)]) == 3 * 12 * 20
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.process)])
def test_a_reader_reads_one_moment(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place: Place = tmp_path if kind == "sqlite" else read_place(request.getfixturevalue("database_server").url())
    store = FeedbackStore(place, max_answers=10)
    event = AnswerFeedback("a", 0, ["x"], [0])
    store.record_feedback([event], NOON)
    with feedback_of(place) as feedback:
        before = [row.label for row in feedback.rows(0, NOON + 1)]
        store.record_feedback([replace(event, labels=["y"])], NOON)
        assert [row.label for row in feedback.rows(0, NOON + 1)] == before == ["x"]
    store.close()
