"""Connections whose client does not go on are ended, heads without end refused; a request that came is answered."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.serving.http.schemas.operations import ErrorAnswer
from longtail.serving.process import protocol as connections
from longtail.serving.process.protocol import MAX_HEAD_BYTES, HttpConnection, Keeping

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body is there, with 30 MB for /large."""
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    body = b"x" * (30_000_000 if scope["path"] == "/large" else 10)
    await Response(body)(scope, receive, send)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    with address_of(answer, monkeypatch) as bound:
        yield bound


@contextmanager
def address_of(
    app: ASGIApp, monkeypatch: pytest.MonkeyPatch, keeping: Keeping | None = None
) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.3)
    http = partial(HttpConnection, keeping=keeping or Keeping(0.3))
    server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join(10)
        assert not thread.is_alive()


def connected(address: tuple[str, int], window: int = 0) -> socket.socket:
    client = socket.socket()
    if window:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    client.settimeout(10)
    client.connect(address)
    return client


def everything(client: socket.socket) -> bytes:
    with client.makefile("rb") as file:
        return file.read()


def trickle(client: socket.socket, piece: bytes) -> None:
    """Send it again and again, for five seconds."""
    for _ in range(100):
        client.sendall(piece)
        time.sleep(0.05)


def flood(client: socket.socket, piece: bytes) -> None:
    """Send it again and again, far beyond the limit."""
    for _ in range(100 * MAX_HEAD_BYTES // len(piece)):
        client.sendall(piece)


@pytest.mark.parametrize(
    ("path", "kept", "writes"),
    [("/", True, 1), ("/", False, 1), ("/parts", True, 4)],
    ids=["whole", "last", "chunked"],
)
def test_a_whole_answer_is_written_at_once(path: str, kept: bool, writes: int) -> None:
    written: list[list[bytes]] = []

    class Wire(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append([bytes(data)])

        def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
            written.append([bytes(data) for data in list_of_data])

        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            return 0

        def close(self) -> None:
            written.append([b"closed"])

    async def in_parts(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":
            await answer(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        config = uvicorn.Config(in_parts, ws="none", lifespan="off", log_config=None)
        connection = HttpConnection(config=config, server_state=uvicorn.server.ServerState(), app_state={})
        connection.connection_made(Wire())
        ending = b"" if kept else b"Connection: close\r\n"
        connection.data_received(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + ending + b"\r\n")
        while connection.answering:
            await asyncio.sleep(0.001)
        connection.connection_lost(None)

    asyncio.run(ask())
    head, _, body = b"".join(written[0]).partition(b"\r\n\r\n")
    answers = [each for each in written if each != [b"closed"]]
    assert len(answers) == writes
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"\r\nconnection: close" in head) is not kept
    assert body == (b"x" * 10 if path == "/" else b"")


def test_silence(address: tuple[str, int]) -> None:
    with connected(address) as client:
        assert everything(client) == b""


def test_silence_after_an_answer(address: tuple[str, int]) -> None:
    with connected(address) as client:
        client.sendall(GET)
        assert everything(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_a_head_that_never_ends(address: tuple[str, int], before: bytes) -> None:
    with connected(address) as client:
        client.sendall(before + GET[:-2])
        with pytest.raises(ConnectionError):
            trickle(client, b"x")


def test_line_breaks_for_ever(address: tuple[str, int]) -> None:
    with connected(address) as client, pytest.raises(ConnectionError):
        trickle(client, b"\r\n")


@pytest.mark.parametrize(
    "piece", [b"a: b\r\n" * 1000, b"x" * 6000, b"a" * 100 + b": b\r\n"], ids=["many", "long", "names"]
)
def test_a_head_that_is_too_long(address: tuple[str, int], piece: bytes) -> None:
    with connected(address) as client:
        client.sendall(GET[:-2] + b"X: ")
        with pytest.raises(ConnectionError):
            flood(client, piece)


def test_a_head_within_the_limit(address: tuple[str, int]) -> None:
    with connected(address) as client:
        client.sendall((GET[:-2] + b"X: " + b"y" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n") * 3)
        assert everything(client).count(b"HTTP/1.1 200 ") == 3


def test_a_body_that_nobody_wants_and_never_ends(address: tuple[str, int]) -> None:
    with connected(address) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            trickle(client, b"1\r\nx\r\n")


def test_an_answer_that_nobody_reads(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    connection_lost = HttpConnection.connection_lost

    def lost(self: HttpConnection, exc: Exception | None) -> None:
        connection_lost(self, exc)
        ended.set()

    monkeypatch.setattr(HttpConnection, "connection_lost", lost)
    with connected(address, window=4096) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(10)
        received = 0
        with suppress(ConnectionError):
            while part := client.recv(1_000_000):
                received += len(part)
        assert received < 30_000_000


def test_an_answer_that_is_read_slowly_is_read_whole(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    end_if_stalled = HttpConnection._end_if_stalled

    def look(self: HttpConnection) -> None:
        end_if_stalled(self)
        looked.release()

    monkeypatch.setattr(HttpConnection, "_end_if_stalled", look)
    # A small window: with the system's own, a third of the answer may lie between the two, and nobody need look again.
    with connected(address, window=1 << 16) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = 0
        # Some is read between one look at the client and the next, for four of them; then the rest.
        for part in range(1, 5):
            while received < part * 5_000_000:
                received += len(client.recv(1_000_000))
            assert looked.acquire(timeout=10)
        while received < 30_000_000:
            more = len(client.recv(1_000_000))
            assert more
            received += more


async def read_first(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when some of the body is there, or the client is gone."""
    message = await receive()
    await Response(message["type"].encode())(scope, receive, send)


def test_a_head_that_announces_a_body_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with address_of(read_first, monkeypatch) as address, connected(address) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        assert everything(client) == b""


def test_an_idle_connection_may_be_kept_longer_than_a_client_may_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    with address_of(answer, monkeypatch, Keeping(60)) as address, connected(address) as client:
        for _ in range(2):
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.7)
        client.sendall(GET[:-2] + b"Connection: close\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("used", [False, True], ids=["first request", "second request"])
def test_a_request_that_comes_while_nobody_looks_is_answered(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """The time of the connection runs out while the event loop, which has seen nothing yet, is busy with another's."""
    data_received = HttpConnection.data_received

    def received(self: HttpConnection, data: bytes) -> None:
        if b"/block" in data:
            time.sleep(1)
        data_received(self, data)

    monkeypatch.setattr(HttpConnection, "data_received", received)
    with address_of(answer, monkeypatch) as address, connected(address) as client, connected(address) as other:
        if used:
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        other.sendall(GET.replace(b"livez", b"block"))
        time.sleep(0.15)
        client.sendall(GET)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_last_answers_say_so_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Keeping(60)
    with address_of(answer, monkeypatch, keeping) as address, connected(address) as idle, connected(address) as busy:
        idle.sendall(GET)
        assert b"connection: close" not in idle.recv(1000)
        busy.sendall(GET.replace(b"livez", b"slow"))
        keeping.last = True
        idle.sendall(GET)
        assert b"connection: close\r\n" in everything(idle)
        with connected(address) as late:
            late.sendall(GET)
            assert b"connection: close\r\n" in everything(late)


def test_requests_that_do_not_wait_for_each_other_are_all_answered_and_the_last_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with address_of(answer, monkeypatch, Keeping(60, last=True)) as address, connected(address) as client:
        client.sendall(3 * GET.replace(b"livez", b"slow"))
        first, second, third = everything(client).split(b"HTTP/1.1 200 ")[1:]
        assert b"connection: close\r\n" not in first + second
        assert b"connection: close\r\n" in third


def test_a_timer_that_outlives_its_connection_finds_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Event()
    handler = HttpConnection.timeout_keep_alive_handler

    def look(self: HttpConnection) -> None:
        try:
            handler(self)
        finally:
            looked.set()

    monkeypatch.setattr(HttpConnection, "timeout_keep_alive_handler", look)
    with address_of(answer, monkeypatch) as address:
        with connected(address) as client:
            client.sendall(GET)
            assert client.recv(1000)
            # Its end comes as a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert looked.wait(5)
    assert caplog.messages == []


def test_what_is_no_http_gets_a_problem(address: tuple[str, int]) -> None:
    with connected(address) as client:
        client.sendall(b"what is this\r\n\r\n")
        head, _, body = everything(client).partition(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
    answer = ErrorAnswer.model_validate_json(body, strict=True)
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert (fields["content-type"], fields["connection"]) == ("application/problem+json", "close")
    assert (answer.type, answer.status, answer.title) == ("urn:longtail:malformed_request", 400, "Bad Request")
    assert (answer.request_id, fields["x-content-type-options"]) == (fields["x-request-id"], "nosniff")


def test_a_websocket_is_not_taken_and_that_is_one_line(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connected(address) as client:
        client.sendall(GET[:-2] + b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 200 OK\r\n")
    assert [record.getMessage() for record in caplog.records if "pgrade" in record.getMessage()] == [
        'upgrade to "websocket" not taken'
    ]
