"""The client whose methods are awaited, on asyncio."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from longtail.client import calls
from longtail.client.binding import described_as
from longtail.client.calls import Call
from longtail.client.exchange import Exchange
from longtail.client.retry import Outcome
from longtail.client.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._send(build(*args, **kwargs))

    return described_as(build, method, "AsyncClient")


class AsyncClient:
    """As `Client`, within one event loop. Close it with `aclose`, or use it in an `async with`.

    Args:
        url, api_key, timeout, retries: see `Settings`.
        transport: httpx's, for other pool limits, certificates or tests; None: httpx's default.

    Raises:
        ValueError: as `Settings`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 10.0,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = Settings(url, api_key, timeout, retries)
        self._http = httpx.AsyncClient(base_url=url, headers=self._settings.headers(), transport=transport)

    retrieve = _method(calls.retrieve)
    similar = _method(calls.similar)
    label = _method(calls.label)
    add_labels = _method(calls.add_labels)
    restore_label = _method(calls.restore_label)
    delete_label = _method(calls.delete_label)
    feedback = _method(calls.feedback)
    interactions = _method(calls.interactions)
    release = _method(calls.release)
    monitoring = _method(calls.monitoring)
    reload = _method(calls.reload)
    ready = _method(calls.ready)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings})"

    async def _send(self, call: Call[T]) -> T:
        exchange = Exchange(call, self._settings)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.send(self._http.build_request(**exchange.request()))
            except httpx.RequestError as error:
                outcome = error
            wait = exchange.wait_after(outcome)
            if wait is None:
                return exchange.value(outcome)
            await sleep(wait)
