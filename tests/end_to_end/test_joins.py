"""Feedback finds the answer it is about, whatever ids gateways put on requests, and a retry changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from longtail.index import Releases, build
from longtail.serving.export import export
from tests.bundles import make_bundle
from tests.serving.process import ServerProcess, server, until

QUERIES = [{"features": {"user_id": f"u{user}"}, "k": 3, "allow": [f"item-{user}"]} for user in range(3)]
"""Each is answered one label of its own."""
GATEWAY = {"X-Request-ID": "the-gateways"}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def running(tmp_path: Path, state: Path) -> Iterator[ServerProcess]:
    """Two workers."""
    make_bundle().write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec="flat", name="first")
    Releases(tmp_path / "releases").publish("first")
    with server(tmp_path / "releases", tmp_path / "log", workers=2, state=state) as process:
        process.wait_until_ready(90)
        ready = f"{process.url}/readyz"
        until(lambda: all(httpx.get(ready).status_code == 200 for _ in range(16)), "both workers to be ready")
        yield process


def ask(url: str, *queries: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """An answer, over a connection of its own, so that either worker may give it."""
    answer = httpx.post(f"{url}/v1/retrieve", json={"queries": queries}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def say(url: str, *events: dict[str, Any]) -> dict[str, Any]:
    taken = httpx.post(f"{url}/v1/feedback", json={"events": events})
    assert taken.status_code == 200, taken.text
    return taken.json()


def recall(url: str, source: str = "feedback") -> tuple[int, int]:
    found = httpx.get(f"{url}/v1/monitoring").json()["windows"]["5m"]["recall"][source]["all"]
    return found["positives"], found["hits"]


def counter(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_answers_under_one_request_id_are_told_apart(running: ServerProcess, state: Path, tmp_path: Path) -> None:
    url = running.url
    answers = [ask(url, query, headers=GATEWAY) for query in QUERIES]
    batch = ask(url, *QUERIES, headers=GATEWAY)
    assert {answer["request_id"] for answer in (*answers, batch)} == {"the-gateways"}
    assert len({answer["answer_id"] for answer in (*answers, batch)}) == 4
    for turn in range(2):
        for place, answer in enumerate(answers):
            say(url, {"answer_id": answer["answer_id"], "labels": [f"item-{place}"]})
        say(url, {"answer_id": batch["answer_id"], "query": 2, "labels": ["item-2"]})
        until(lambda: recall(url) == (4, 4), f"four hits, after sending them {turn + 1} times")
    assert running.terminate() == 0
    export(state, out := tmp_path / "feedback.parquet", window=(0.0, 1e12))
    rows = pq.read_table(out).to_pylist()
    assert [(row["request_id"], row["answer_id"], row["query"], row["user_id"]) for row in rows] == [
        *(("the-gateways", answer["answer_id"], 0, f"u{place}") for place, answer in enumerate(answers)),
        ("the-gateways", batch["answer_id"], 2, "u2"),
    ]


def test_old_clients_name_a_request_as_long_as_it_had_one_answer(running: ServerProcess) -> None:
    url = running.url
    without, alone = ask(url, QUERIES[0]), ask(url, *QUERIES[:2], headers={"X-Request-ID": "alone"})
    retried = [ask(url, QUERIES[1], headers={"X-Request-ID": "retried"}) for _ in range(3)]
    assert without["request_id"] == without["answer_id"]
    say(url, {"request_id": without["request_id"], "labels": ["item-0"]})
    say(url, {"request_id": alone["request_id"], "query": 1, "labels": ["item-1"]})
    say(url, {"request_id": retried[0]["request_id"], "labels": ["item-1"]})
    until(lambda: recall(url) == (3, 3), "three hits")
    # Of a request id that several different answers have, nobody knows which one is meant: none is blamed.
    for query in QUERIES:
        ask(url, query, headers=GATEWAY)
    until(lambda: httpx.get(f"{url}/v1/monitoring").json()["windows"]["5m"]["queries"] == 9, "all answers")
    say(url, {"request_id": "the-gateways", "labels": ["item-0", "item-1"]})
    until(lambda: counter(url, "longtail_feedback_ambiguous_total") == 1, "an ambiguous request")
    until(lambda: recall(url) == (3, 3), "three hits still")
    # Whoever sends another's answer id as the id of a request makes that request ambiguous, not the answer.
    ask(url, QUERIES[2], headers={"X-Request-ID": without["answer_id"]})
    say(url, {"answer_id": without["answer_id"], "event": "purchase", "labels": ["item-0"]})
    say(url, {"request_id": without["answer_id"], "labels": ["item-2"]})
    until(lambda: counter(url, "longtail_feedback_ambiguous_total") == 2, "another ambiguous request")
    until(lambda: recall(url) == (3, 3), "three hits still")


def test_an_organic_choice_that_is_sent_again_counts_once(running: ServerProcess, state: Path) -> None:
    url = running.url
    event = {"features": {"user_id": "u1"}, "labels": ["item-1"], "event": "view"}
    said = [say(url, {**event, "idempotency_key": "view-1"}, {**event, "idempotency_key": "view-2"}) for _ in range(5)]
    assert {answer["accepted"] for answer in said} == {2}
    once_more = say(url, {**event, "idempotency_key": "view-2"}, {**event, "idempotency_key": "view-3"}, event)
    assert once_more["accepted"] == 3
    until(lambda: counter(url, 'longtail_feedback_events_total{kind="organic"}') == 4, "four choices")
    until(lambda: recall(url, "shadow")[0] == 4, "four in recall")
    assert running.terminate() == 0
    lines = export(state, state / "feedback.parquet", window=(0.0, 1e12))
    assert lines[0] == "4 labels chosen"
