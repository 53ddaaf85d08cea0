"""The short way to the routes that most requests are for: through the service's own middleware, past FastAPI's.

FastAPI defines and documents these routes as all others, and answers them too where its own stack is wanted: behind
middleware that an embedding application has added, or under tracing. Either way the same middleware surrounds the
same function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.serving.core.service import Service
from longtail.serving.errors import ServingError
from longtail.serving.http.models import find
from longtail.serving.http.responses import serving_error

Endpoint = Callable[[Service, Scope, Receive], Awaitable[bytes]]
"""Answers a request with JSON, or raises ServingError."""
SEARCHING = "searching"
"""In a request's state, the task that its search waits in; whoever takes it out and cancels it says that the client has
hung up."""


class DirectRoute(APIRoute):
    """A route of searches, whose endpoint reads requests and makes answers as bytes: nothing stands between."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        async def documented() -> None:
            """Has the endpoint's name and words, and no parameters for FastAPI to read."""

        documented.__name__, documented.__doc__ = endpoint.__name__, endpoint.__doc__
        super().__init__(path, documented, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            service: Service = scope["app"].state.service
            state = scope["state"]
            state[SEARCHING] = asyncio.current_task()
            try:
                content = await endpoint(service, scope, receive)
            except asyncio.CancelledError:
                if SEARCHING in state:
                    raise
                raise ClientDisconnect from None
            finally:
                state.pop(SEARCHING, None)
            length = str(len(content)).encode()
            headers = [(b"content-length", length), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})

        self.app = app


class Application(FastAPI):
    """FastAPI with a door of its own for POST requests to `DirectRoute`s, and for requests to other models' paths."""

    _direct: ASGIApp | None = None
    _paths: frozenset[str] = frozenset()
    _expected: tuple[int, int] | None = None
    models: Mapping[str, Application] = {}
    """Applications whose paths begin with `/v1/models/NAME/`; this one may be among them."""

    def open_direct(self, surround: Callable[[ASGIApp], ASGIApp]) -> None:
        """Answer direct routes past FastAPI's stack from now on, unless middleware or error handlers are added later.

        Args:
            surround: wraps what answers in the middleware that this application has.
        """
        routes = {route.path: route for route in self.routes if isinstance(route, DirectRoute)}

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            route = scope["route"] = routes[scope["path"]]
            try:
                await route.app(scope, receive, send)
            except ServingError as error:
                await serving_error(scope["state"]["request_id"], error)(scope, receive, send)

        self._direct, self._paths = surround(answer), frozenset(routes)

    def close_direct(self) -> None:
        """Answer everything through FastAPI's stack from now on."""
        self._paths = frozenset()

    def complete(self) -> None:
        """Middleware and error handlers that are added from now on are others', and see every request."""
        self._expected = self._additions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request by the shortest way that it may take."""
        if scope["type"] == "http" and self._expected == self._additions():
            if scope["path"] in self._paths and scope["method"] == "POST" and self._direct is not None:
                scope["app"] = self
                await self._direct(scope, receive, send)
                return
            if (found := find(scope, self.models)) is not None:
                app, scope = found
                await app(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def answer_of_model(self, here: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that has come through others' middleware.

        Args:
            here: what answers those to this application's own model.
            scope, receive, send: of ASGI.
        """
        if scope["type"] == "http" and (found := find(scope, self.models)) is not None:
            app, scope = found
            if app is not self:
                here = app
        await here(scope, receive, send)

    def _additions(self) -> tuple[int, int]:
        return len(self.user_middleware), len(self.exception_handlers)
