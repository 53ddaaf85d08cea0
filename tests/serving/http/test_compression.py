"""Answers compressed when the client accepts it, and bounded in bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import httpx2 as httpx
import pytest

from longtail.serving import create_app
from tests.serving.client import open_client
from tests.serving.plane import plane_retriever, plane_settings

BODY = {"queries": [{"features": {"user": "east"}, "k": 4}] * 5}


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("br, gzip;q=0.5", "gzip"),
        ("identity", None),
        ("br", None),
        ("gzip;q=0", None),
        ("identity, gzip ; q=0.00", None),
    ],
)
def test_compression_follows_accept_encoding(client: httpx.Client, accepted: str, coding: str | None) -> None:
    request = client.build_request("POST", "/v1/retrieve", json=BODY, headers={"accept-encoding": accepted})
    response = client.send(request, stream=True)
    content = b"".join(response.iter_raw())
    assert response.headers.get("content-encoding") == coding
    assert (response.headers.get("vary") == "Accept-Encoding") is (coding is not None)
    assert int(response.headers["content-length"]) == len(content)
    assert len(json.loads(gzip.decompress(content) if coding else content)["results"]) == 5
    assert "content-encoding" not in client.get("/livez", headers={"accept-encoding": accepted}).headers


def test_an_answer_has_a_budget_of_bytes(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_answer_bytes=600), retriever=plane_retriever())
    with open_client(app) as client:

        def ask(queries: int, **options: object) -> httpx.Response:
            query = {"features": {"user": "east"}, "k": 4, **options}
            return client.post("/v1/retrieve", json={"queries": [query] * queries})

        assert ask(1).status_code == 200
        refused = ask(2)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "queries")
        assert "at most 600 bytes" in refused.json()["detail"]
        similar = client.post("/v1/similar", json={"ids": ["a", "b", "4"], "k": 3})
        assert (similar.status_code, similar.json()["error"]["field"]) == (422, "k")
        assert ask(1, display=False).status_code == 200
