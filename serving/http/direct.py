"""The short way to the routes that most requests are for: through the service's own middleware, past FastAPI's.

FastAPI defines and documents these routes as all others, and answers them too where its own stack is wanted: behind
middleware that an embedding application has added, or under tracing. Either way the same middleware surrounds the
same function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.serving.core.service import Service
from longtail.serving.errors import ServingError
from longtail.serving.http.responses import serving_error

Endpoint = Callable[[Service, Scope, Receive], Awaitable[bytes]]
"""Answers a request with JSON, or raises ServingError."""


class DirectRoute(APIRoute):
    """A route of searches, whose endpoint reads requests and makes answers as bytes: nothing stands between."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        async def documented() -> None:
            """Has the endpoint's name and words, and no parameters for FastAPI to read."""

        documented.__name__, documented.__doc__ = endpoint.__name__, endpoint.__doc__
        super().__init__(path, documented, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            service: Service = scope["app"].state.service
            await service.admission.enter()
            try:
                content = await endpoint(service, scope, receive)
            finally:
                service.admission.leave()
            length = str(len(content)).encode()
            headers = [(b"content-length", length), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})

        self.app = app


class Application(FastAPI):
    """FastAPI with a door of its own for POST requests to `DirectRoute`s."""

    _direct: ASGIApp | None = None
    _paths: frozenset[str] = frozenset()
    _expected: tuple[int, int] = (0, 0)

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

        self._direct, self._paths, self._expected = surround(answer), frozenset(routes), self._additions()

    def close_direct(self) -> None:
        """Answer everything through FastAPI's stack from now on."""
        self._paths = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request by the shortest way that it may take."""
        if (
            scope["type"] == "http"
            and scope["path"] in self._paths
            and scope["method"] == "POST"
            and self._direct is not None
            and self._expected == self._additions()
        ):
            scope["app"] = self
            await self._direct(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _additions(self) -> tuple[int, int]:
        return len(self.user_middleware), len(self.exception_handlers)
