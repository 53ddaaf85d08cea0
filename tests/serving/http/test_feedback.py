"""Feedback on answers that describe themselves, on the plane: any replica checks it from the `answer_id` alone."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.core.answer_ids import read_answer_id
from longtail.serving.core.service import ForwardClock
from longtail.serving.events.folder import Segment
from longtail.serving.events.reader import open_events
from longtail.serving.http.schemas.monitoring import FeedbackAnswer
from longtail.serving.monitoring.workers import Workers
from longtail.state import answer_keys
from tests.clock import Clock
from tests.serving.client import check_error, open_client, read_series
from tests.serving.http.test_routes import EAST, retrieve
from tests.serving.plane import plane_retriever, plane_settings

# At λ = 0, EAST is answered a, c/é, b: head, tail, torso.


def get_answer_ids(client: httpx.Client, *queries: dict[str, Any]) -> list[str]:
    """The answer ids of one request."""
    return [result["answer_id"] for result in retrieve(client, queries=queries or [EAST]).json()["results"]]


def say(client: httpx.Client, *events: dict[str, Any], status: int = 200) -> httpx.Response:
    response = client.post("/v1/feedback", json={"events": events})
    assert response.status_code == status, response.text
    return response


def read_name(app: Starlette, answer_id: str) -> str:
    return read_answer_id(answer_id, app.state.service.keys.secrets, 0).name


def recorded_events(releases: Path, kind: str = "choice") -> list[dict[str, Any]]:
    """Events, in the order of their times."""
    with open_events(releases / ".state/events") as connection:
        relation = connection.sql("SELECT * FROM events WHERE kind = ? ORDER BY time", params=[kind])
        rows: list[dict[str, Any]] = relation.to_arrow_table().to_pylist()
    return rows


def test_an_event_describes_its_answer(
    app: Starlette, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = get_answer_ids(client, EAST, {**EAST, "k": 1, "bias_removal": 0.25, "buckets": ["tail"]})
    assert len(first) < 100 > len(second)
    answer = say(
        client,
        {"answer_id": first, "labels": ["c/é", "c/é", "4", "nobody"], "features": {"user": "east", "session": 7}},
        {"answer_id": second, "labels": ["c/é"], "event": "purchase", "weight": 9, "idempotency_key": "k1"},
    )
    assert FeedbackAnswer.model_validate_json(answer.content, strict=True).accepted == 2
    single, other = sorted(recorded_events(tmp_path), key=lambda event: event["event"])
    assert {name: single[name] for name in ("labels", "positions", "buckets", "propensities", "bias_removal")} == {
        "labels": ["c/é", "4", "nobody"], "positions": [1, None, None], "buckets": [2, 2, -1],
        "propensities": [1, 1, 1], "bias_removal": 0,
    }  # fmt: skip
    assert (single["release"], single["restricted"], single["features"]) == (
        "plane-1",
        False,
        '{"user":"east","session":7}',
    )
    assert (single["event"], single["weight"], single["answer"]) == ("click", 1, read_name(app, first))
    assert timedelta(0) <= single["time"] - single["answered_at"] < timedelta(seconds=5)
    assert (other["positions"], other["bias_removal"], other["restricted"]) == ([0], 0.25, True)
    assert (other["event"], other["weight"], other["idempotency_key"]) == ("purchase", 9, "k1")
    for arranged in ({"mmr": 0.5}, {"max_per": {"year": 1}}, {"at_least": {"bucket": {"tail": 1}}}):
        (id_,) = get_answer_ids(client, {**EAST, **arranged})
        record = read_answer_id(id_, app.state.service.keys.secrets, 0)
        assert record.restricted, "a choice from it is not held against the promise of its λ"
    with monkeypatch.context() as changed:
        changed.setattr(app.state.service.current, "_promise_holds", False)
        (id_,) = get_answer_ids(client, EAST)
    record = read_answer_id(id_, app.state.service.keys.secrets, 0)
    assert record.restricted, "too many labels have come or ended by their lifetimes"
    recall = client.get("/v1/monitoring").json()["windows"]["5m"]["recall"]["feedback"]
    assert {of: (item["positives"], item["hits"]) for of, item in recall.items() if item["positives"]} == {
        "tail": (3, 2), "all": (3, 2)
    }  # fmt: skip
    assert read_series(client)['longtail_feedback_events_total{source="feedback"}'] == 2


def test_returns_are_recorded_but_are_no_choices(
    app: Starlette, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.state.service.current, "negative_events", frozenset({"returned"}))
    (answered,) = get_answer_ids(client, EAST)
    events = [{"answer_id": answered}, {"features": EAST["features"]}]
    say(client, *({**event, "labels": ["a"], "event": name} for event in events for name in ("returned", "click")))
    assert {event["event"] for event in (*recorded_events(tmp_path), *recorded_events(tmp_path, "organic"))} == {
        "returned",
        "click",
    }
    recall = client.get("/v1/monitoring").json()["windows"]["5m"]["recall"]
    assert [recall[source]["all"]["positives"] for source in ("feedback", "organic")] == [1, 1]


def test_a_choice_names_the_key_that_sent_it(tmp_path: Path) -> None:
    single, other = "ask-0123456789abcdef", "ask-fedcba9876543210"
    event = {"features": {"user": "east"}, "labels": ["a"], "idempotency_key": "order-0"}
    with open_client(
        create_app(plane_settings(tmp_path, api_keys=(single, other)), retriever=plane_retriever())
    ) as its:
        for key in (single, other, single):
            its.headers["X-API-Key"] = key
            say(its, event)
            say(its, {"answer_id": get_answer_ids(its)[0], "labels": ["a"]})
    fingerprints = [hashlib.sha256(key.encode()).hexdigest()[:12] for key in (single, other, single)]
    assert [row["client"] for row in recorded_events(tmp_path, "organic")] == fingerprints
    assert [row["client"] for row in recorded_events(tmp_path)] == fingerprints


@pytest.mark.parametrize("weight", [-1, 1.1e6, 1e308])
def test_no_event_weighs_more_than_training_takes(client: httpx.Client, tmp_path: Path, weight: float) -> None:
    event = {"features": {"user": "east"}, "labels": ["a"], "weight": weight}
    check_error(say(client, event, status=422), 422, "invalid_request", "events.0.weight")
    say(client, {**event, "weight": 1e6})
    assert [row["weight"] for row in recorded_events(tmp_path, "organic")] == [1e6]


def test_a_label_without_an_id_is_refused(client: httpx.Client, tmp_path: Path) -> None:
    event = {"features": {"user": "east"}, "labels": ["a", ""]}
    problem = say(client, event, status=422)
    check_error(problem, 422, "invalid_request", "events.0.labels.1")
    assert "an id (a string that is not empty, or a whole number)" in problem.text
    say(client, {"answer_id": get_answer_ids(client)[0], "labels": [""]}, status=422)
    say(client, {**event, "labels": ["a"], "exclude": [""]})
    assert [row["labels"] for row in recorded_events(tmp_path, "organic")] == [["a"]]


def test_propensities_of_explored_slots_come_back(client: httpx.Client, tmp_path: Path) -> None:
    propensities_of_answers = []
    for _ in range(8):
        (result,) = retrieve(client, queries=[{**EAST, "explore": {"tail": 1}}]).json()["results"]
        propensities_of_answers.append({label["id"]: label.get("propensity", 1) for label in result["labels"]})
        say(client, {"answer_id": result["answer_id"], "labels": list(propensities_of_answers[-1])})
    for labels, event in zip(propensities_of_answers, recorded_events(tmp_path), strict=True):
        assert dict(zip(event["labels"], event["propensities"], strict=True)) == pytest.approx(labels, rel=1e-3)
        assert sum(propensity < 1 for propensity in event["propensities"]) == 1


def test_every_result_has_an_answer_id_on_request(client: httpx.Client) -> None:
    similar = client.post("/v1/similar", json={"ids": ["a", "b"], "k": 2}).json()["results"]
    ids = {*get_answer_ids(client, EAST, EAST), *get_answer_ids(client), *(result["answer_id"] for result in similar)}
    assert len(ids) == 5
    say(client, {"answer_id": similar[0]["answer_id"], "labels": [similar[0]["labels"][1]["id"]]})
    assert read_series(client)['longtail_hits_total{bucket="torso",source="feedback"}'] == 1
    for options in ({"answer_ids": False}, {"preview": True}):
        results = retrieve(client, **options).json()["results"]
        results += client.post("/v1/similar", json={"id": "a", **options}).json()["results"]
        assert not [result for result in results if "answer_id" in result]


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("malformed", "found one that was cut, or text that is no answer id"),
        ("forged", "found one that was changed or cut, or that another service gave"),
        ("expired", "found one of an answer that is too old"),
    ],
)
def test_an_id_that_is_refused_says_why(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, says: str
) -> None:
    good, bad = get_answer_ids(client, EAST, EAST)
    if reason == "malformed":
        bad = bad[:20]
    elif reason == "forged":
        bad = bad[:30] + ("A" if bad[30] != "A" else "B") + bad[31:]
    else:
        monkeypatch.setattr(ForwardClock, "__call__", lambda _: time() + 48 * 3600 + 1)
        good = get_answer_ids(client)[0]
    events = [{"answer_id": good, "labels": ["a"]}, {"answer_id": bad, "labels": ["a"]}]
    message = check_error(say(client, *events, status=422), 422, "invalid_request", "events.1.answer_id")
    assert message == f"expected the answer_id of a result of this service, {says}"
    counted = read_series(client)
    assert counted.pop(f'longtail_answer_ids_refused_total{{reason="{reason}"}}') == 1
    assert not [name for name, value in counted.items() if "answer_ids_refused" in name and value]
    assert (recorded_events(tmp_path), counted['longtail_feedback_events_total{source="feedback"}']) == ([], 0)


def test_another_service_takes_no_id_of_this_one(client: httpx.Client, tmp_path: Path) -> None:
    other = create_app(plane_settings(tmp_path, state=tmp_path / "other"), retriever=plane_retriever())
    with open_client(other) as its:
        problem = say(its, {"answer_id": get_answer_ids(client)[0], "labels": ["a"]}, status=422)
    assert "another service gave" in check_error(problem, 422, "invalid_request", "events.0.answer_id")


def test_replicas_accept_answer_ids_of_new_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(time())
    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr(answer_keys, "_REFRESH_SECONDS", 0)
    settings, workers = plane_settings(tmp_path), Workers(2)
    first, second = (create_app(settings, retriever=plane_retriever(), worker=of, workers=workers) for of in range(2))
    with open_client(first) as single, open_client(second) as other:
        yesterday = get_answer_ids(single)[0]
        say(other, {"answer_id": yesterday, "labels": ["a"]})
        clock.pass_(86_401)
        first.state.service.read_changes()
        assert len(first.state.service.keys.secrets) == 2
        today = get_answer_ids(single)[0]
        for client in (other, single):
            say(client, {"answer_id": yesterday, "labels": ["b"]}, {"answer_id": today, "labels": ["b"]})
        assert [window["hits"] for window in (read_recall(client)["all"] for client in (single, other))] == [5, 5]
    assert len(recorded_events(tmp_path)) == 5


def read_recall(client: httpx.Client) -> dict[str, Any]:
    recall: dict[str, Any] = client.get("/v1/monitoring").json()["windows"]["5m"]["recall"]["feedback"]
    return recall


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_the_answers_are_events(tmp_path: Path, share: float) -> None:
    settings = plane_settings(tmp_path, answer_share=share, max_features_bytes=100)
    app = create_app(settings, retriever=plane_retriever())
    with open_client(app) as client:
        options = {"exclude": ["4"], "explore": {"tail": 1}, "k": 3}
        first, long, set_ = get_answer_ids(client, EAST, EAST | {"features": {"user": "x" * 90}}, EAST | options)
        near = client.post("/v1/similar", json={"id": "a", "k": 2}).json()["results"][0]["answer_id"]
        retrieve(client, answer_ids=False)
        retrieve(client, preview=True)
    events = {event["answer"]: event for event in recorded_events(tmp_path, "answer")}
    assert len(events) == 5 * share
    if events:
        event = events[read_name(app, first)]
        assert (event["labels"], event["positions"], event["buckets"]) == (
            ["a", "c/é", "b"],
            [0, 1, 2],
            [0, 2, 1],
        )
        assert (event["features"], event["bias_removal"], event["restricted"]) == ('{"user":"east"}', 0, False)
        assert [events[read_name(app, item)]["features"] for item in (long, near)] == [None, None]
        query = {name: value for name, value in EAST.items() if name != "features"}
        assert json.loads(event["options"]) == query
        assert json.loads(events[read_name(app, set_)]["options"]) == query | options | {"candidates": 100}
        assert events[read_name(app, near)]["options"] is None


def test_organic_choices_are_compared_with_an_unseen_answer(client: httpx.Client, tmp_path: Path) -> None:
    organic = {"features": {"user": "east"}, "labels": ["b", "nobody"], "bias_removal": 0, "idempotency_key": "k"}
    say(client, organic, organic | {"exclude": ["a"]})
    single, other = sorted(recorded_events(tmp_path, "organic"), key=lambda event: -event["positions"][0])
    assert (single["positions"], single["buckets"], single["bias_removal"]) == ([2, None], [1, -1], 0)
    assert (other["positions"], other["answer"], other["features"]) == ([1, None], None, '{"user":"east"}')
    assert read_series(client)['longtail_hits_total{bucket="torso",source="organic"}'] == 2


def test_features_are_recorded_only_if_allowed(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, record_features=False, answer_share=1), retriever=plane_retriever())
    with open_client(app) as client:
        say(client, {"answer_id": get_answer_ids(client)[0], "labels": ["a"], "features": {"user": "east"}})
        say(client, {"features": {"user": "east"}, "labels": ["a"]})
    for kind in ("choice", "organic", "answer"):
        assert [(event["features"], event["options"]) for event in recorded_events(tmp_path, kind)] == [(None, None)]


def test_events_that_no_disk_takes_are_refused_and_not_counted(
    app: Starlette, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    event = {"answer_id": get_answer_ids(client)[0], "labels": ["a"]}
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "write", full)
        message = check_error(say(client, event, status=503), 503, "storage", None)
    assert message == "the events could not be written to the disk; send them again later"
    assert read_recall(client)["all"]["positives"] == 0
    trouble = {"signal": "records", "severity": "act"}
    assert trouble.items() <= client.get("/v1/monitoring").json()["verdict"]["findings"][0].items()
    say(client, event)
    assert "records" not in {of["signal"] for of in client.get("/v1/monitoring").json()["verdict"]["findings"]}
    app.state.service.monitoring._report = None
    assert read_recall(client)["all"]["positives"] == 1
