"""Puts the service together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from serving.edge import install_error_handlers
from serving.envelope import Envelope
from serving.follower import ReleaseFollower
from serving.monitoring import Monitor
from serving.openapi import document
from serving.retriever import Retriever
from serving.routes import router
from serving.service import Service
from serving.settings import Settings

_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Every request may set `bias_removal`, "
    "the dial between the tail (0) and plain recall (1)."
)


def create_app(settings: Settings, *, retriever: Retriever | None = None) -> FastAPI:
    """The application of one process.

    Args:
        settings: read once, by the caller.
        retriever: serve this one and follow no releases; for tests and embedding.
    """
    routes = [route.path for route in router.routes if hasattr(route, "path")]
    service = Service(settings, Monitor(routes))
    if retriever is not None:
        service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        follower = None if retriever is not None else ReleaseFollower(settings.releases, service)
        if follower is not None:
            follower.start()
        yield
        if follower is not None:
            follower.stop()
        service.close()

    app = FastAPI(title="Longtail", version=_version(), description=_DESCRIPTION, lifespan=lifespan, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    install_error_handlers(app)
    app.add_middleware(Envelope, monitor=service.monitor)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    return app


def _version() -> str:
    try:
        return version("longtail")
    except PackageNotFoundError:
        return "0+unknown"
