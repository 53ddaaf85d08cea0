"""Both clients, driven alike, of a scripted service; and a clock that only sleeps move."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from longtail.client import AsyncClient, Client

Handler = Callable[[httpx.Request], httpx.Response]
Make = Callable[..., "Asker"]


class Asker:
    """`ask("retrieve", …)` on a client of either kind; its own loop lives as long as it does."""

    def __init__(self, kind: type[Client | AsyncClient], url: str, handler: Handler | None, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        transport = {} if handler is None else {"transport": httpx.MockTransport(handler)}
        self.client: Any = kind(url, **settings, **transport)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.client, method)(*args, **kwargs)
        if inspect.isgenerator(answer):
            return list(answer)
        if inspect.isasyncgen(answer):

            async def items() -> list[Any]:
                return [item async for item in answer]

            return self._runner.run(items())
        return self._runner.run(answer) if inspect.iscoroutine(answer) else answer

    def close(self) -> None:
        self("close" if isinstance(self.client, Client) else "aclose")
        self._runner.close()


class Script:
    """A service that plays outcomes in turn, the last for ever, and keeps the requests."""

    def __init__(self, *outcomes: httpx.Response | type[httpx.TransportError]) -> None:
        self._outcomes = list(outcomes)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, httpx.Response):
            return httpx.Response(outcome.status_code, headers=outcome.headers, content=outcome.content)
        raise outcome("planted")


def refusal(status: int, kind: str, *, field: str | None = None, **headers: str) -> httpx.Response:
    """The service's error answer."""
    error = {"type": kind, "message": "expected less, received more"} | ({} if field is None else {"field": field})
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": error, "request_id": "r-1"}, headers=headers)


@pytest.fixture(params=[Client, AsyncClient])
def asker(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients of either kind, of a handler in this process or of a server at `url`."""
    built: list[Asker] = []

    def make(handler: Handler | None = None, url: str = "http://longtail.test", **settings: Any) -> Asker:
        built.append(Asker(request.param, url, handler, **settings))
        return built[-1]

    yield make
    for single in built:
        single.close()


class SleepClock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    async def sleep_awaited(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    """A clock in place of the real one, and ½ for every random number."""
    clock = SleepClock()
    monkeypatch.setattr("longtail.client.clients.time.sleep", clock.sleep)
    monkeypatch.setattr("longtail.client.clients.asyncio.sleep", clock.sleep_awaited)
    monkeypatch.setattr("longtail.client.attempts.monotonic", lambda: clock.now)
    monkeypatch.setattr("longtail.client.attempts.time", lambda: clock.now)
    monkeypatch.setattr("longtail.client.attempts.random", lambda: 0.5)
    return clock
