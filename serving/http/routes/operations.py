"""Routes for operators and probes: the release in service, reload, /livez and /readyz."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.mirror import StagedCounts
from longtail.serving.errors import UnknownReleaseError
from longtail.serving.http.auth import require_admin
from longtail.serving.http.requests import RequestRoute, errors, query_parameters, read_parameters
from longtail.serving.http.responses import json_response, service_of
from longtail.serving.http.schemas.operations import (
    HealthAnswer,
    ReadyAnswer,
    ReleaseAnswer,
    ReleaseParameters,
    ReloadAnswer,
    StagedAnswer,
)

router = APIRouter(tags=["operations"], route_class=RequestRoute)


@router.get(
    "/v1/release",
    openapi_extra=query_parameters(ReleaseParameters),
    responses={200: {"model": ReleaseAnswer}, **errors(401, 422, 503)},
)
async def release(request: Request) -> Response:
    """The release being served: what queries may carry, an example of their features, the model and the dial."""
    asked = read_parameters(request, ReleaseParameters)
    return json_response(request, service_of(request).retriever().release_json(curve=asked.include == "curve"))


@router.get("/v1/release/staged", responses={200: {"model": StagedAnswer}, **errors(401, 404, 503)})
async def staged(request: Request) -> Response:
    """How a staged release would have answered a share of live queries: its overlap with what was served, exposure by
    bucket, and organic recall. The counts of all workers of this replica, written every
    few seconds.
    """
    service = service_of(request)
    current, other = service.retriever(), service.mirror.staged
    if other is None:
        raise UnknownReleaseError("expected a staged release, found none; see longtail-index stage")

    state = service.settings.state_directory
    counts = await service.read(lambda: StagedCounts.read_all(state, other.name, current.name))
    return json_response(request, counts.figures())


@router.post("/v1/release/reload", responses={200: {"model": ReloadAnswer}, **errors(401, 403, 409, 503)})
async def reload(request: Request) -> Response:
    """Look at CURRENT now instead of at the next poll, and again at a release that was refused. Admin.

    Of several workers, the others follow at their next poll.
    """
    require_admin(request)
    service = service_of(request)
    follower: ReleaseFollower = request.app.state.follower
    changed = await asyncio.to_thread(follower.reload)
    return json_response(request, {"release": service.retriever().name, "changed": changed})


@router.get("/livez", responses={200: {"model": HealthAnswer}})
async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return json_response(request, {"status": "alive"})


@router.get("/readyz", responses={200: {"model": ReadyAnswer}, **errors(503)})
async def ready(request: Request) -> Response:
    """200 while a release is loaded; 503 before, and from SIGTERM on.

    A service of several workers is ready when all have looked for a release; later it stays so while one of them
    answers here, and `workers` says how many do.
    """
    service = service_of(request)
    service.check_ready()
    workers = service.monitoring.seat.workers
    count = {"expected": workers.workers, "ready": workers.ready}
    return json_response(request, {"status": "ready", "workers": count})
