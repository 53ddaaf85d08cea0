"""Routes of feedback, and of each bucket's figures as JSON, series and a page."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from longtail.bundle.errors import describe
from longtail.serving import dashboard
from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.bridge import BODY_ERRORS, LONGEST_ID, ServiceRoute, errors
from longtail.serving.http.schemas.monitoring import FeedbackAnswer, FeedbackRequest, MonitoringAnswer

router = APIRouter(tags=["figures"], route_class=ServiceRoute)


@router.post("/v1/feedback", response_model=FeedbackAnswer, responses=errors(*BODY_ERRORS))
async def feedback(request: Request, body: FeedbackRequest) -> dict[str, Any]:
    """Record what users chose, from an answer (by its `answer_id`) or without one; stored durably on success."""
    service: Service = request.app.state.service
    for index, event in enumerate(body.events):
        for position, id_ in enumerate(map(str, event.labels)):
            # Ids of the release's labels may exceed the limit for unknown ids.
            if len(id_) > LONGEST_ID and not service.retriever().knows(id_):
                raise InvalidRequestError(
                    f"expected a label of the release, or an id of at most {LONGEST_ID} characters, received "
                    f"{describe(id_)}",
                    field=f"events.{index}.labels.{position}",
                )
    unknown = await service.record_feedback(body.events, request.state.key)
    return {"accepted": len(body.events), "unknown": unknown}


@router.get("/v1/monitoring", response_model=MonitoringAnswer, responses=errors(401, 503))
async def monitoring(request: Request) -> dict[str, Any]:
    """Report exposure, coverage, drift and recall per frequency bucket, over minutes, an hour and a day."""
    service: Service = request.app.state.service
    report = await service.read(service.monitoring.report)
    staged = service.mirror.staged
    return {**report, "staged": None if staged is None else staged.name}


@router.get("/metrics", response_class=Response, responses=errors(401))
async def metrics(request: Request) -> Response:
    """Return all series in Prometheus' text format; METRICS.md lists them."""
    service: Service = request.app.state.service
    series = await service.read(service.monitoring.scrape)
    return Response(series, headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/", include_in_schema=False)
async def home(_: Request) -> HTMLResponse:
    """Show a page that leads to dashboard, documentation, release and metrics."""
    return HTMLResponse(dashboard.home(), headers={"Content-Security-Policy": dashboard.home_csp()})


@router.get("/dashboard", include_in_schema=False)
async def page(_: Request) -> HTMLResponse:
    """Show the figures as a page, with a form for trying queries and the dial."""
    return HTMLResponse(dashboard.page(), headers={"Content-Security-Policy": dashboard.csp()})
