"""The routes: read, ask the core, answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from serving import limits
from serving.body import read_body
from serving.edge import dump, json_response, request_id
from serving.errors import NotReadyError
from serving.openapi import json_body
from serving.retriever import Retrieval, Retriever
from serving.schemas import (
    ErrorAnswer,
    HealthAnswer,
    LabelAnswer,
    ReleaseAnswer,
    RetrieveAnswer,
    RetrieveRequest,
    SimilarAnswer,
    SimilarRequest,
)
from serving.service import Service

_ERROR: dict[str, Any] = {"model": ErrorAnswer}

router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _answer(service: Service, id_: str, search: Callable[[Retriever], Retrieval]) -> Response:
    """Search one release in a search thread, count what it showed, and answer."""
    retriever = service.retriever()

    def work() -> bytes:
        retrieval = search(retriever)
        service.monitor.retrieval(retrieval)
        return dump({"results": retrieval.results, "release": retriever.name}, id_)

    return json_response(await service.compute(work))


@router.post(
    "/v1/retrieve",
    tags=["retrieval"],
    openapi_extra=json_body(RetrieveRequest),
    responses={200: {"model": RetrieveAnswer}, 400: _ERROR, 413: _ERROR, 415: _ERROR, 422: _ERROR, 503: _ERROR},
)
async def retrieve(request: Request) -> Response:
    """The best labels for each query."""
    service, id_ = _service(request), request_id(request)
    wanted = await read_body(request, RetrieveRequest, limit=service.settings.max_body_bytes)
    limits.check_retrieve(wanted, service.settings)
    return await _answer(service, id_, lambda retriever: retriever.retrieve(wanted.queries))


@router.post(
    "/v1/similar",
    tags=["retrieval"],
    openapi_extra=json_body(SimilarRequest),
    responses={
        200: {"model": SimilarAnswer}, 400: _ERROR, 404: _ERROR, 413: _ERROR, 415: _ERROR, 422: _ERROR, 503: _ERROR
    },
)  # fmt: skip
async def similar(request: Request) -> Response:
    """The labels nearest to each given label."""
    service, id_ = _service(request), request_id(request)
    wanted = await read_body(request, SimilarRequest, limit=service.settings.max_body_bytes)
    limits.check_similar(wanted, service.settings)
    return await _answer(service, id_, lambda retriever: retriever.similar(wanted))


@router.get(
    "/v1/labels/{id:path}", tags=["catalogue"], responses={200: {"model": LabelAnswer}, 404: _ERROR, 503: _ERROR}
)
async def label(request: Request, id: str) -> Response:
    """What the release knows about one label; its id may hold slashes."""
    retriever = _service(request).retriever()
    return json_response(dump({**retriever.label(id), "release": retriever.name}, request_id(request)))


@router.get("/v1/release", tags=["catalogue"], responses={200: {"model": ReleaseAnswer}, 503: _ERROR})
async def release(request: Request) -> Response:
    """The release being served: its model, the dial and what each setting scored, and what queries may carry."""
    return json_response(dump(_service(request).retriever().describe(), request_id(request)))


@router.get("/livez", tags=["operations"], responses={200: {"model": HealthAnswer}})
async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return json_response(dump({"status": "alive"}, request_id(request)))


@router.get("/readyz", tags=["operations"], responses={200: {"model": HealthAnswer}, 503: _ERROR})
async def ready(request: Request) -> Response:
    """200 while a release is loaded; 503 before, and from SIGTERM on."""
    service = _service(request)
    if service.draining:
        raise NotReadyError("expected a service that takes requests, found one that is shutting down")
    service.retriever()
    return json_response(dump({"status": "ready"}, request_id(request)))


@router.get("/metrics", tags=["operations"], response_class=Response)
async def metrics(request: Request) -> Response:
    """Every series in Prometheus' text format."""
    return Response(_service(request).monitor.scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})
