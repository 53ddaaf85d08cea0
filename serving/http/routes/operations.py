"""Routes for operators and probes: the release in service, reload, /livez and /readyz."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from longtail.serving.core.description import release_json
from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.mirror import StagedCounts
from longtail.serving.core.service import Service
from longtail.serving.errors import UnknownReleaseError
from longtail.serving.http.auth import require_admin
from longtail.serving.http.bridge import ServiceRoute, errors
from longtail.serving.http.schemas.operations import (
    HealthAnswer,
    ReadyAnswer,
    ReleaseAnswer,
    ReleaseParameters,
    ReloadAnswer,
    StagedAnswer,
)

router = APIRouter(tags=["operations"], route_class=ServiceRoute)


@router.get("/v1/release", response_model=ReleaseAnswer, responses=errors(401, 422, 503))
async def release(request: Request, parameters: Annotated[ReleaseParameters, Query()]) -> dict[str, Any]:
    """Describe the release in service: the features of a query, an example, the model and the dial."""
    return release_json(request.app.state.service.retriever(), curve=parameters.include == "curve")


@router.get("/v1/release/staged", response_model=StagedAnswer, responses=errors(401, 404, 503))
async def staged(request: Request) -> dict[str, Any]:
    """Compare the staged release with the one in service, on a share of live queries.

    The figures are the overlap of the answers, exposure by bucket, and organic recall. The counts come from all workers
    of this replica, which write them every few seconds.
    """
    service: Service = request.app.state.service
    current, other = service.retriever(), service.mirror.staged
    if other is None:
        raise UnknownReleaseError("expected a staged release, found none; see longtail-index stage")
    state = service.settings.state_directory
    counts = await service.read(lambda: StagedCounts.read_all(state, other.name, current.name))
    return counts.figures()


@router.post(
    "/v1/release/reload",
    response_model=ReloadAnswer,
    dependencies=[Depends(require_admin)],
    responses=errors(401, 403, 409, 503),
)
async def reload(request: Request) -> dict[str, Any]:
    """Check CURRENT now instead of at the next poll, and retry a release that was refused. Admin.

    Other workers follow at their next poll.
    """
    follower: ReleaseFollower = request.app.state.follower
    changed = await asyncio.to_thread(follower.reload)
    return {"release": request.app.state.service.retriever().name, "changed": changed}


@router.get("/livez", response_model=HealthAnswer)
async def live(_: Request) -> dict[str, Any]:
    """Return 200 while the process runs."""
    return {"status": "alive"}


@router.get("/readyz", response_model=ReadyAnswer, responses=errors(503))
async def ready(request: Request) -> dict[str, Any]:
    """Return 200 while a release is loaded; 503 before that, and after SIGTERM.

    A service of several workers becomes ready when all workers have looked for a release, and then stays ready while
    one of them answers; `workers` has their number.
    """
    service: Service = request.app.state.service
    service.check_ready()
    workers = service.monitoring.slot.workers
    return {"status": "ready", "workers": {"expected": workers.workers, "ready": workers.ready}}
