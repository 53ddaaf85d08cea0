"""The application of one process: the service, its routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import StateError, TracingError
from longtail.serving.http.auth import AuthMiddleware, Keys
from longtail.serving.http.middleware import RequestMiddleware
from longtail.serving.http.openapi import install_documentation, openapi_document
from longtail.serving.http.responses import install_error_handlers
from longtail.serving.http.routes import routers
from longtail.serving.monitoring import LiveFigures, Monitoring
from longtail.serving.monitoring.host import Host
from longtail.serving.monitoring.prometheus import Metrics
from longtail.serving.monitoring.workers import Seat, Workers
from longtail.serving.settings import Settings
from longtail.state import StoreError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_DESCRIPTION = (
    "Retrieves the best labels for a query from a two-tower model. Every request may set `bias_removal`, "
    "the dial between the tail (0) and plain recall (1) where training's noise is near the label frequencies, and "
    "`popularity`, the weight of a prior for frequent labels."
)
_LOOK_SECONDS = 0.02
_UNTRACED = "livez,readyz,metrics"


class Application(FastAPI):
    """FastAPI with no layers but the middleware that is added to it and the handlers of errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request without FastAPI's own telemetry: `tracing` has its own."""
        await Starlette.__call__(self, scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Leave out FastAPI's layers for telemetry and file uploads; OpenTelemetry expects the outermost one."""
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers, debug=self.debug)
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return ServerErrorMiddleware(app)


def create_app(
    settings: Settings | None = None,
    *,
    retriever: Retriever | None = None,
    worker: int = 0,
    workers: Workers | None = None,
) -> FastAPI:
    """Create the application of one process.

    Args:
        settings: read from the environment (LONGTAIL_RELEASES, …) if None, as other ASGI servers need.
        retriever: serve this one and follow no releases; for tests and embedding.
        worker: this process' number among those that share the settings.
        workers: state that the processes share; this is the only one if None.

    Raises:
        StateError: the state directory cannot be used.
        TracingError: `tracing` is set, and its packages are not installed.
    """
    settings = settings or Settings()
    keys, seat, figures = Keys(settings), Seat(workers or Workers(), worker), _open_figures(settings, worker)
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    host = Host(settings.state_directory, settings.queue_limit)
    metrics = Metrics([route.path for route in routes], [figures, seat, seat.workers, host])
    service = Service(settings, Monitoring(metrics, figures, seat))
    follower = ReleaseFollower(settings.releases_directory, service)
    if retriever is not None:
        service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if retriever is None:
            follower.start()
            # A worker that replaces another takes no connection from the others before it can answer.
            while seat.replaces and seat.waited_for and not service.draining:
                await asyncio.sleep(_LOOK_SECONDS)
        yield
        if retriever is None:
            follower.stop()
        service.close()

    app = Application(
        title="Longtail",
        version=_version(),
        description=_DESCRIPTION,
        routes=list(routes),
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.follower, app.state.keys = service, follower, keys
    install_documentation(app)
    install_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(AuthMiddleware, keys=keys, insecure=settings.insecure)
    app.add_middleware(RequestMiddleware, service=service)
    if settings.tracing:
        install_tracing(app)
    app.openapi = partial(openapi_document, app)  # type: ignore[method-assign]
    return app


def apply_settings(app: FastAPI, settings: Settings) -> None:
    """Answer with other live settings, keys and the current experiments.toml from the next request on.

    Args:
        app: made by `create_app`.
        settings: equal to the application's, except for live ones.

    Raises:
        ValueError, OSError: a file of keys cannot be read; nothing has changed then.
    """
    app.state.keys.replace(settings)
    app.state.service.settings = settings
    app.state.follower.experiments.check()


def install_tracing(app: FastAPI, processor: SpanProcessor | None = None) -> None:
    """Trace every request except probes and scrapes with OpenTelemetry; continue a caller's traceparent.

    Args:
        app: the application.
        processor: gets the spans; by default they are sent in batches over OTLP/HTTP, as the OTEL_… variables say.

    Raises:
        TracingError: the packages of the extra `otel` are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(
            f"tracing: expected the packages of the extra otel (pip install 'longtail[otel]'), found {error}"
        ) from error
    resource = Resource({SERVICE_NAME: "longtail"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, excluded_urls=_UNTRACED)


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
