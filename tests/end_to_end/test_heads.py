"""The real server process bounds the heads of requests in bytes, fields and time, and answers what keeps to that."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx2 as httpx
import pytest

from longtail.serving.http.schemas.operations import ErrorAnswer
from tests.bundles import make_bundle
from tests.end_to_end.killing import check_log, server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import ServerProcess

KEY = "polite-key-0123456789"
BODY = json.dumps({"queries": [{"features": {"user_id": "u1"}, "k": 2}]}).encode()
LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-API-Key: %b\r\n"
REQUEST = POST % KEY.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = POST % KEY.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A service that waits two seconds for a head, without an error in its log."""
    root = tmp_path_factory.mktemp("heads")
    publish_bundle(make_bundle(), root)
    settings = {"state": root / "state", "api_keys": KEY, "request_seconds": 2}
    with server(root / "releases", root / "log", **settings) as process:
        process.wait_until_ready()
        yield process
        assert process.terminate() == 0
    check_log(root / "log", KEY)


@pytest.fixture
def client(service: ServerProcess) -> Iterator[socket.socket]:
    """A connection to the service."""
    url = httpx.URL(service.url)
    with socket.create_connection((url.host, url.port), timeout=20) as connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """All bytes until the service closes the connection, which it may do with some of the client's bytes unread."""
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def answers(connection: socket.socket, count: int) -> list[bytes]:
    """So many answers of a connection that stays open, each with its head."""
    data = b""
    while data.count(b"HTTP/1.1 ") < count or not data.endswith(b"}"):
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return [b"HTTP/1.1 " + answer for answer in data.split(b"HTTP/1.1 ")[1:]]


def assert_refused(answer: bytes, status: int, kind: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head.decode().splitlines()[1:])
    problem = ErrorAnswer.model_validate_json(body, strict=True)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert (problem.status, problem.error.type) == (status, kind)
    assert (fields["content-type"], fields["connection"]) == ("application/problem+json", "close")
    assert (fields["x-request-id"], fields["x-content-type-options"]) == (problem.request_id, "nosniff")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(LIVE + b"X: ", b"a" * 16_384, id="value"),
        pytest.param(LIVE, b"a" * 16_384, id="name"),
        pytest.param(b"GET /", b"a" * 16_384, id="path"),
        pytest.param(b"", b"\r\n" * 8_192, id="line-breaks"),
        pytest.param(LIVE + b"\r\n" + LIVE + b"X: ", b"a" * 16_384, id="second-request"),
    ],
)
def test_endless_head_is_refused_after_64_kib(client: socket.socket, start: bytes, piece: bytes) -> None:
    client.sendall(start)
    if start.count(b"GET") == 2:
        answers(client, 1)
    sent_bytes = 0
    while not select.select([client], [], [], 0.02)[0]:
        client.sendall(piece)
        sent_bytes += len(piece)
        assert sent_bytes < (64 + 256) * 1_024  # uvloop reads 250 KiB at once
    assert_refused(read_to_end(client), 431, "headers_too_large")
    assert sent_bytes >= 65_536


