"""Requests of several pieces or steps count when all of it has succeeded, within the time of one request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from longtail.serving import create_app
from longtail.serving.core import explanation
from longtail.serving.core.experiments import Experiment
from longtail.serving.core.queue import Cost
from longtail.serving.errors import QueueFullError
from tests.serving.client import open_client
from tests.serving.http.test_experiments import two_arms
from tests.serving.plane import plane_retriever, plane_settings

QUERY = {"features": {"user": "east"}}


def capture_events(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The events that the service offers from now on."""
    lines: list[bytes] = []
    sink = app.state.service._events
    offer = sink.offer
    monkeypatch.setattr(sink, "offer", lambda more: (lines.extend(more), offer(more))[1])
    return lines


def count_queries(client: Any) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("longtail_queries_total ")]
    return float(line.split()[1])


def test_a_request_that_fails_in_its_last_piece_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(plane_settings(tmp_path, max_queries=256, answer_share=1.0), retriever=plane_retriever())
    with open_client(app) as client:
        lines = capture_events(app, monkeypatch)
        wrong = [QUERY] * 199 + [QUERY | {"filter": {"nocolumn": 1}}]
        answer = client.post("/v1/retrieve", json={"queries": wrong})
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "queries.199.filter.nocolumn")
        assert (count_queries(client), lines) == (0, [])
        assert client.post("/v1/retrieve", json={"queries": [QUERY] * 200}).status_code == 200
        assert (count_queries(client), len(lines)) == (200, 200)


@pytest.mark.parametrize("queries", [63, 199])
def test_queries_that_their_arm_cannot_answer_count_once_and_not_for_the_arm(
    queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(plane_settings(tmp_path, max_queries=256), retriever=plane_retriever())
    with open_client(app) as client:
        (tmp_path / "experiments.toml").write_text(two_arms("explore = {tail = 1}"))
        app.state.follower.experiments.check()
        lines = capture_events(app, monkeypatch)
        # Such as a filter by a column that the arm's own release lacks: `assign` does not foresee it.
        monkeypatch.setattr(Experiment, "_set_by_arms", frozenset())
        body = {"queries": [QUERY] * queries + [QUERY | {"k": 2, "mmr": 0.5}]}
        answer = client.post("/v1/retrieve", json=body)
        assert answer.status_code == 200, answer.text
        assert not any(result["counted"] for result in answer.json()["results"])
        assert lines == []
        if queries > 64:  # below, one batch counts when it is answered
            assert count_queries(client) == queries + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_explanations_of_two_arms_are_computed_once(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(plane_settings(tmp_path, search_threads=threads), retriever=plane_retriever())
    service, searches, search = app.state.service, list[int](), explanation._Lists.search
    monkeypatch.setattr(
        explanation._Lists, "search", lambda lists, dials: (searches.append(1), search(lists, dials))[1]
    )
    with open_client(app) as client:
        service.serve(plane_retriever("plane-2", ""))
        service.serve(plane_retriever("plane-1", ""))
        (tmp_path / "experiments.toml").write_text(two_arms('release = "plane-2"', 0.5))
        app.state.follower.experiments.check()
        body = {"queries": [{"features": {"user": user}, "explain": user == "a"} for user in "abcde"]}
        for _ in range(20):
            answer = client.post("/v1/retrieve", json=body)
            assert answer.status_code == 200, answer.text
            assert [["explanation" in label for label in result["labels"]] for result in answer.json()["results"]] == [
                [query["explain"]] * len(result["labels"])
                for query, result in zip(body["queries"], answer.json()["results"], strict=True)
            ]
        assert count_queries(client) == 20 * 5
    assert len(searches) % 20 == 0


def test_the_steps_of_an_explanation_have_the_time_of_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take 1.2 s each: the search is in time, the explanation is not, and nothing is counted."""
    app = create_app(plane_settings(tmp_path, request_seconds=1.0, answer_share=1.0), retriever=plane_retriever())
    search = explanation._Lists.search
    monkeypatch.setattr(explanation._Lists, "search", lambda lists, dials: (time.sleep(1.2), search(lists, dials))[1])
    with open_client(app) as client:
        lines = capture_events(app, monkeypatch)
        answer = client.post("/v1/retrieve", json={"queries": [QUERY | {"k": 3, "explain": True}]})
        if answer.status_code == 200:
            pytest.fail("an explanation of several steps was in time")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "timeout")
        assert (count_queries(client), lines) == (0, [])


def test_a_request_that_goes_on_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever())
    queue = app.state.service.searches.queue
    monkeypatch.setattr(queue, "_full", lambda *_: QueueFullError("full"))
    search = explanation._Lists.search

    def fill(lists: Any, dials: Any) -> Any:
        queue._waiting.queries = queue._limit.queries
        return search(lists, dials)

    monkeypatch.setattr(explanation._Lists, "search", fill)
    with open_client(app) as client:
        assert client.post("/v1/retrieve", json={"queries": [QUERY | {"explain": True}]}).status_code == 200
        assert client.post("/v1/retrieve", json={"queries": [QUERY]}).status_code == 429


def test_steps_take_no_room_from_other_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not refused, so what they add to the queue must leave its limits as they are but for a query."""
    app = create_app(plane_settings(tmp_path, max_queries=256), retriever=plane_retriever())
    queue, steps = app.state.service.searches.queue, list[Cost]()
    submit = queue.submit

    async def recorded(key: Any, run: Any, works: Any, costs: Any, client: str, **begun: Any) -> Any:
        steps.extend(costs if begun else [])
        return await submit(key, run, works, costs, client, **begun)

    monkeypatch.setattr(queue, "submit", recorded)
    with open_client(app) as client:
        body = {"queries": [QUERY | {"explain": True}] + [QUERY] * 199}
        assert client.post("/v1/retrieve", json=body).status_code == 200
    assert len(steps) >= 2
    assert all((cost.queries, cost.labels, cost.bytes) == (1, 0, 0) for cost in steps)
