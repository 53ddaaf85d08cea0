"""The application of one process: the service, its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import StateError
from longtail.serving.http.auth import AuthMiddleware, Keys
from longtail.serving.http.direct import Application
from longtail.serving.http.middleware import RequestMiddleware
from longtail.serving.http.openapi import install_documentation, openapi_document
from longtail.serving.http.responses import install_error_handlers
from longtail.serving.http.routes import routers
from longtail.serving.http.tracing import install_tracing
from longtail.serving.monitoring import LiveFigures, Monitoring
from longtail.serving.monitoring.host import Host
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.monitoring.workers import Seat, Workers
from longtail.serving.settings import Settings

_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Every request may set `bias_removal`, "
    "the dial between the tail (0) and plain recall (1) where training's noise is near the label frequencies, and "
    "`popularity`, the weight of a prior for frequent labels."
)

_LOOK_SECONDS = 0.02


def create_app(
    settings: Settings, *, retriever: Retriever | None = None, worker: int = 0, workers: Workers | None = None
) -> FastAPI:
    """The application of one process.

    Args:
        settings: read once, by the caller.
        retriever: serve this one and follow no releases; for tests and embedding.
        worker: this process' number among those that share the settings.
        workers: what they know of each other; there is but this one if None.

    Raises:
        StateError: the state directory cannot be used.
        TracingError: tracing is asked for and not installed.
    """
    figures = _open_figures(settings, worker)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    seat = Seat(workers or Workers(), worker)
    metrics = Metrics(
        [route.path for route in routes],
        [figures, seat, Host(settings.state_directory, settings.queue_limit)],
    )
    service = Service(settings, Monitoring(metrics, figures, seat))
    follower = ReleaseFollower(settings.releases, service)
    if retriever is not None:
        service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if retriever is None:
            follower.start()
        # A worker in another's place takes no connection from the others before it can answer.
        while retriever is None and seat.replaces and seat.waited_for and not service.draining:
            await asyncio.sleep(_LOOK_SECONDS)
        yield
        if retriever is None:
            follower.stop()
        service.close()

    app = Application(
        title="Longtail",
        version=_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        routes=list(routes),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.follower = service, follower
    install_documentation(app)
    install_error_handlers(app)
    keys = app.state.keys = Keys(settings)

    def surround(answer: ASGIApp) -> ASGIApp:
        return RequestMiddleware(AuthMiddleware(answer, keys, insecure=settings.insecure), service)

    app.add_middleware(surround)
    if settings.tracing:
        install_tracing(app)
    else:
        app.open_direct(surround)
    app.openapi = partial(openapi_document, app)  # type: ignore[method-assign]
    return app


def apply_settings(app: FastAPI, settings: Settings) -> None:
    """Answer with other settings from the next request on, as far as `LIVE` says that they can be changed, and by the
    experiments.toml of now.

    Args:
        app: of `create_app`.
        settings: those it has, but for live ones.

    Raises:
        ValueError, OSError: as `Settings.all_api_keys`; nothing has changed then.
    """
    keys: Keys = app.state.keys
    keys.replace(settings)
    app.state.service.settings = settings
    follower: ReleaseFollower = app.state.follower
    follower.experiments.check(again=True)


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
            shadow_k=settings.shadow_k,
            stale_days=settings.stale_days,
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
