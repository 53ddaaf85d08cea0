"""The hot routes have two doors, a short one and FastAPI's: whatever comes, both give the same answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.serving import Settings, create_app
from longtail.serving.http import middleware
from longtail.serving.http.direct import Application
from tests.end_to_end.hostile import HEADERS, NUMBERS, OTHERS, TEXTS
from tests.serving.plane import plane_retriever, plane_settings

KEY = "ask-0123456789abcdef"
JSON = (b"content-type", b"application/json")
QUERY = {"features": {"user": "east"}, "k": 2, "display": ["title"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/retrieve": {"queries": [QUERY, {"features": {}, "k": 3, "bias_removal": 1, "exclude": ["a", "x"]}]},
    "/v1/similar": {"ids": ["a", "c/é"], "k": 2, "buckets": ["torso", "tail"]},
}
Case = tuple[str, list[tuple[bytes, bytes]], list[bytes]]
"""Path, headers and the parts that the body comes in."""


def corpus() -> Iterator[Case]:
    """Requests that are answered, and every way that we know to be refused."""
    rng = random.Random(7)
    for path, body in BODIES.items():
        whole = json.dumps(body).encode()
        yield path, [JSON], [whole]
        yield path, [JSON], [whole[:20], b"", whole[20:]]
        yield path, [(b"content-type", b"APPLICATION/JSON ; charset=utf-8")], [whole]
        yield path, [], [whole]
        yield path, [(b"content-type", b"text/plain\xff")], [whole]
        for length in (b"99999999999999999999999", b"20001", b"-1", b"\xb2"):
            yield path, [JSON, (b"content-length", length)], [whole]
        yield path, [JSON], [b" " * 20_001]
        yield path, [JSON], [b" " * 19_999, b"  "]
        for part in ("", "{}", "[]", whole.decode()[:-1], "\ufeff" + whole.decode(), '{"queries":[]}', *OTHERS):
            yield path, [JSON], [part.encode()]
        yield path, [JSON], [b'{"queries":[{"features":{"user":"\xff"}}]}']
        for release in ("plane-1", "gone", "x" * 129):
            yield path, [JSON], [json.dumps({**body, "release": release}).encode()]
        yield path, [JSON], [json.dumps({**body, "preview": True, "x": 1}).encode()]
        for name, value in (line.split(b":", 1) for line in HEADERS if b"\r" not in line):
            yield path, [JSON, (name.lower(), value.strip())], [whole]
        for member in ("k", "bias_removal", "popularity", "exclude", "allow", "buckets", "explore", "display", "id"):
            for text in rng.sample([*TEXTS, *NUMBERS, *OTHERS[:12]], 12):
                inner = f'{{"features":{{}},"{member}":{text}}}' if path == "/v1/retrieve" else None
                body_ = f'{{"queries":[{inner}]}}' if inner else f'{{"id":"a","{member}":{text}}}'
                yield path, [JSON], [body_.encode("utf-8", "surrogatepass")]
    yield "/v1/similar", [JSON], [b'{"id":"nothing"}']
    for origin in (b"https://evil.example", b"http://localhost:1", b"null", b"http://[", b"\xff"):
        yield "/v1/retrieve", [JSON, (b"origin", origin)], [b"{}"]
        yield "/v1/retrieve", [JSON, (b"host", origin.removeprefix(b"https://"))], [b"{}"]


async def ask(app: ASGIApp, case: Case, method: str = "POST", root: str = "") -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of an answer."""
    path, headers, parts = case
    left, sent = list(parts), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": root, "client": ("127.0.0.1", 1),
        "headers": [*headers, (b"x-request-id", b"r-1")], "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    start, *rest = sent
    names = [name for name, _ in start["headers"]]
    assert len(set(names)) == len(names)
    return start["status"], dict(start["headers"]), b"".join(message["body"] for message in rest)


def doors(settings: Settings) -> tuple[Application, Application, Callable[[], int]]:
    """An application with its short door, one without, and how many requests FastAPI's router has seen of the first."""
    states = [settings.releases / name for name in ("short", "long")]
    short, long = (
        create_app(settings.model_copy(update={"state": state, "max_answers": 0}), retriever=plane_retriever())
        for state in states
    )
    assert isinstance(short, Application)
    assert isinstance(long, Application)
    seen = 0
    router = short.router.middleware_stack

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal seen
        seen += 1
        await router(scope, receive, send)

    short.router.middleware_stack = counting
    long.close_direct()
    return short, long, lambda: seen


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_both_doors_give_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    monkeypatch.setattr(middleware, "new_id", lambda: "0" * 32)
    settings = plane_settings(tmp_path, explore_seed=1, request_seconds=20, api_keys=keys)
    short, long, routed = doors(settings)
    statuses = set()

    async def compare() -> None:
        for case in corpus():
            one, two = await ask(short, case), await ask(long, case)
            assert one == two, case
            statuses.add(one[0])

    asyncio.run(compare())
    assert statuses == ({401} if keys else {200, 400, 403, 404, 413, 415, 422})
    assert not routed()
    assert counted(short) == counted(long)
    for app in (short, long):
        app.state.service.close()


def counted(app: FastAPI) -> list[str]:
    """What /metrics says that both must agree on."""
    lines = app.state.service.monitoring.metrics.scrape().decode().splitlines()
    return [line for line in lines if line.startswith(("longtail_requests_total", "longtail_queries_total"))]


def test_middleware_that_others_add_sees_every_request(tmp_path: Path) -> None:
    short, long, routed = doors(plane_settings(tmp_path))
    seen = []

    def watch(app: ASGIApp) -> ASGIApp:
        async def watching(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope["path"])
            await app(scope, receive, send)

        return watching

    short.add_middleware(watch)
    case = next(corpus())
    assert asyncio.run(ask(short, case))[0] == 200
    assert seen == ["/v1/retrieve"]
    assert routed() == 1
    for app in (short, long):
        app.state.service.close()


def test_what_breaks_is_a_500_that_tells_nothing_at_either_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long, _ = doors(plane_settings(tmp_path))

    async def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret")

    async def compare() -> None:
        for app in (short, long):
            monkeypatch.setattr(app.state.service, "search", breaks)
        one, two = [await ask(app, next(corpus())) for app in (short, long)]
        assert one == two
        assert one[0] == 500
        assert b"secret" not in one[2]

    asyncio.run(compare())
    for app in (short, long):
        app.state.service.close()
