"""Asks a blocking and an awaited client the same, so that every test holds for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from longtail.client import AsyncClient, Client

Handler = Callable[[httpx.Request], httpx.Response]
KEY = "plain-key-7391"


class Asker:
    """`ask("retrieve", …)` on a client of either flavour; its own loop lives as long as it does."""

    def __init__(self, flavour: str, url: str, handler: Handler | None = None, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        transport = {} if handler is None else {"transport": httpx.MockTransport(handler)}
        self.client = {"sync": Client, "async": AsyncClient}[flavour](url, **settings, **transport)

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.client, method)(*args, **kwargs)
        if inspect.isgenerator(answer):
            return list(answer)
        if inspect.isasyncgen(answer):
            return self._runner.run(_all_of(answer))
        return self._runner.run(answer) if inspect.iscoroutine(answer) else answer

    def close(self) -> None:
        self("close" if isinstance(self.client, Client) else "aclose")
        self._runner.close()


async def _all_of(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


class Script:
    """A service that plays outcomes in turn, the last for ever, and keeps what it was asked."""

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
