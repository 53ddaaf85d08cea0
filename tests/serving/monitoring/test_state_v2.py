"""Feedback of version 2, as it was on disk on 2026-11-22, is opened for ever: its answers have no id but the request's.

tests/fixtures/state_v2 is what one worker left at 12:00:00 UTC: an answer to the two queries of `request-a` with
features and propensities, feedback on both, an organic choice; two answers of different requests that were both called
`twice`; feedback on `later`, whose answer never came. The file is never written again.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from longtail.serving.export import ExportError, export
from longtail.serving.monitoring import AnswerFeedback, LiveFigures
from tests.serving.monitoring.shop import BASELINE, BUCKETS, Clock, answered

FIXTURE = Path(__file__).parents[2] / "fixtures" / "state_v2"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def live(state: Path) -> Iterator[LiveFigures]:
    figures = LiveFigures(state, max_answers=1000, clock=Clock())
    figures.begin_release("r1", BUCKETS, BASELINE)
    yield figures
    figures.close()


def of_request(request_id: str, row: int, query: int = 0) -> AnswerFeedback:
    return AnswerFeedback(None, query, [f"item-{row}"], [int(BUCKETS[row])], request_id=request_id)


def recall(live: LiveFigures) -> tuple[int, int]:
    live.flush()
    found = {row.bucket: (row.positives, row.hits) for row in live._store.recall(Clock().now) if row.source != "shadow"}
    return sum(positives for positives, _ in found.values()), sum(hits for _, hits in found.values())


def test_feedback_still_finds_answers_of_before(live: LiveFigures, state: Path) -> None:
    assert recall(live) == (3, 2)
    live.record_feedback([of_request("request-a", 9, query=1), of_request("request-a", 8)])
    assert recall(live) == (4, 3), "the second was there already"
    live.record_feedback([of_request("twice", 0), of_request("twice", 5)])
    assert recall(live) == (4, 3)
    assert live._store.totals() == {"events_answer": 6, "events_organic": 1, "unmatched": 0, "ambiguous": 1}
    # The feedback that was waiting finds an answer of today, whose request was called so.
    live.count_answers(replace(answered([[3]], names=["of-today"]), request_ids=["later"]))
    assert recall(live) == (5, 4)
    assert not list(state.glob("*.aside"))
    with closing(sqlite3.connect(state / "feedback.sqlite")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (5,)


def test_it_is_exported_as_before(live: LiveFigures, state: Path, tmp_path: Path) -> None:
    live.flush()
    rows = pq.read_table(export(state, tmp_path / "out.parquet", window=(0.0, 1e12)).out).to_pylist()
    found = [(row["label_id"], row["request_id"], row["query"], row["user"], row["propensity"]) for row in rows]
    assert found == [
        ("item-8", "request-a", 0, "u0", 0.25),
        ("item-2", "request-a", 0, "u0", 1),
        ("item-4", "request-a", 1, "u1", 1),
        ("item-1", None, None, "u9", 1),
    ]
    assert {row["answer_id"] for row in rows} == {None}


def test_without_a_service_it_is_left_alone(state: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="a service that is started on it brings earlier ones there"):
        export(state, tmp_path / "out.parquet", window=(0.0, 1e12))
    assert (state / "feedback.sqlite").read_bytes() == (FIXTURE / "feedback.sqlite").read_bytes()
