"""The client whose methods block."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

import httpx

from longtail.client import calls
from longtail.client.binding import described_as
from longtail.client.calls import Call
from longtail.client.exchange import Exchange
from longtail.client.retry import Outcome
from longtail.client.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._send(build(*args, **kwargs))

    return described_as(build, method, "Client")


class Client:
    """Asks one service over a pool of kept connections; threads may share it. Close it, or use it in a `with`.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings = Settings(url, api_key, timeout, retries)
        self._http = httpx.Client(base_url=url, headers=self._settings.headers(), transport=transport)

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

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        self._http.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"Client({self._settings})"

    def _send(self, call: Call[T]) -> T:
        exchange = Exchange(call, self._settings)
        while True:
            outcome: Outcome
            try:
                outcome = self._http.send(self._http.build_request(**exchange.request()))
            except httpx.RequestError as error:
                outcome = error
            wait = exchange.wait_after(outcome)
            if wait is None:
                return exchange.value(outcome)
            sleep(wait)
