"""The application of one process: the service, its routes, middleware and error handlers."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from fastapi.routing import APIRoute

from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import StateError
from longtail.serving.http.auth import AuthMiddleware, KeySet
from longtail.serving.http.middleware import RequestMiddleware
from longtail.serving.http.openapi import install_documentation, openapi_document
from longtail.serving.http.responses import install_error_handlers
from longtail.serving.http.routes import routers
from longtail.serving.http.tracing import install_tracing
from longtail.serving.monitoring import LiveFigures, Monitoring
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.settings import Settings

_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Every request may set `bias_removal`, "
    "the dial between the tail (0) and plain recall (1) where training's noise is near the label frequencies, and "
    "`popularity`, the weight of a prior for frequent labels."
)


def create_app(settings: Settings, *, retriever: Retriever | None = None, worker: int = 0) -> FastAPI:
    """The application of one process.

    Args:
        settings: read once, by the caller.
        retriever: serve this one and follow no releases; for tests and embedding.
        worker: this process' number among those that share the settings.

    Raises:
        StateError: the state directory cannot be used.
        TracingError: tracing is asked for and not installed.
    """
    figures = _open_figures(settings, worker)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    service = Service(settings, Monitoring(Metrics([route.path for route in routes], [figures]), figures))
    follower = ReleaseFollower(settings.releases, service)
    if retriever is not None:
        service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if retriever is None:
            follower.start()
        yield
        if retriever is None:
            follower.stop()
        service.close()

    app = FastAPI(
        title="Longtail",
        version=_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        routes=list(routes),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.follower = service, follower
    install_documentation(app)
    install_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(
        AuthMiddleware,
        api=KeySet(settings.all_api_keys()),
        admin=KeySet(settings.all_admin_keys()),
        insecure=settings.insecure,
    )
    app.add_middleware(RequestMiddleware, monitoring=service.monitoring, access_log=settings.access_log)
    if settings.tracing:
        install_tracing(app)
    app.openapi = partial(openapi_document, app)  # type: ignore[method-assign]
    return app


def _open_figures(settings: Settings, worker: int) -> LiveFigures:
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True)
        return LiveFigures(
            settings.state_directory,
            worker=worker,
            max_answers=settings.max_answers,
            max_feedback=settings.max_feedback,
            feedback_seconds=3600 * settings.feedback_hours,
            releases=settings.keep_releases + 2,
        )
    except (OSError, sqlite3.Error) as error:
        raise StateError(
            f"state directory {settings.state_directory}: expected one to write to (--state), found: {error}"
        ) from error


def _version() -> str:
    try:
        return version("longtail")
    except PackageNotFoundError:
        return "0+unknown"
