"""Quotas of keys and addresses over HTTP, and requests that are searched in parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from longtail.serving import create_app
from longtail.serving.http.app import apply_settings
from tests.serving.client import client_of
from tests.serving.http.test_overload import QUERY, Gate, figures
from tests.serving.plane import plane_retriever, plane_settings

ONE, TWO = "one-0123456789abcdef", "two-0123456789abcdef"
EVENTS = {"events": [{"request_id": "r", "labels": ["a"]}]}


def ask(client: httpx.Client, key: str, k: int = 1, path: str = "retrieve") -> httpx.Response:
    body = {"queries": [{**QUERY, "k": k}]} if path == "retrieve" else {"id": "a", "k": k}
    return client.post(f"/v1/{path}", json=body, headers={"x-api-key": key})


@pytest.mark.parametrize(
    ("quota", "value", "wait", "message"),
    [
        ("quota_requests", 0.01, "100", "expected at most 0.01 requests a second of one client"),
        ("quota_labels", 1e-5, "3600", "expected at most 1e-05 labels a second asked for by one client"),
    ],
)
def test_a_key_beyond_its_quota_is_told_which_and_another_is_served(
    tmp_path: Path, quota: str, value: float, wait: str, message: str
) -> None:
    settings = plane_settings(tmp_path, api_keys=(ONE, TWO), **{quota: value})
    app = create_app(settings, retriever=plane_retriever())
    with client_of(app) as client:
        assert ask(client, ONE).status_code == 200
        for refused in (ask(client, ONE), ask(client, ONE, path="similar")):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, wait)
            problem = refused.json()
            assert problem["type"] == f"urn:longtail:{quota}"
            assert problem["error"]["type"] == quota
            assert problem["detail"].startswith(message)
            assert f"LONGTAIL_{quota.upper()}" in problem["detail"]
        assert ask(client, TWO).status_code == 200
        feedback = client.post("/v1/feedback", json=EVENTS, headers={"x-api-key": ONE})
        assert feedback.status_code == (429 if quota == "quota_requests" else 200)
        assert client.get("/livez").status_code == 200
        seen = client.get("/metrics", headers={"x-api-key": TWO}).text
        assert f'longtail_over_quota_total{{quota="{quota}"}} {3 if quota == "quota_requests" else 2}.0' in seen
        assert "longtail_shed_total 0.0" in seen
        # On SIGHUP.
        apply_settings(app, settings.model_copy(update={quota: None}))
        assert ask(client, ONE).status_code == 200


def test_labels_that_are_listed_are_charged_as_those_that_are_answered(tmp_path: Path) -> None:
    settings = plane_settings(tmp_path, api_keys=(ONE, TWO), quota_labels=0.001, quota_burst_seconds=2000)
    app = create_app(settings, retriever=plane_retriever())

    def listing(key: str, **parameters: int) -> httpx.Response:
        return client.get("/v1/labels", params=parameters, headers={"x-api-key": key})

    with client_of(app) as client:
        # Two labels to begin with; four are listed, so that two are owed.
        assert len(listing(ONE).json()["labels"]) == 4
        for refused in (listing(ONE), ask(client, ONE)):
            assert (refused.status_code, refused.json()["type"]) == (429, "urn:longtail:quota_labels")
            assert 1990 <= int(refused.headers["retry-after"]) <= 2000
        assert [listing(TWO, limit=limit).status_code for limit in (1, 2, 1)] == [200, 200, 429]
        apply_settings(app, settings.model_copy(update={"quota_labels": None, "quota_requests": 0.001}))
        assert [listing(TWO).status_code for _ in range(2)] == [200, 429]


def test_searches_of_an_address_at_a_time(tmp_path: Path) -> None:
    gate = Gate(tmp_path, quota_searches=1)
    with client_of(gate.app) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, client, "")
        gate.until_waiting(0)
        refused = ask(client, "")
        assert (refused.status_code, refused.json()["type"]) == (429, "urn:longtail:quota_searches")
        gate.open.set()
        assert first.result().status_code == 200
        assert (
            client.post("/v1/retrieve", content=b"{", headers={"content-type": "application/json"}).status_code == 400
        )
        assert ask(client, "").status_code == 200


def test_a_request_in_parts_is_answered_and_counted_as_one(tmp_path: Path) -> None:
    queries = [{"features": {"user": user}, "k": 1 + place} for place, user in enumerate(("east", "north", "east"))]
    answers = []
    for root, max_batch in ((tmp_path / "whole", 64), (tmp_path / "parts", 1)):
        app = create_app(plane_settings(root, max_batch=max_batch), retriever=plane_retriever())
        with client_of(app) as client:
            retrieved = client.post("/v1/retrieve", json={"queries": queries}).json()["results"]
            similar = client.post("/v1/similar", json={"ids": ["a", "b", "4"], "k": 2}).json()["results"]
            assert [result["id"] for result in similar] == ["a", "b", "4"]
            answers.append([[label["id"] for label in result["labels"]] for result in (*retrieved, *similar)])
            wrong = {"queries": [*queries, {"features": {}, "k": 1, "popularity": 99.0}]}
            refused = client.post("/v1/retrieve", json=wrong)
            assert (refused.status_code, refused.json()["error"]["field"]) == (422, "queries.3.popularity")
            unknown = client.post("/v1/similar", json={"ids": ["a", "b", "?"]})
            assert (unknown.status_code, unknown.json()["error"]["field"]) == (404, "ids.2")
            seen = figures(client)
            assert seen["longtail_queries_total"] == 6
            assert sum(seen[f'longtail_exposures_total{{bucket="{name}"}}'] for name in ("head", "torso", "tail")) == 12
            assert (seen["longtail_batch_queries_count"] > 5) == (max_batch == 1)
            assert seen["longtail_queue_depth"] >= 0
    assert answers[0] == answers[1] == [["a"], ["b", "c/é"], ["a", "c/é", "b"], *answers[0][3:]]