@pytest.mark.parametrize("piece", [b"a" * 65_536, b"a: b\r\n" * 10_000], ids=["value", "fields"])
@pytest.mark.parametrize("start", [LIVE + b"X: ", CHUNKED + b"0\r\nX: "], ids=["head", "trailers"])
def test_other_requests_are_answered_during_an_endless_head(
    service: ServerProcess, client: socket.socket, start: bytes, piece: bytes
) -> None:
    errors: list[ConnectionError] = []

    def flood() -> None:
        client.sendall(start)
        try:
            for _ in range(1_000):
                client.sendall(piece)
        except ConnectionError as error:
            errors.append(error)

    flooding = threading.Thread(target=flood)
    with httpx.Client(base_url=service.url, headers={"X-API-Key": KEY}) as polite:
        assert (
            polite.post("/v1/retrieve", content=BODY, headers={"Content-Type": "application/json"}).status_code == 200
        )
        flooding.start()
        for _ in range(20):
            answer = polite.post("/v1/retrieve", content=BODY, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200
    flooding.join(60)
    assert not flooding.is_alive()
    assert len(errors) == 1


@pytest.mark.parametrize("last", [b"", b"\r\n"], ids=["incomplete", "complete"])
def test_more_than_100_fields_get_431(client: socket.socket, last: bytes) -> None:
    client.sendall(LIVE + b"Connection: close\r\n" + b"X: 1\r\n" * 99 + b"Y: 1\r\n" + last)
    assert_refused(read_to_end(client), 431, "headers_too_large")


def test_100_fields_are_answered(client: socket.socket) -> None:
    client.sendall(LIVE + b"X: 1\r\n" * 99 + b"\r\n")
    assert answers(client, 1)[0].startswith(b"HTTP/1.1 200 ")


def test_a_head_of_more_than_64_kib_in_one_piece_gets_431(client: socket.socket) -> None:
    client.sendall(LIVE + b"Cookie: " + b"c" * 65_536 + b"\r\n\r\n")
    assert_refused(read_to_end(client), 431, "headers_too_large")


@pytest.mark.parametrize("size", [30_000, 65_000])
def test_a_large_head_within_the_limit_is_answered(client: socket.socket, size: int) -> None:
    large = REQUEST.replace(b"Host:", b"Cookie: " + b"c" * size + b"\r\nHost:", 1)
    for _ in range(2):
        client.sendall(large)
        assert answers(client, 1)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("before", [b"", LIVE + b"\r\n"], ids=["first", "second"])
def test_incomplete_head_gets_408(client: socket.socket, before: bytes) -> None:
    if before:
        client.sendall(before)
        answers(client, 1)
    client.sendall(LIVE)
    assert_refused(read_to_end(client), 408, "slow_head")


def test_silent_connection_is_closed(client: socket.socket) -> None:
    assert read_to_end(client) == b""


def test_slow_body_after_its_answer_is_closed(client: socket.socket) -> None:
    client.sendall(POST % b"no-key" + b"Content-Length: 100000\r\n\r\n")
    assert answers(client, 1)[0].startswith(b"HTTP/1.1 401 ")
    began = time.monotonic()
    while not select.select([client], [], [], 0.1)[0]:
        client.sendall(b" ")
        assert time.monotonic() - began < 20
    assert read_to_end(client) == b""


def test_slow_head_within_the_limit_is_answered(client: socket.socket) -> None:
    head = LIVE + b"X: slow\r\n\r\n"
    for start in range(0, len(head), 10):
        client.sendall(head[start : start + 10])
        time.sleep(0.05)
    assert answers(client, 1)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("cut", [1, len(LIVE) + 20, -3])
def test_pipelined_requests_are_answered_in_order(client: socket.socket, cut: int) -> None:
    requests = [LIVE + b"\r\n", REQUEST, CHUNKED + b"0\r\n\r\n", LIVE + b"\r\n"]
    requests = [part.replace(b"Host:", b"X-Request-ID: r%d\r\nHost:" % i, 1) for i, part in enumerate(requests)]
    data = b"".join(requests)
    client.sendall(data[:cut])
    time.sleep(0.1)
    client.sendall(data[cut:])
    replies = answers(client, 4)
    assert all(reply.startswith(b"HTTP/1.1 200 ") for reply in replies)
    assert [b"x-request-id: r%d\r\n" % i in reply for i, reply in enumerate(replies)] == [True] * 4


def test_idle_connection_outlives_the_head_timeout(client: socket.socket) -> None:
    for _ in range(2):
        client.sendall(REQUEST)
        assert answers(client, 1)[0].startswith(b"HTTP/1.1 200 ")
        time.sleep(3)
    assert read_to_end(client) == b""  # after five idle seconds


def test_malformed_http_gets_400(client: socket.socket) -> None:
    client.sendall(b"what is this\r\n\r\n")
    assert_refused(read_to_end(client), 400, "malformed_request")
