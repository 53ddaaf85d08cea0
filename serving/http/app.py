"""The application of one process: the service, its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
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
from longtail.serving.logs import model as logged_model
from longtail.serving.monitoring import LiveFigures, Monitoring
from longtail.serving.monitoring.host import Host, StateDisk
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.monitoring.workers import Seat, Workers
from longtail.serving.setting_types import DEFAULT_MODEL
from longtail.serving.settings import Settings
from longtail.state import StoreError

_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Every request may set `bias_removal`, "
    "the dial between the tail (0) and plain recall (1) where training's noise is near the label frequencies, and "
    "`popularity`, the weight of a prior for frequent labels."
)

_LOOK_SECONDS = 0.02


def create_app(
    settings: Settings, *, retriever: Retriever | None = None, worker: int = 0, workers: Workers | None = None
) -> FastAPI:
    """The application of one process: that of the first model, which hands on what is asked of further ones.

    Args:
        settings: read once, by the caller.
        retriever: serve this one and follow no releases; for tests and embedding. Further models follow theirs.
        worker: this process' number among those that share the settings.
        workers: what they know of each other; there is but this one if None.

    Raises:
        StateError: a state directory cannot be used.
        TracingError: tracing is asked for and not installed.
    """
    board, keys = workers or Workers(models=1 + len(settings.models)), Keys(settings)
    models = dict[str, Application]()
    with ExitStack() as opened:
        for place, (name, its) in enumerate(settings.by_model().items()):
            named = logged_model.set(name if settings.models else None)
            try:
                models[name] = _application(its, Seat(board, worker, place), keys, name, models)
            finally:
                logged_model.reset(named)
            opened.callback(models[name].state.service.close)
        opened.pop_all()
    app = models[DEFAULT_MODEL]
    following = [model for model in models.values() if model is not app or retriever is None]
    if retriever is not None:
        app.state.service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for model in following:
            model.state.follower.start()
        # A worker in another's place takes no connection from the others before it can answer.
        seats = [model.state.service.monitoring.seat for model in following]
        while any(seat.replaces and seat.waited_for for seat in seats) and not app.state.service.draining:
            await asyncio.sleep(_LOOK_SECONDS)
        yield
        for model in following:
            model.state.follower.stop()
        # The first has the threads that search; what they answer is counted by all.
        for model in models.values():
            model.state.service.close()

    app.router.lifespan_context = lifespan
    return app


def _application(
    settings: Settings, seat: Seat, keys: Keys, model: str, models: Mapping[str, Application]
) -> Application:
    """The application of one model.

    Args:
        settings: as they are for the model.
        seat: of the worker and the model.
        keys: that the process knows.
        model: its name.
        models: applications by name; the first is there when a further one is made, this one will be.

    Raises:
        as `create_app`.
    """
    figures = _open_figures(settings, seat.worker)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    first = models.get(DEFAULT_MODEL)
    if first is None:
        host = Host(settings.state_directory, settings.queue_limit)
        metrics = Metrics([route.path for route in routes], [figures, seat, seat.workers, host])
        service = Service(settings, Monitoring(metrics, figures, seat))
    else:
        disk = StateDisk(settings.state_directory)
        metrics = Metrics([route.path for route in routes], [figures, seat, disk], model)
        service = Service(settings, Monitoring(metrics, figures, seat))
    app = Application(
        title="Longtail" if first is None else f"Longtail: {model}",
        version=_version(),
        description=_DESCRIPTION,
        routes=list(routes),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.models = app.state.models = models
    follower = ReleaseFollower(settings.releases_directory, service)
    app.state.service, app.state.follower, app.state.keys = service, follower, keys
    install_documentation(app, None if first is None else model)
    install_error_handlers(app)
    logged = logged_model.get()

    def surround(answer: ASGIApp) -> ASGIApp:
        return RequestMiddleware(AuthMiddleware(answer, keys, insecure=settings.insecure), service, logged)

    app.add_middleware(lambda answer: partial(app.answer_of_model, surround(answer)))
    if settings.tracing:
        install_tracing(app, model=logged)
    else:
        app.open_direct(surround)
    app.complete()
    app.openapi = partial(openapi_document, app)  # type: ignore[method-assign]
    return app


def apply_settings(app: FastAPI, settings: Settings) -> None:
    """Answer with other settings from the next request on, as far as `LIVE` says that they can be changed, and by the
    experiments.toml of now; of every model.

    Args:
        app: of `create_app`.
        settings: those it has, but for live ones.

    Raises:
        ValueError, OSError: as `Settings.all_api_keys`; nothing has changed then.
    """
    keys: Keys = app.state.keys
    keys.replace(settings)
    for name, its in settings.by_model().items():
        model = app.state.models[name]
        model.state.service.settings = its
        follower: ReleaseFollower = model.state.follower
        named = logged_model.set(name if settings.models else None)
        follower.experiments.check(again=True)
        logged_model.reset(named)


def _open_figures(settings: Settings, worker: int) -> LiveFigures:
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True)
        return LiveFigures(
            settings.state_directory,
            kept=settings.place,
            worker=worker,
            max_answers=settings.max_answers,
            max_feedback=settings.max_feedback,
            feedback_seconds=3600 * settings.feedback_hours,
            releases=settings.keep_releases + 2,
            shadow_k=settings.shadow_k,
            stale_days=settings.stale_days,
        )
    except (OSError, StoreError) as error:
        raise StateError(
            f"state directory {settings.state_directory}: expected one to write to (--state), found: {error}"
        ) from error


def _version() -> str:
    try:
        return version("longtail")
    except PackageNotFoundError:
        return "0+unknown"
