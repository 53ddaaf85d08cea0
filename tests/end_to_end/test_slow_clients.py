"""Clients that are slow, silent, deaf or gone: others are answered as before, and nothing of them stays."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from select import select

import httpx
import pytest

from longtail.index import IndexSpec, Releases, build
from tests.bundles import make_bundle
from tests.serving.process import ServerProcess, server, until

LABELS, IDLE = 3000, 1000
BODY = json.dumps({"queries": [{"features": {"user_id": "u1"}, "k": 10}]}).encode()
LARGE = json.dumps({"queries": [{"features": {}, "k": 1000}] * 128}).encode()
SECONDS = 20
"""Longer than anything takes here: who waits this long has found a hang."""
ENOUGH = 10
"""Answers to somebody else that show it is not kept waiting."""


@pytest.fixture(scope="module", autouse=True)
def many_files() -> Iterator[None]:
    """Room for a thousand connections of this process; the server sees to itself."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 4 * IDLE:
        pytest.skip(f"expected {4 * IDLE} open files to be allowed, found {limits[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4 * IDLE), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("slow")
    make_bundle(labels=LABELS).write(root / "bundle")
    build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="only")
    Releases(root / "releases").publish("only")
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, ours[1]))
    with server(root / "releases", root / "log", request_seconds=4, max_total_k=128_000) as process:
        resource.setrlimit(resource.RLIMIT_NOFILE, ours)
        process.wait_until_ready()
        httpx.post(f"{process.url}/v1/retrieve", json=json.loads(BODY))
        yield process
        assert process.terminate() == 0
    assert '"exception"' not in (root / "log").read_text()


def request(body: bytes, *, length: int | None = None) -> bytes:
    head = b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return head + b"%d\r\n\r\n%b" % (len(body) if length is None else length, body)


def connected(service: ServerProcess, *, window: int = 0) -> socket.socket:
    connection = socket.socket()
    if window:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(SECONDS)
    connection.connect(("127.0.0.1", int(service.url.rsplit(":", 1)[1])))
    return connection


def status_of(connection: socket.socket) -> int:
    return int(connection.recv(65536).split()[1])


def open_files(service: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


@dataclass
class Others:
    """Somebody else, who asks all the time."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def are_answered(self, while_held: Sequence[socket.socket] = ()) -> None:
        """Wait for answers to what is asked from now on, and see that these clients were held up all that time."""
        # The one that is under way may have been asked before.
        enough = self.answered + 1 + ENOUGH
        until(lambda: self.answered >= enough, f"{ENOUGH} answers", SECONDS)
        assert select(while_held, (), (), 0)[0] == []


@contextmanager
def others_unaffected(service: ServerProcess) -> Iterator[Others]:
    """While this lasts somebody else asks all the time and is answered; then nothing is left of who came meanwhile."""
    before = open_files(service)
    others = Others()
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=service.url, timeout=SECONDS) as client:
            while not done.is_set():
                response = client.post("/v1/retrieve", content=BODY, headers={"content-type": "application/json"})
                others.failures.extend([] if response.status_code == 200 else [response.text])
                others.answered += 1
                time.sleep(0.005)

    with ThreadPoolExecutor(1) as pool, ExitStack() as asking:
        result = pool.submit(ask)
        asking.callback(done.set)
        yield others
        # Whatever the clients did: nobody has to wait for them now.
        others.are_answered()
        done.set()
        result.result(SECONDS)
    assert not others.failures
    until(lambda: open_files(service) <= before, "as many open files as before")
    until(lambda: "longtail_queue_depth 0.0" in httpx.get(f"{service.url}/metrics").text, "an empty queue")


def test_a_body_that_comes_byte_by_byte_is_given_up_on(service: ServerProcess) -> None:
    with others_unaffected(service) as others, ExitStack() as stack:
        clients = [stack.enter_context(connected(service)) for _ in range(20)]
        for client in clients:
            client.sendall(request(b"", length=len(BODY)))
        others.are_answered(while_held=clients)
        # What comes late does not win more time: the limit holds for the whole body.
        for byte in BODY:
            for client in clients:
                with suppress(ConnectionError):
                    client.sendall(bytes([byte]))
            if select(clients, (), (), 0.25)[0]:
                break
        for client in clients:
            with client.makefile("rb") as file:
                answer = file.read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in answer


def test_a_slow_body_that_arrives_in_time_is_answered(service: ServerProcess) -> None:
    with others_unaffected(service), connected(service) as client:
        whole = request(BODY)
        for start in range(0, len(whole), 50):
            client.sendall(whole[start : start + 50])
            time.sleep(0.02)
        assert status_of(client) == 200


def test_heads_that_never_end(service: ServerProcess) -> None:
    with others_unaffected(service) as others, ExitStack() as stack:
        clients = [stack.enter_context(connected(service)) for _ in range(50)]
        for client in clients:
            client.sendall(b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nX-Never: ")
        for _ in range(4):
            for client in clients:
                client.sendall(b"x")
            others.are_answered(while_held=clients)


def test_answers_that_nobody_reads(service: ServerProcess) -> None:
    with others_unaffected(service) as others, ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(connected(service, window=4096))
            client.sendall(request(LARGE))
            # Its answer has begun, and is not taken.
            until(lambda client=client: select([client], (), (), 0)[0], "an answer")  # type: ignore[misc]
            others.are_answered()
        deaf = stack.enter_context(connected(service, window=4096))
        with suppress(TimeoutError):
            deaf.settimeout(1)
            for _ in range(20_000):
                deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)


def test_the_server_takes_as_many_files_as_the_system_lets_it(service: ServerProcess) -> None:
    soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_a_thousand_idle_connections(service: ServerProcess) -> None:
    with others_unaffected(service) as others, ExitStack() as stack:
        clients = [stack.enter_context(connected(service)) for _ in range(IDLE)]
        until(lambda: open_files(service) > IDLE, "all to be accepted")
        others.are_answered()
        for client in clients[::2]:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert {status_of(client) for client in clients[::2]} == {200}
        # One that was silent so far is answered like any other.
        clients[1].sendall(request(BODY))
        assert status_of(clients[1]) == 200


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_clients_that_hang_up(service: ServerProcess, reset: bool) -> None:
    whole, half = request(BODY), request(BODY[:10], length=len(BODY))
    parts = [whole[:20], request(b"", length=len(BODY)), half, whole, whole * 5, request(LARGE), b""]
    with others_unaffected(service):
        for sent in parts * 6:
            with connected(service) as client:
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(sent)
                time.sleep(0.002)


def test_clients_that_hang_up_while_they_wait(service: ServerProcess) -> None:
    with others_unaffected(service), ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(service)).sendall(request(LARGE))
        waiting = [connected(service) for _ in range(100)]
        for client in waiting:
            client.sendall(request(BODY))
        for client in waiting:
            client.close()
