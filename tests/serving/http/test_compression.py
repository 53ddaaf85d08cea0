"""Answers compressed when the client accepts it, and bounded in bytes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi import FastAPI

from longtail.serving import create_app
from longtail.serving.http.app import apply_settings
from longtail.serving.http.compression import accepted
from tests.serving.client import client_of
from tests.serving.plane import plane_retriever, plane_settings

BODY = {"queries": [{"features": {"user": "east"}, "k": 4}] * 5}
ANSWER_BYTES = 5 * 4 * 60
"""At least so many has an answer to BODY."""


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return create_app(plane_settings(tmp_path, max_queries=300, queue_limit=600), retriever=plane_retriever())


@pytest.fixture
def client(app: FastAPI) -> Iterator[httpx.Client]:
    with client_of(app) as client:
        yield client


def raw(client: httpx.Client, asked: str | None, body: Any = BODY) -> tuple[httpx.Headers, bytes]:
    """Headers and bytes of an answer as they come."""
    headers = {} if asked is None else {"accept-encoding": asked}
    request = client.build_request("POST", "/v1/retrieve", json=body, headers=headers)
    if asked is None:
        del request.headers["accept-encoding"]
    response = client.send(request, stream=True)
    assert response.status_code == 200
    content = b"".join(response.iter_raw())
    assert int(response.headers["content-length"]) == len(content)
    return response.headers, content


def unpacked(headers: httpx.Headers, content: bytes, size: int = 1 << 20) -> dict[str, Any]:
    coding = headers.get("content-encoding")
    if coding == "gzip":
        content = gzip.decompress(content)
    elif coding == "zstd":
        content = pa.CompressedInputStream(pa.BufferReader(content), "zstd").read(size)
    answer: dict[str, Any] = json.loads(content)
    return answer


@pytest.mark.parametrize(
    ("asked", "coding"),
    [
        (None, None), ("", None), ("identity", None), ("br", None), ("gzip", "gzip"), ("GZIP;q=0.1", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"), ("gzip;q=0, *", None), ("zstd;q=0.0, gzip", "gzip"), ("gzip;q=nan", None),
        ("gzip;q=x", None), (", ,;q=1,gzip", "gzip"), ("zstd;x=0", "zstd"), ("a" * 9000 + ",gzip", None),
    ],
)  # fmt: skip
def test_it_is_what_the_client_accepts(client: httpx.Client, asked: str | None, coding: str | None) -> None:
    headers, content = raw(client, asked)
    assert headers.get("content-encoding") == coding
    assert headers["vary"] == "accept-encoding"
    assert len(unpacked(headers, content)["results"]) == 5
    assert (len(content) < ANSWER_BYTES / 2) == (coding is not None)
    assert accepted(None if asked is None else asked.encode()) == coding


def test_large_ones_too_in_a_thread(client: httpx.Client) -> None:
    many = {"queries": BODY["queries"] * 50}
    for coding in ("gzip", "zstd"):
        headers, content = raw(client, coding, many)
        assert headers["content-encoding"] == coding
        assert len(unpacked(headers, content)["results"]) == 250


def test_small_ones_files_and_heads_stay_as_they_are(client: httpx.Client) -> None:
    asked = {"accept-encoding": "gzip"}
    assert "content-encoding" not in client.get("/livez", headers=asked).headers
    assert "vary" not in client.get("/livez", headers=asked).headers
    style = client.get("/docs/assets/swagger-ui.css", headers=asked)
    assert "content-encoding" not in style.headers
    metrics = client.get("/metrics", headers=asked)
    assert metrics.headers["content-encoding"] == "gzip"
    assert "longtail_requests_total" in metrics.text
    assert "content-encoding" not in client.get("/metrics", headers={"accept-encoding": "identity"}).headers
    wrong = client.post("/v1/retrieve", json={"queries": [{"features": {}, "x" * 90: 1}]}, headers=asked)
    assert (wrong.status_code, wrong.json()["status"]) == (422, 422)


def test_it_can_be_switched_off_while_it_runs(app: FastAPI, client: httpx.Client) -> None:
    apply_settings(app, app.state.service.settings.model_copy(update={"compress_bytes": None}))
    headers, _ = raw(client, "gzip")
    assert "content-encoding" not in headers
    assert "vary" not in headers


def test_an_answer_has_a_budget_of_bytes(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path, max_answer_bytes=600), retriever=plane_retriever())
    with client_of(app) as client:

        def ask(queries: int, **options: object) -> httpx.Response:
            query = {"features": {"user": "east"}, "k": 4, **options}
            return client.post("/v1/retrieve", json={"queries": [query] * queries})

        assert ask(1).status_code == 200
        refused = ask(2)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "queries")
        assert "at most 600 bytes (LONGTAIL_MAX_ANSWER_BYTES)" in refused.json()["detail"]
        similar = client.post("/v1/similar", json={"ids": ["a", "b", "4"], "k": 3})
        assert (similar.status_code, similar.json()["error"]["field"]) == (422, "k")
        assert ask(1, display=False).status_code == 200
