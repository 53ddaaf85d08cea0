"""Routes of feedback, and of the figures of every bucket as JSON, Prometheus series and a page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from longtail.bundle.errors import describe
from longtail.serving import dashboard
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.requests import LONGEST_ID, RequestRoute, errors, json_body, read_body
from longtail.serving.http.responses import json_response, service_of
from longtail.serving.http.schemas.monitoring import FeedbackAnswer, FeedbackRequest, MonitoringAnswer

router = APIRouter(tags=["figures"], route_class=RequestRoute)


@router.post(
    "/v1/feedback",
    openapi_extra=json_body(FeedbackRequest, {"events": [{"features": {"user_id": "42"}, "labels": ["50"]}]}),
    responses={200: {"model": FeedbackAnswer}, **errors(400, 401, 408, 413, 415, 422, 429, 503)},
)
async def feedback(request: Request) -> Response:
    """Record what users chose, from an answer (by its `answer_id`) or without one; stored durably on success."""
    service = service_of(request)
    body = await read_body(request, FeedbackRequest)
    for index, event in enumerate(body.events):
        for place, id_ in enumerate(map(str, event.labels)):
            # Ids of the release's labels may exceed the limit for unknown ids.
            if len(id_) > LONGEST_ID and not service.retriever().knows(id_):
                raise InvalidRequestError(
                    f"expected a label of the release, or an id of at most {LONGEST_ID} characters, received "
                    f"{describe(id_)}",
                    field=f"events.{index}.labels.{place}",
                )
    unknown = await service.record_feedback(body.events, request.state.key)
    return json_response(request, {"accepted": len(body.events), "unknown": unknown})


@router.get("/v1/monitoring", responses={200: {"model": MonitoringAnswer}, **errors(401, 503)})
async def monitoring(request: Request) -> Response:
    """Report exposure, coverage, drift and recall per frequency bucket, over minutes, an hour and a day."""
    service = service_of(request)
    report = await service.read(service.monitoring.report)
    staged = service.mirror.staged
    told = {**report, "staged": None if staged is None else staged.name}
    return json_response(request, told)


@router.get("/metrics", response_class=Response, responses=errors(401))
async def metrics(request: Request) -> Response:
    """Return all series in Prometheus' text format; METRICS.md lists them."""
    service = service_of(request)
    scraped = await service.read(service.monitoring.scrape)
    return Response(scraped, headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/", include_in_schema=False)
async def home(_: Request) -> HTMLResponse:
    """Show a page that leads to dashboard, documentation, release and metrics."""
    return HTMLResponse(dashboard.home(), headers={"Content-Security-Policy": dashboard.home_csp()})


@router.get("/dashboard", include_in_schema=False)
async def page(_: Request) -> HTMLResponse:
    """Show the figures as a page, with a form for trying queries and the dial."""
    return HTMLResponse(dashboard.page(), headers={"Content-Security-Policy": dashboard.csp()})
