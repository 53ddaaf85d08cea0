"""Define the client whose methods block, and the client whose methods are awaited."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, Unpack

import httpx2 as httpx

from longtail.client import calls
from longtail.client.answers import T
from longtail.client.attempts import Attempts, ConnectionSettings, Outcome
from longtail.client.calls import Call, Json, Listing

P = ParamSpec("P")


def _blocking(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """Create the method that sends a call and returns its value."""

    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._send(make(*args, **kwargs))

    method.__signature__ = _signature(make)  # type: ignore[attr-defined]
    return method


def _awaited(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Create the coroutine method that sends a call and returns its value."""

    @wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._send(make(*args, **kwargs))

    method.__signature__ = _signature(make)  # type: ignore[attr-defined]
    return method


def _signature(make: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a call's method, for `help`."""
    signature = inspect.signature(make)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    returned = signature.return_annotation.removeprefix("Call[").removesuffix("]")
    return signature.replace(parameters=[this, *signature.parameters.values()], return_annotation=returned)


class Client:
    """Sends requests to one service over a pool of kept connections; threads may share it.

    Close it, or use `with`:

    >>> from longtail.client import Client
    >>> with Client("http://localhost:8000") as longtail:
    ...     answer = longtail.retrieve(features={"user_id": "u3"}, k=1, bias_removal=0.3)
    ...     for label in answer.results[0].labels:
    ...         print(label.id, label.score, label.bucket, label.display["title"])
    a 1.5 tail Alpha

    Args:
        url: URL of the service, such as `https://longtail.example`; may have a path before the routes.
        api_key: key for the header `Authorization: Bearer`; None: no key.
        timeout: longest duration of a call in seconds, retries and waits included. Every read of a socket may take the
            remaining time, so an answer that arrives in small pieces can take longer.
        retries: further attempts after 429, 503 or a lost connection.
        transport: httpx2 transport, for other pool limits, certificates or tests; None: httpx2's default.

    Raises:
        ValueError: an argument is invalid; the message contains neither key nor URL.
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
        self._settings = ConnectionSettings(url, api_key, timeout, retries)
        self._http = httpx.Client(**self._settings.connection, transport=transport)

    retrieve = _blocking(calls.retrieve)
    similar = _blocking(calls.similar)
    queries_for = _blocking(calls.queries_for)
    embed = _blocking(calls.embed)
    label = _blocking(calls.label)
    add_labels = _blocking(calls.add_labels)
    patch_label = _blocking(calls.patch_label)
    patch_labels = _blocking(calls.patch_labels)
    restore_labels = _blocking(calls.restore_labels)
    delete_label = _blocking(calls.delete_label)
    delete_labels = _blocking(calls.delete_labels)
    feedback = _blocking(calls.feedback)
    release = _blocking(calls.release)
    staged = _blocking(calls.staged)
    monitoring = _blocking(calls.monitoring)
    reload = _blocking(calls.reload)

    def labels(self, **listing: Unpack[Listing]) -> Iterator[Json]:
        """Iterate over all labels by id; each comes exactly once."""
        cursor: str | None = None
        while True:
            page = self._send(calls.label_page(cursor, listing))
            yield from page["labels"]
            if (cursor := page["next_cursor"]) is None:
                return

    def ready(self) -> bool:
        """Return whether the service takes requests, by one GET of /readyz."""
        with suppress(httpx.RequestError):
            return self._http.get("/readyz", timeout=self._settings.timeout).is_success
        return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._settings})"

    def _send(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._settings)
        outcome: Outcome
        while True:
            try:
                outcome = self._http.send(self._http.build_request(**attempts.request()))
            except httpx.RequestError as error:
                outcome = error
            if (wait := attempts.wait_after(outcome)) is None:
                return attempts.value(outcome)
            time.sleep(wait)


class AsyncClient:
    """Asynchronous variant of `Client`, with methods to await; tasks of one event loop may share it.

    >>> import asyncio
    >>> from longtail.client import AsyncClient
    >>> async def main() -> None:
    ...     async with AsyncClient("http://localhost:8000") as longtail:
    ...         answer = await longtail.retrieve(features={"user_id": "u3"}, k=1, bias_removal=0.3)
    ...         for label in answer.results[0].labels:
    ...             print(label.id, label.score, label.bucket, label.display["title"])
    >>> asyncio.run(main())
    a 1.5 tail Alpha
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
        self._settings = ConnectionSettings(url, api_key, timeout, retries)
        self._http = httpx.AsyncClient(**self._settings.connection, transport=transport)

    retrieve = _awaited(calls.retrieve)
    similar = _awaited(calls.similar)
    queries_for = _awaited(calls.queries_for)
    embed = _awaited(calls.embed)
    label = _awaited(calls.label)
    add_labels = _awaited(calls.add_labels)
    patch_label = _awaited(calls.patch_label)
    patch_labels = _awaited(calls.patch_labels)
    restore_labels = _awaited(calls.restore_labels)
    delete_label = _awaited(calls.delete_label)
    delete_labels = _awaited(calls.delete_labels)
    feedback = _awaited(calls.feedback)
    release = _awaited(calls.release)
    staged = _awaited(calls.staged)
    monitoring = _awaited(calls.monitoring)
    reload = _awaited(calls.reload)

    async def labels(self, **listing: Unpack[Listing]) -> AsyncIterator[Json]:
        """Iterate over all labels by id; each comes exactly once."""
        cursor: str | None = None
        while True:
            page = await self._send(calls.label_page(cursor, listing))
            for label in page["labels"]:
                yield label
            if (cursor := page["next_cursor"]) is None:
                return

    async def ready(self) -> bool:
        """Return whether the service takes requests, by one GET of /readyz."""
        with suppress(httpx.RequestError):
            return (await self._http.get("/readyz", timeout=self._settings.timeout)).is_success
        return False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self._settings})"

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._settings)
        outcome: Outcome
        while True:
            try:
                outcome = await self._http.send(self._http.build_request(**attempts.request()))
            except httpx.RequestError as error:
                outcome = error
            if (wait := attempts.wait_after(outcome)) is None:
                return attempts.value(outcome)
            await asyncio.sleep(wait)
