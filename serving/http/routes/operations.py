"""Routes for operators and probes: the release in service, reload, /livez and /readyz."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtail.serving.core.description import release_json
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
    """Describe the release in service: the features of a query, an example, the model and the dial."""
    asked = read_parameters(request, ReleaseParameters)
    return json_response(request, release_json(service_of(request).retriever(), curve=asked.include == "curve"))


@router.get("/v1/release/staged", responses={200: {"model": StagedAnswer}, **errors(401, 404, 503)})
async def staged(request: Request) -> Response:
    """Compare the staged release with the one in service, on a share of live queries.

    The figures are the overlap of the answers, exposure by bucket, and organic recall. The counts come from all workers
    of this replica, which write them every few seconds.
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
    """Check CURRENT now instead of at the next poll, and retry a release that was refused. Admin.

    Other workers follow at their next poll.
    """
    require_admin(request)
    service = service_of(request)
    follower: ReleaseFollower = request.app.state.follower
    changed = await asyncio.to_thread(follower.reload)
    return json_response(request, {"release": service.retriever().name, "changed": changed})


@router.get("/livez", responses={200: {"model": HealthAnswer}})
async def live(request: Request) -> Response:
    """Return 200 while the process runs."""
    return json_response(request, {"status": "alive"})


@router.get("/readyz", responses={200: {"model": ReadyAnswer}, **errors(503)})
async def ready(request: Request) -> Response:
    """Return 200 while a release is loaded; 503 before that, and after SIGTERM.

    A service of several workers becomes ready when all workers have looked for a release, and then stays ready while
    one of them answers; `workers` has their number.
    """
    service = service_of(request)
    service.check_ready()
    workers = service.monitoring.seat.workers
    count = {"expected": workers.workers, "ready": workers.ready}
    return json_response(request, {"status": "ready", "workers": count})
