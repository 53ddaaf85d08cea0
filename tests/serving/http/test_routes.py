"""What the routes do beyond ranking, on the plane: pins, reload, monitoring, feedback, label changes."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.events.folder import Segment
from longtail.serving.http.schemas.monitoring import MonitoringAnswer
from longtail.serving.http.schemas.operations import ReloadAnswer
from longtail.serving.monitoring import AnswerBaseline, Promises
from tests.serving.client import check_error, open_client, read_series
from tests.serving.monitoring.shop import BASELINE
from tests.serving.plane import PlaneLoader, plane_retriever, plane_settings

EAST = {"features": {"user": "east"}, "k": 3, "bias_removal": 0}


def retrieve(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/retrieve", json={"queries": [EAST], **body})


def ids(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    (result,) = response.json()["results"]
    return [label["id"] for label in result["labels"]]


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_previous_releases_can_be_pinned(tmp_path: Path, keep: int) -> None:
    app = create_app(plane_settings(tmp_path, keep_releases=keep), retriever=plane_retriever("r1", "1/"))
    with open_client(app) as client:
        for number in (2, 3, 4):
            app.state.service.serve(plane_retriever(f"r{number}", f"{number}/"))
        assert ids(retrieve(client)) == ids(retrieve(client, release=None)) == ["4/a", "4/c/é", "4/b"]
        for number in (1, 2, 3, 4):
            pinned = retrieve(client, release=f"r{number}")
            similar = client.post("/v1/similar", json={"id": f"{number}/a", "release": f"r{number}", "k": 1})
            if number >= 4 - keep:
                assert (pinned.json()["release"], similar.json()["release"]) == (f"r{number}", f"r{number}")
                assert (ids(pinned)[0], ids(similar)) == (f"{number}/a", [f"{number}/c/é"])
            else:
                for response in (pinned, similar):
                    message = check_error(response, 404, "unknown_release", "release")
                    assert message.endswith(f'received "r{number}"')


def test_a_pinned_release_has_the_label_changes_too(app: Starlette, client: httpx.Client) -> None:
    app.state.service.serve(plane_retriever("plane-2"))
    assert client.delete("/v1/labels/a").status_code == 200
    assert ids(retrieve(client)) == ids(retrieve(client, release="plane-1")) == ["c/é", "b", "4"]
    app.state.service.serve(plane_retriever("plane-3"))
    assert ids(retrieve(client)) == ["c/é", "b", "4"]


def test_reload_takes_what_current_names_or_says_why_not(tmp_path: Path, app: Starlette, client: httpx.Client) -> None:
    app.state.follower = ReleaseFollower(tmp_path, app.state.service, load=PlaneLoader("broken"))

    def reload() -> httpx.Response:
        return client.post("/v1/release/reload")

    for current, changed in (("plane-2", True), ("plane-2", False), ("plane-3", True)):
        (tmp_path / "CURRENT").write_text(f'{{"current": "{current}"}}')
        answer = reload()
        ReloadAnswer.model_validate_json(answer.content, strict=True)
        assert (answer.status_code, answer.json()["release"], answer.json()["changed"]) == (200, current, changed)
    for current, actual in (("broken", "broken"), ("../..", "none"), ("broken", "broken")):
        (tmp_path / "CURRENT").write_text(f'{{"current": "{current}"}}')
        message = check_error(reload(), 409, "release_refused", None)
        assert message == (
            f"expected CURRENT to name a release that can be served, found {actual}; the log says why not; "
            "plane-3 stays in service"
        )
        assert retrieve(client).json()["release"] == "plane-3"
    assert read_series(client)["longtail_release_load_failures_total"] == 3
    (tmp_path / "CURRENT").write_text('{"current": "plane-3"}')
    assert reload().json()["changed"] is False


@pytest.mark.parametrize("baseline", [None, BASELINE])
@pytest.mark.parametrize("queries", [0, 1, 100])
def test_monitoring_matches_the_documentation(tmp_path: Path, baseline: AnswerBaseline | None, queries: int) -> None:
    retriever = plane_retriever()
    retriever.promises = None if baseline is None else Promises(baseline)
    app = create_app(plane_settings(tmp_path), retriever=retriever)
    with open_client(app) as client:
        for _ in range(queries):
            answer = retrieve(client).json()
        if queries:
            chosen = {"answer_id": answer["results"][0]["answer_id"], "labels": ["a", "4"]}
            client.post("/v1/feedback", json={"events": [chosen, {"features": {"user": "north"}, "labels": ["b"]}]})
            client.delete("/v1/labels/4")
        response = client.get("/v1/monitoring")
        documented = MonitoringAnswer.model_validate_json(response.content, strict=True)
        assert documented.model_dump(mode="json") == response.json()
        hour = response.json()["windows"]["1h"]
        assert (hour["queries"], hour["requests"]["count"]) == (queries, queries)
        assert response.json()["labels"] == {"added": 0, "hidden": min(queries, 1), "available": 4 - min(queries, 1)}
        if queries:
            shares = [hour["exposures"][bucket]["share"] for bucket in ("head", "torso", "tail", "new")]
            assert shares == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
            recall = hour["recall"]["feedback"]
            assert [(recall[of]["positives"], recall[of]["hits"]) for of in ("head", "tail", "all")] == [
                (1, 1),
                (1, 0),
                (2, 1),
            ]
            assert hour["recall"]["organic"]["torso"]["value"] == 1
        if baseline is not None and queries == 100:
            # (1/3 − 1/2)·ln(2/3) + 2·(1/3 − 1/4)·ln(4/3), over 300 labels.
            assert hour["psi"]["buckets"] == pytest.approx(math.log(3 / 2) / 6 + math.log(4 / 3) / 6)
        else:
            assert hour["psi"]["buckets"] is None
        lengths = {len(values) for values in response.json()["series"].values() if isinstance(values, list)}
        assert len(lengths) == 1


ORGANIC = {"features": {"user": "east"}, "labels": ["a"]}
OF_ANSWER = {"answer_id": "r", "labels": ["a"]}
TOO_MANY = "expected at most 10000 of them, received 10001"
FEEDBACK = {
    "no events": ({"events": []}, "events", "expected a list of at least 1, received an empty one"),
    "too many events": ({"events": [OF_ANSWER] * 6}, "events", "expected at most 5 events, received 6"),
    "of nothing": ({"labels": ["a"]}, "events.0", "expected an answer_id or features, received neither"),
    "λ of an answer": (
        {**OF_ANSWER, "bias_removal": 0.5, "exclude": ["a"]},
        "events.0",
        "expected bias_removal and exclude in an event without answer_id, received one that has it",
    ),
    "long label": (
        {**OF_ANSWER, "labels": ["a", "x" * 513]},
        "events.0.labels.1",
        "expected a label of the release, or an id of at most 512 characters, received",
    ),
    "label of no kind": ({**OF_ANSWER, "labels": ["a", 1.5]}, "events.0.labels.1", "expected an id"),
    "too many labels": ({**OF_ANSWER, "labels": [1] * 10_001}, "events.0.labels", TOO_MANY),
    "too many excluded": ({**ORGANIC, "exclude": [1] * 10_001}, "events.0.exclude", TOO_MANY),
    "unknown key": ({**OF_ANSWER, "query": 0}, "events.0.query", "expected one of the keys"),
    "dial too high": ({**ORGANIC, "bias_removal": 3}, "events.0.bias_removal", "expected -1.0 <= bias_removal <= 2.0"),
}


@pytest.mark.parametrize("case", FEEDBACK)
def test_feedback_that_is_refused_is_recorded_nowhere(client: httpx.Client, case: str) -> None:
    body, field, message = FEEDBACK[case]
    response = client.post("/v1/feedback", json=body if "events" in body or not body else {"events": [body]})
    assert message in check_error(response, 422, "invalid_request", field)
    recorded = {
        name: value for name, value in read_series(client).items() if name.startswith("longtail_feedback_events")
    }
    assert set(recorded.values()) == {0}


def test_features_that_are_recorded_are_bounded(tmp_path: Path) -> None:
    long, short = ({"events": [ORGANIC | {"features": {"user": "x" * size}}]} for size in (90, 89))
    app = create_app(plane_settings(tmp_path, max_features_bytes=100), retriever=plane_retriever())
    with open_client(app) as client:
        assert check_error(client.post("/v1/feedback", json=long), 422, "invalid_request", "events.0.features") == (
            "expected features of at most 100 bytes as JSON, as they are recorded (LONGTAIL_RECORD_FEATURES), received "
            "101"
        )
        assert client.post("/v1/feedback", json=short).status_code == 200
    unrecorded = plane_settings(tmp_path, max_features_bytes=100, record_features=False)
    with open_client(create_app(unrecorded, retriever=plane_retriever())) as client:
        assert client.post("/v1/feedback", json=long).status_code == 200


def test_a_request_has_a_budget_of_labels(tmp_path: Path) -> None:
    message = "expected at most 8 labels asked for, k summed over the queries (100 × LONGTAIL_MAX_QUERIES), received 9"
    app = create_app(plane_settings(tmp_path, max_total_k=8, max_k=4), retriever=plane_retriever())
    with open_client(app) as client:
        for path, field, most, beyond in (
            ("/v1/retrieve", "queries", [4, 4], [3, 3, 3]),
            ("/v1/retrieve", "queries", [4, 3, 1], [4, 4, 1]),
        ):
            bodies = ({"queries": [{**EAST, "k": k} for k in ks]} for ks in (most, beyond))
            accepted, turned_away = (client.post(path, json=body) for body in bodies)
            assert accepted.status_code == 200
            assert check_error(turned_away, 422, "invalid_request", field) == message
        for diversity in ({"max_per": {"year": 1}, "pool": 5}, {"mmr": 0.5, "pool": 5}):
            of_pool = {"queries": [{**EAST, "k": 4}, {**EAST, "k": 4, **diversity}]}
            counted = message.replace("k summed", "k, of max_per and mmr their pool, summed")
            assert check_error(client.post("/v1/retrieve", json=of_pool), 422, "invalid_request", "queries") == counted
        assert client.post("/v1/similar", json={"ids": ["a", "b"], "k": 4}).status_code == 200
        assert check_error(
            client.post("/v1/similar", json={"ids": ["a", "b", "4"], "k": 3}), 422, "invalid_request", "k"
        ) == (message)
    # A query alone may ask for max_k, whatever the budget.
    app = create_app(plane_settings(tmp_path, max_total_k=1), retriever=plane_retriever())
    with open_client(app) as client:
        assert client.post("/v1/retrieve", json={"queries": [{**EAST, "k": 4}]}).status_code == 200


def test_labels_change_while_feedback_is_stuck(client: httpx.Client) -> None:
    stuck = threading.Event()
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "write", lambda *_, **__: stuck.wait(4))
        saying = pool.submit(client.post, "/v1/feedback", json={"events": [ORGANIC]})
        try:
            assert client.delete("/v1/labels/a").status_code == 200
            assert client.post("/v1/labels/restore", json={"ids": ["a"]}).status_code == 200
            assert not saying.done()
        finally:
            stuck.set()
        assert saying.result().status_code == 200


@pytest.mark.parametrize("id_", ["z", "A", "a/", "", "%00", "x" * 5000, "a%0A", "a%0Ab", "%0Aa"])
def test_unknown_labels_cannot_be_hidden(client: httpx.Client, id_: str) -> None:
    response = client.delete(f"/v1/labels/{id_}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] in ("unknown_label", "unknown_route")
    assert len(response.text) < 800
    assert read_series(client)["longtail_labels_hidden"] == 0


@pytest.mark.parametrize(
    ("labels", "status", "kind", "field"),
    [
        ([], 422, "invalid_request", "labels"),
        ([{"id": "a", "features": {}}] * 6, 422, "invalid_request", "labels"),
        ([{"id": "a"}], 422, "invalid_request", "labels.0.features"),
        ([{"id": "a", "features": {}}, {"id": "", "features": {}}], 422, "invalid_request", "labels.1.id"),
        ([{"id": "x" * 513, "features": {}}], 422, "invalid_request", "labels.0.id"),
        ([{"id": ["a"], "features": {}}], 422, "invalid_request", "labels.0.id"),
        ([{"features": {}}], 422, "invalid_request", "labels.0.id"),
        ([{"id": "a", "features": {}, "feature": {}}], 422, "invalid_request", "labels.0.feature"),
        ([{"id": "n", "features": {}}], 422, "no_label_tower", "labels"),
    ],
)
def test_labels_that_cannot_be_added(
    client: httpx.Client, labels: list[object], status: int, kind: str, field: str
) -> None:
    client.delete("/v1/labels/a")
    message = check_error(client.post("/v1/labels", json={"labels": labels}), status, kind, field)
    assert message.startswith("expected ")
    assert (read_series(client)["longtail_labels_hidden"], ids(retrieve(client))[0]) == (1, "c/é")
