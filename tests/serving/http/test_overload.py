"""A service that cannot keep up: it refuses, gives up and goes on. Searches wait at a gate that the test opens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
from starlette.applications import Starlette

from longtail.serving import create_app
from longtail.serving.core.answers import Retrieval
from longtail.serving.core.queries import RetrieveQuery
from tests.serving.client import open_client, read_series, serve_app
from tests.serving.plane import plane_retriever, plane_settings
from tests.serving.process import until

QUERY = {"features": {"user": "east"}, "k": 1}


class GatedService:
    """A service whose searches wait until it is opened."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.open = threading.Event()
        retriever = plane_retriever()
        retrieve = retriever.retrieve

        def behind_the_gate(queries: Sequence[RetrieveQuery], *draws: Any, **options: Any) -> Retrieval:
            assert self.open.wait(20)
            return retrieve(queries, *draws, **options)

        retriever.retrieve = behind_the_gate  # type: ignore[method-assign]
        self.app = create_app(plane_settings(root, **settings), retriever=retriever)
        self.service = self.app.state.service

    def until_waiting(self, queries: int) -> None:
        queue = self.service.searches.queue
        until(lambda: queue._waiting.queries == queries and queue._running, f"{queries} queries to wait")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_beyond_the_queue_it_says_429_and_when_to_come_back(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    gate = GatedService(tmp_path, queue_limit=10)
    with open_client(gate.app) as client:

        def ask(queries: int, path: str = "retrieve") -> httpx.Response:
            return client.post(f"/v1/{path}", json={"queries": [QUERY] * queries})

        first = threads.submit(ask, 1)
        gate.until_waiting(0)
        second = threads.submit(ask, 3)
        gate.until_waiting(3)
        too_large = ask(5)
        third = threads.submit(ask, 2)
        gate.until_waiting(5)
        full = [ask(1), client.post("/v1/similar", json={"id": "a"}), client.post("/v1/embed", json={"labels": ["a"]})]
        assert read_series(client)["longtail_queue_depth"] <= 5
        for refused in (too_large, *full):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "queue_full"
            assert refused.json()["error"]["message"].startswith("expected at most 10 queries waiting, ")
        assert client.get("/livez").status_code == client.get("/readyz").status_code == 200
        gate.open.set()
        assert [len(item.result().json()["results"]) for item in (first, second, third)] == [1, 3, 2]
        assert ask(5).status_code == 200
        after = read_series(client)
        assert after["longtail_shed_total"] == 4
        assert after['longtail_requests_total{route="/v1/retrieve",status="4xx"}'] == 2
        assert after["longtail_queries_total"] == 11
        requests = client.get("/v1/monitoring").json()["windows"]["5m"]["requests"]
        assert (requests["shed"], requests["errors"]) == (4, 0)


def test_who_waits_too_long_gets_503_and_the_service_goes_on(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    gate = GatedService(tmp_path, request_seconds=0.3)
    with open_client(gate.app) as client:
        waiting = [threads.submit(client.post, "/v1/retrieve", json={"queries": [QUERY]}) for _ in range(3)]
        for response in (item.result() for item in waiting):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["type"] == "timeout"
        assert read_series(client)["longtail_timeouts_total"] == 3
        assert client.get("/v1/monitoring").json()["windows"]["5m"]["requests"]["errors"] == 3
        gate.open.set()
        assert client.post("/v1/retrieve", json={"queries": [QUERY]}).status_code == 200
        assert read_series(client)["longtail_queue_depth"] == 0


def test_what_clients_who_hang_up_have_waiting_is_not_searched(tmp_path: Path) -> None:
    gate = GatedService(tmp_path)
    body = json.dumps({"queries": [QUERY] * 2}).encode()
    query = b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    query += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with serve_app(gate.app) as address, ExitStack() as stack:
        clients = []
        for waiting in (0, 2, 4, 6, 8):
            clients.append(stack.enter_context(socket.create_connection(address, timeout=10)))
            clients[-1].sendall(query)
            gate.until_waiting(waiting)
        for gone in (clients[0], clients[1], clients[3]):
            gone.close()
        gate.until_waiting(4)
        gate.open.set()
        for client in (clients[2], clients[4]):
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        # The one that was searched already was searched to the end.
        until(lambda: "longtail_queries_total 6.0" in httpx.get("http://{}:{}/metrics".format(*address)).text)
        after = httpx.get("http://{}:{}/metrics".format(*address)).text
        assert 'longtail_requests_total{route="/v1/retrieve",status="4xx"} 3.0' in after
        assert 'longtail_requests_total{route="/v1/retrieve",status="5xx"} 0.0' in after
    gate.service.close()


Receive = Callable[[], Awaitable[dict[str, Any]]]


def answer_to(app: Starlette, path: str, receive: Receive) -> tuple[int, dict[bytes, bytes], dict[str, Any]]:
    """Status, headers and body of what the application sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    start, *rest = sent
    return start["status"], dict(start["headers"]), orjson.loads(b"".join(message["body"] for message in rest))


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/similar", "/v1/feedback", "/v1/labels", "/v1/labels/delete"])
def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, path: str) -> None:
    app = create_app(plane_settings(tmp_path, request_seconds=0.05), retriever=plane_retriever())
    parts = [b'{"queries":', b" ", b" "]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": parts.pop(0), "more_body": True}

    status, headers, body = answer_to(app, path, receive)
    assert (status, body["error"]["type"], headers[b"connection"]) == (408, "slow_body", b"close")
    assert body["error"]["message"] == "expected the whole body within 0.05 s, received 13 bytes of it"
    app.state.service.close()
