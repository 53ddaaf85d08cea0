"""Attacks on the real server process: each is refused or bounded, and a polite client is answered as before.

Heads that never end, slow or large ones, and silence are in test_heads.py; cases of the API's own document in
test_hostile.py; benchmarks/RESULTS.md has what a client waits while another attacks.
"""

from __future__ import annotations

import gzip
import json
import re
import resource
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.bundles import make_bundle
from tests.end_to_end.killing import check_log, server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import ServerProcess, children, until

KEY, ADMIN_KEY = "polite-key-0123456789", "admin-key-0123456789"
BODY = json.dumps({"queries": [{"features": {"user_id": "u1"}, "k": 5}]}).encode()
JSON = {"Content-Type": "application/json", "X-API-Key": KEY}
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = (
    b"POST /v1/retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-API-Key: %b\r\n"
    % KEY.encode()
)
LENGTH, CHUNKED = b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"
REQUEST = POST + LENGTH + b"\r\n" + BODY
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
MOST_GROWTH = 160 << 20
"""Bytes of memory that all attacks together may leave behind."""
SECONDS = 30
"""Longer than any answer takes."""


class Target:
    """A service with a polite client, which knows the right answer."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        url = httpx.URL(process.url)
        self.address = (url.host, url.port)
        self.labels = self.ask()

    def ask(self) -> list[str]:
        """The labels that a polite client is answered, on a connection of its own."""
        answer = httpx.post(f"{self.process.url}/v1/retrieve", content=BODY, headers=JSON, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        return [label["id"] for label in answer.json()["results"][0]["labels"]]

    def memory(self) -> int:
        """Resident bytes of all processes of the service."""
        pids = [self.process.process.pid, *children(self.process.process.pid)]
        return sum(
            1024 * int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) for pid in pids
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=SECONDS)

    def exchange(self, sent: bytes) -> tuple[list[int], bool]:
        """Statuses of the first answers to some bytes, 100 left out, and whether the service closes without one."""
        with self.connect() as connection:
            connection.sendall(sent)
            data = b""
            with suppress(ConnectionResetError):
                while not re.search(rb"HTTP/1.1 [2-5]\d\d ", data) and (part := connection.recv(1 << 16)):
                    data += part
        return [int(status) for status in re.findall(rb"HTTP/1.1 ([2-5]\d\d) ", data)], not data


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_bundle(make_bundle(label_tower=True), tmp_path_factory.mktemp("attacks"))


@pytest.fixture(scope="module")
def service(releases: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One service for all attacks, whose memory and log are looked at in the end."""
    root = tmp_path_factory.mktemp("service")
    settings = {"state": root / "state", "api_keys": KEY, "admin_keys": ADMIN_KEY, "request_seconds": 2}
    with server(releases, root / "log", **settings) as process:
        process.wait_until_ready()
        target = Target(process)
        before = target.memory()
        yield target
        assert target.memory() - before < MOST_GROWTH
        assert process.terminate() == 0
    check_log(root / "log", KEY, ADMIN_KEY)


