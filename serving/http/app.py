"""Create the ASGI application of one process: service, routes, middleware and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import ServingError, StateError
from longtail.serving.events import EventSink
from longtail.serving.events.folder import FolderEvents
from longtail.serving.events.kafka import KafkaEvents
from longtail.serving.http.auth import Keys
from longtail.serving.http.middleware import RequestMiddleware
from longtail.serving.http.openapi import documentation
from longtail.serving.http.responses import answer_routing_error, answer_serving_error
from longtail.serving.http.routes import routes
from longtail.serving.http.tracing import Tracing
from longtail.serving.monitoring import Monitoring
from longtail.serving.monitoring.workers import Workers, WorkerSlot
from longtail.serving.settings import Settings

_LOOK_SECONDS = 0.02


def create_app(
    settings: Settings | None = None,
    *,
    retriever: Retriever | None = None,
    worker: int = 0,
    workers: Workers | None = None,
) -> Starlette:
    """Create the application of one process.

    Args:
        settings: None: read from the environment (LONGTAIL_RELEASES, …), for other ASGI servers.
        retriever: serve this release and follow no others, for tests and embedding.
        worker: number of this process among the workers.
        workers: board of all workers; None: this process is the only one.

    Raises:
        StateError: the state directory cannot be used.
    """
    settings = settings or Settings()  # type: ignore[call-arg]  # from the environment
    keys, slot = Keys(settings), WorkerSlot(workers or Workers(), worker)
    monitoring = _open_monitoring(settings, slot)
    service = Service(settings, monitoring, _open_events(settings, monitoring))
    follower = ReleaseFollower(settings.releases_directory, service)
    tracing = Tracing(settings.tracing) if settings.tracing else None
    if retriever is not None:
        service.serve(retriever)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if retriever is None:
            follower.start()
            # A restarted worker accepts no connections until it can answer, while the other workers can.
            while slot.replaces and slot.is_starting and not service.draining:
                await asyncio.sleep(_LOOK_SECONDS)
        yield
        if retriever is None:
            follower.stop()
        # After the follower, which may still hand over a release.
        service.close()
        if tracing is not None:
            tracing.close()

    app = Starlette(
        routes=[*routes, *documentation()],
        middleware=[Middleware(RequestMiddleware, service=service, keys=keys, tracing=tracing)],
        exception_handlers={ServingError: answer_serving_error, HTTPException: answer_routing_error},
        lifespan=lifespan,
    )
    # A label's id may end in a slash, and a redirect would name another label.
    app.router.redirect_slashes = False
    app.state.service, app.state.follower, app.state.keys = service, follower, keys
    return app


def _open_monitoring(settings: Settings, slot: WorkerSlot) -> Monitoring:
    try:
        settings.state_directory.mkdir(parents=True, exist_ok=True)
        return Monitoring(
            settings.state_directory,
            slot,
            routes=[route.path for route in routes],
            groups=settings.groups,
            queue_limit=settings.queue_limit,
            # Besides the earlier releases, the current and the staged one answer.
            releases=settings.keep_releases + 2,
        )
    except OSError as error:
        raise StateError(
            f"state directory {settings.state_directory}: expected one to write to (--state), found: {error}"
        ) from error


def _open_events(settings: Settings, monitoring: Monitoring) -> EventSink:
    source = settings.events or settings.state_directory / "events"
    count_dropped = partial(monitoring.count, "dropped")
    try:
        if isinstance(source, str) and "://" in source:
            return KafkaEvents(source, count_dropped)
        return FolderEvents(
            Path(source),
            days=settings.events_days,
            most_bytes=settings.events_bytes,
            count_dropped=count_dropped,
        )
    except (OSError, ValueError) as error:
        raise StateError(
            f"LONGTAIL_EVENTS: expected a folder to write to or a topic of Kafka, found: {error}"
        ) from error
