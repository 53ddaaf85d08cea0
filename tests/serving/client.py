"""Applications in this process: behind a plain httpx client, or on a port behind the real server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import uvicorn
from starlette.applications import Starlette


class _Chunks(httpx.AsyncByteStream):
    def __init__(self, request: httpx.Request) -> None:
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._request.stream:
            yield chunk


class _Transport(httpx.BaseTransport):
    def __init__(self, app: Starlette, loop: asyncio.AbstractEventLoop) -> None:
        self._asgi = httpx.ASGITransport(app)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result(30)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        asynchronous = httpx.Request(request.method, request.url, headers=request.headers, stream=_Chunks(request))
        response = await self._asgi.handle_async_request(asynchronous)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        content = b"".join([chunk async for chunk in response.stream])
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(content))


def read_series(client: httpx.Client) -> dict[str, float]:
    """Read /metrics of what the model does, by name and labels."""
    lines = client.get("/metrics").text.splitlines()
    named = (line.rsplit(" ", 1) for line in lines if line.startswith("longtail_"))
    return {name: float(value) for name, value in named}


def check_error(response: httpx.Response, status: int, kind: str, field: str | None) -> str:
    """Check status, type and field of an error; return its message."""
    error = response.json()["error"]
    assert (response.status_code, error["type"], error.get("field")) == (status, kind, field), response.text
    return str(error["message"])


@contextmanager
def open_client(app: Starlette) -> Iterator[httpx.Client]:
    """The client, while the application's lifespan runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    lifespan = app.router.lifespan_context(app)
    try:
        run(lifespan.__aenter__())
        with httpx.Client(transport=_Transport(app, loop), base_url="http://localhost") as client:
            yield client
        run(lifespan.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serve_app(app: Starlette) -> Iterator[tuple[str, int]]:
    """The address of the application, served by uvicorn in a thread, without its lifespan."""
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_config=None))
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