@pytest.fixture
def target(service: Target) -> Iterator[Target]:
    """The service, which answers a polite client as before when the attack is over."""
    yield service
    assert service.ask() == service.labels


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
FORMS = {
    "a length and chunks": (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks and a length": (POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS, 400),
    "two lengths": (POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, 400),
    "one length twice": (POST + LENGTH + LENGTH + b"\r\n" + BODY, 400),
    "a list of lengths": (POST + b"Content-Length: 5, 5\r\n\r\n" + BODY, 400),
    "a length below 0": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "a signed length": (POST + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY, 400),
    "a hexadecimal length": (POST + b"Content-Length: 0x10\r\n\r\n" + BODY, 400),
    "a length beyond 64 bits": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "a space before a colon": (POST + b"Content-Length : %d\r\n\r\n" % len(BODY) + BODY, 400),
    "a longer body than its length": (POST + b"Content-Length: 2\r\n\r\n" + BODY, None),
    "a shorter body than its length": (POST + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 9) + BODY, 408),
    "a body over the limit, declared": (POST + b"Content-Length: 2000000\r\n\r\n", 413),
    "a body over the limit, in chunks": (POST + CHUNKED + b"\r\n" + (b"10000\r\n%b\r\n" % (b" " * 65536)) * 17, 413),
    "compressed chunks": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 400),
    "chunks twice": (POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNKS, 400),
    "chunks misspelt": (POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, None),
    "a huge chunk": (POST + CHUNKED + b"\r\nfffffffffffffffff\r\nx", None),
    "a chunk below 0": (POST + CHUNKED + b"\r\n-1\r\nx", None),
    "a chunk longer than its size": (POST + CHUNKED + b"\r\n5\r\n%b\r\n0\r\n\r\n" % BODY, None),
    "a folded header": (POST + b"X-A: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "a folded coding": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS, 400),
    "two hosts": (POST + b"Host: other\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "no host": (REQUEST.replace(b"Host: localhost\r\n", b""), 400),
    "the absolute form": (REQUEST.replace(b"/v1/", b"http://localhost/v1/", 1), 200),
    "bare line feeds": (REQUEST.replace(b"\r\n", b"\n"), 400),
    "NUL in a header": (POST + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "a bare carriage return": (POST + b"X: a\rb\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 99, 400),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "TRACE": (GET.replace(b"GET", b"TRACE"), 405),
    "a method of 5,000 letters": (b"A" * 5000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "an offer of HTTP/2": (POST + H2C + LENGTH + b"\r\n" + BODY, 200),
    "an offer of HTTP/2 with chunks": (POST + H2C.upper() + CHUNKED + b"\r\n" + CHUNKS, 200),
    "an offer of a WebSocket": (POST + WEBSOCKET + LENGTH + b"\r\n" + BODY, 200),
    "an expectation": (POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY, 200),
    "a trailing dot-dot": (REQUEST.replace(b"/v1/retrieve", b"/v1/../v1/retrieve"), 404),
    "NUL in a path": (POST.replace(b"POST /v1/retrieve", b"GET /v1/labels/%00%ff") + b"\r\n", 404),
}  # fmt: skip
"""Bytes of requests, and the status of the answer; None: the connection is closed, for no answer would be safe."""


@pytest.mark.parametrize("form", FORMS)
def test_ambiguous_requests_are_refused_and_unusual_ones_answered(service: Target, form: str) -> None:
    sent, status = FORMS[form]
    statuses, closed = service.exchange(sent)
    assert (statuses, closed) == (([], True) if status is None else ([status], False))


def test_valid_request_is_answered_after_all_attacks(target: Target) -> None:
    for sent, _ in FORMS.values():  # not waited for, all at once
        with target.connect() as connection:
            connection.sendall(sent)


@pytest.mark.parametrize("cut", range(len(POST) + 25, len(POST) + 40, 2))
def test_split_upgrade_header_is_ignored(service: Target, cut: int) -> None:
    sent = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY
    with service.connect() as connection:
        connection.sendall(sent[:cut])
        time.sleep(0.02)
        connection.sendall(sent[cut:])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def in_query(**fields: str) -> str:
    """A body of one query, whose fields are JSON."""
    row = {"features": "{}", **fields}
    return '{"queries":[{' + ",".join(f'"{name}":{value}' for name, value in row.items()) + "}]}"


def feedback(**fields: str) -> str:
    row = {"labels": '["item-1"]', "features": '{"user_id":"u1"}', **fields}
    return '{"events":[{' + ",".join(f'"{name}":{value}' for name, value in row.items()) + "}]}"


def listed(entry: str, count: int) -> str:
    return "[" + ",".join([entry] * count) + "]"


NUL, SCRIPT = json.dumps("\0"), "<script>alert(1)</script>"
SCRIPTED = {"id": SCRIPT, "features": {"genres": ["g1"], "year": 0}, "display": {"title": SCRIPT}}
RETRIEVE, FEEDBACK, LABELS = "/v1/retrieve", "/v1/feedback", "/v1/labels"
BODIES: dict[str, tuple[str, str, set[int]]] = {
    "deep JSON": (RETRIEVE, in_query(features='{"history":' + nested(100_000) + "}"), {400, 413}),
    "JSON 150 deep, 100 times": (RETRIEVE, in_query(features='{"history":' + listed(nested(150), 100) + "}"), {422}),
    "JSON 150 deep, 800 times": (RETRIEVE, in_query(features='{"history":' + listed(nested(150), 800) + "}"), {413}),
    "an integer of 5,000 digits": (RETRIEVE, in_query(k="1" * 5_000), {400}),
    "an integer of 4,000 digits": (RETRIEVE, in_query(k="1" * 4_000), {422}),
    "a dial of 1e999": (RETRIEVE, in_query(bias_removal="1e999"), {422}),
    "a dial of Infinity": (RETRIEVE, in_query(bias_removal="Infinity"), {422}),
    "a vector of 1e308": (RETRIEVE, '{"queries":[{"vector":' + listed("1e308", 8) + "}]}", {422}),
    "340,000 empty queries": (RETRIEVE, '{"queries":' + listed("{}", 340_000) + "}", {413}),
    "a history of 130,000": (RETRIEVE, in_query(features='{"history":' + listed("1", 130_000) + "}"), {422}),
    "60,000 unknown keys": (RETRIEVE, in_query(**{f"k{number}": "1" for number in range(60_000)}), {422}),
    "a lone surrogate": (RETRIEVE, in_query(features='{"user_id":"\\ud800"}'), {400}),
    "NUL": (RETRIEVE, in_query(features='{"user_id":"\\u0000"}'), {200}),
    "an id of a megabyte": ("/v1/similar", json.dumps({"id": "x" * 1_000_000}), {404}),
    "events with NUL": (FEEDBACK, feedback(labels=f"[{NUL}]", event=NUL, features='{"user_id":' + NUL + "}"), {200}),
    "an event of weight 1e308": (FEEDBACK, feedback(weight="1e308"), {422}),
    "an event of weight Infinity": (FEEDBACK, feedback(weight="Infinity"), {422}),
    "an event with an integer of 4,000 digits": (FEEDBACK, feedback(features='{"user_id":' + "1" * 4_000 + "}"), {200}),
    "an event with deep features": (FEEDBACK, feedback(features='{"unread":' + nested(190) + "}"), {422}),
    "an event of 512 é": (FEEDBACK, feedback(labels=json.dumps(["é" * 512])), {200}),
    "an event of 513 é": (FEEDBACK, feedback(labels=json.dumps(["é" * 513])), {422}),
    "an event of 10,001 labels": (FEEDBACK, feedback(labels=listed("1", 10_001)), {422}),
    "an event that spells a line of the log": (FEEDBACK, feedback(event=json.dumps('x\n{"level":"error"}')), {200}),
    "a script in a title": (LABELS, json.dumps({"labels": [SCRIPTED]}), {200}),
    "a label of 1e308": (LABELS, '{"labels":[{"id":"huge","features":{"genres":["g1"],"year":1e308}}]}', {422}),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_hostile_bodies_never_give_500(service: Target, case: str) -> None:
    path, body, statuses = BODIES[case]
    answer = httpx.post(
        f"{service.process.url}{path}", content=body.encode(), headers=JSON | {"X-API-Key": ADMIN_KEY}, timeout=SECONDS
    )
    assert answer.status_code in statuses, answer.text[:300]
    if answer.status_code != 200:
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.content) < 5_000  # what was sent is not sent back


def test_scripts_reach_no_page(target: Target) -> None:
    url = target.process.url
    response = httpx.get(f"{url}/v1/labels/{SCRIPT}", headers=JSON)
    assert response.headers["content-type"] in ("application/json", "application/problem+json")
    for path in ("/", "/dashboard", "/metrics", "/docs"):
        page = httpx.get(f"{url}{path}", headers=JSON)
        assert "<script>alert" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_compressed_bodies_are_not_inflated(target: Target, coding: str) -> None:
    bomb = zlib.compress(b" " * (20 << 20)) if coding == "deflate" else gzip.compress(b" " * (20 << 20), 9)
    before = target.memory()
    answer = httpx.post(
        f"{target.process.url}/v1/retrieve", content=bomb, headers=JSON | {"Content-Encoding": coding}, timeout=SECONDS
    )
    assert answer.status_code == 415
    assert target.memory() - before < 16 << 20


@pytest.mark.parametrize("override", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
def test_headers_change_neither_rights_nor_method(target: Target, override: str) -> None:
    url = target.process.url
    headers = JSON | {override: "DELETE", "X-Admin": "true"}
    assert httpx.post(f"{url}/v1/labels/item-1", headers=headers).status_code == 405
    assert httpx.delete(f"{url}/v1/labels/item-1", headers=headers).status_code == 403
    answer = httpx.post(f"{url}/v1//labels/delete", content=b'{"ids":["item-1"]}', headers=headers)
    assert answer.status_code == 404


def test_slow_body_gets_408(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100000\r\n\r\n")
        data = b""
        connection.settimeout(0.1)
        while not data:
            connection.sendall(b" ")
            with suppress(TimeoutError):
                data = connection.recv(1 << 16)
    assert data.startswith(b"HTTP/1.1 408 ")


def test_clients_that_never_read_block_no_other_client(target: Target) -> None:
    body = json.dumps({"queries": [{"features": {}, "k": 60}] * 256}).encode()  # some 1.5 MB of answer
    request = POST.replace(KEY.encode(), ADMIN_KEY.encode()) + b"Content-Length: %d\r\n\r\n" % len(body) + body
    before = target.memory()
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(target.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request)
        assert target.ask() == target.labels
        assert target.memory() - before < MOST_GROWTH


def test_more_than_100_pipelined_requests_close_the_connection(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(GET * 100)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 100:
            data += connection.recv(1 << 16)
        with suppress(ConnectionError):
            connection.sendall(GET * 5_000)
            while part := connection.recv(1 << 16):
                data += part
    assert data.count(b"HTTP/1.1 200 ") < 1_000


def test_unread_answers_stop_reading_of_pipelined_requests(target: Target) -> None:
    before = target.memory()
    with target.connect() as connection:
        connection.setblocking(False)
        with suppress(OSError):
            for _ in range(600):
                connection.send(GET * 50)
        assert target.ask() == target.labels
        assert target.memory() - before < MOST_GROWTH


def test_500_idle_connections_block_no_request(target: Target) -> None:
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(target.connect())
        assert target.ask() == target.labels


@pytest.mark.nightly
def test_5000_half_heads_are_closed_in_time(target: Target) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(5_000, hard - 500)
    with ExitStack() as stack:
        sockets = [stack.enter_context(target.connect()) for _ in range(connections)]
        for connection in sockets:
            with suppress(ConnectionError):
                connection.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        assert target.ask() == target.labels
        for connection in sockets:
            with suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass


def test_service_recovers_from_missing_file_descriptors(releases: Path, tmp_path: Path) -> None:
    with server(releases, tmp_path / "log", state=tmp_path / "state", api_keys=KEY, request_seconds=2) as process:
        process.wait_until_ready()
        target = Target(process)
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (120, 120))
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(target.connect())
            time.sleep(1)
        until(lambda: answered(target), "a polite client to be answered", SECONDS)
        assert target.ask() == target.labels
        assert process.terminate() == 0
    assert "Too many open files" in (tmp_path / "log").read_text()


def answered(target: Target) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{target.process.url}/livez", timeout=2).status_code == 200
    return False
