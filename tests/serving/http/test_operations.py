"""Health, metrics, request ids, the generic 500 and the OpenAPI document."""

import logging
from pathlib import Path
from typing import NoReturn

import httpx2 as httpx
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.monitoring.workers import Workers, WorkerState
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

QUERY = {"queries": [{"features": {"user": "east"}, "k": 3, "bias_removal": 0}]}


def test_health_of_a_service_with_a_release(client: httpx.Client) -> None:
    assert client.get("/livez").json()["status"] == "alive"
    assert client.get("/readyz").json()["status"] == "ready"
    assert "longtail_ready 1.0" in client.get("/metrics").text


def test_a_draining_service_is_not_ready_but_answers(app: Starlette, client: httpx.Client) -> None:
    app.state.service.drain()
    response = client.get("/readyz")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "not_ready")
    assert client.get("/livez").status_code == 200
    assert client.post("/v1/retrieve", json=QUERY).status_code == 200
    assert "longtail_ready 0.0" in client.get("/metrics").text


def test_a_service_of_several_workers_is_ready_when_all_have_looked_for_a_release(tmp_path: Path) -> None:
    workers = Workers(3)
    for worker in range(3):
        workers.start(worker, again=False)
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever(), worker=1, workers=workers)
    with open_client(app) as client:
        workers.set_state(0, WorkerState.up)
        response = client.get("/readyz")
        assert (response.status_code, response.json()["error"]["message"]) == (
            503, "expected 3 workers that have loaded a release, found 1; others are starting"
        )  # fmt: skip
        assert "longtail_ready 0.0" in client.get("/metrics").text
        assert client.post("/v1/retrieve", json=QUERY).status_code == 200
        workers.set_state(2, WorkerState.ready)
        answer = client.get("/readyz").json()
        assert (answer["status"], answer["workers"]) == ("ready", {"expected": 3, "ready": 2})
        workers.set_state(2, WorkerState.down)
        workers.start(2, again=True)
        assert client.get("/readyz").json()["workers"] == {"expected": 3, "ready": 1}
        assert "longtail_ready 1.0" in client.get("/metrics").text
        assert 'longtail_worker_restarts_total{worker="2"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "body"),
    [("retrieve", QUERY), ("similar", {"id": "a"}), ("labels/a", None), ("release", None), ("../readyz", None)],
)
def test_before_the_first_release(tmp_path: Path, path: str, body: dict | None) -> None:
    with open_client(create_app(plane_settings(tmp_path))) as client:
        response = client.request("GET" if body is None else "POST", f"/v1/{path}", json=body)
        assert response.status_code == 503
        assert response.json()["error"] == {
            "type": "not_ready",
            "message": "expected a published release, found none loaded yet; see longtail-index publish",
        }
        assert client.get("/livez").status_code == 200


def test_answers_are_counted_by_bucket_route_and_stage(client: httpx.Client) -> None:
    client.post("/v1/retrieve", json={"queries": QUERY["queries"] * 2})
    client.get("/v1/labels/c/é")
    client.get("/nowhere")
    metrics = client.get("/metrics").text
    for line in (
        'longtail_exposures_total{bucket="head",restricted="no"} 2.0',
        'longtail_exposures_total{bucket="torso",restricted="no"} 2.0',
        'longtail_exposures_total{bucket="tail",restricted="no"} 2.0',
        "longtail_queries_total 2.0",
        'longtail_stage_seconds_count{stage="search"} 1.0',
        'longtail_requests_total{route="/v1/retrieve",status="2xx"} 1.0',
        'longtail_requests_total{route="/v1/labels/{id:path}",status="2xx"} 1.0',
        'longtail_requests_total{route="unmatched",status="4xx"} 1.0',
        'longtail_request_seconds_count{route="/v1/retrieve"} 1.0',
    ):
        assert line in metrics.splitlines()


def test_restricted_queries_are_counted_by_option(client: httpx.Client) -> None:
    (query,) = QUERY["queries"]
    restrictions: list[dict[str, object]] = [
        {"filter": {}}, {"exclude": ["a"]}, {"buckets": ["head"]},
        {"filter": {"title": {"exists": True}}}, {"buckets": ["tail"], "allow": ["a"]},
    ]  # fmt: skip
    body = {"queries": [query | restriction for restriction in restrictions]}
    assert client.post("/v1/retrieve", json=body).status_code == 200
    window = client.get("/v1/monitoring").json()["windows"]["5m"]
    assert (window["queries"], window["restricted"]) == (5, {"queries": 3, "buckets": 2, "allow": 1, "filter": 1})


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, 'x"y', "ü".encode("latin-1")])
def test_another_request_id_is_replaced(client: httpx.Client, sent: str) -> None:
    response = client.post("/v1/retrieve", json=QUERY, headers={"x-request-id": sent})
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-request-id"] == response.json()["request_id"]


def test_internal_errors_are_logged_but_not_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("the secret is 1234")

    retriever = plane_retriever()
    retriever.retrieve = broken
    with (
        open_client(create_app(plane_settings(tmp_path), retriever=retriever)) as client,
        caplog.at_level(logging.ERROR),
    ):
        response = client.post("/v1/retrieve", json=QUERY, headers={"x-request-id": "lost-1"})
        assert response.status_code == 500
        assert response.json() == {
            "type": "urn:longtail:internal",
            "title": "Internal Server Error",
            "status": 500,
            "detail": response.json()["error"]["message"],
            "error": {
                "type": "internal",
                "message": "the request could not be answered; the server's log has the details under this request id",
            },
            "request_id": "lost-1",
        }
        assert "the secret is 1234" in caplog.text
        assert "lost-1" in caplog.text
        assert 'longtail_requests_total{route="/v1/retrieve",status="5xx"} 1.0' in client.get("/metrics").text
