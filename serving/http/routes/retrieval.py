"""Top-k labels for queries and for labels."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.types import Receive, Scope

from longtail.serving.core import trials
from longtail.serving.core.arms import Unit
from longtail.serving.core.service import Service
from longtail.serving.http import limits
from longtail.serving.http.body import read_body
from longtail.serving.http.direct import DirectRoute
from longtail.serving.http.openapi import errors, json_body
from longtail.serving.http.responses import results_json
from longtail.serving.http.schemas.retrieval import RetrieveAnswer, RetrieveRequest, SimilarAnswer, SimilarRequest

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/retrieve",
    tags=["retrieval"],
    openapi_extra=json_body(RetrieveRequest, {"queries": [{"features": {"user_id": "42"}, "k": 10}]}),
    responses={200: {"model": RetrieveAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def retrieve(service: Service, scope: Scope, receive: Receive) -> bytes:
    """The best labels for each query."""
    body = await read_body(scope, receive, RetrieveRequest, service.settings)
    scope["state"]["preview"] = body.preview
    limits.check_retrieve(body, service.settings)
    own, id_ = scope["state"]["answer_id"], scope["state"]["request_id"]
    results, release = await trials.retrieve(
        service, body.queries, own, id_, release=body.release, preview=body.preview, asked=Unit(body.unit, body.arm)
    )
    return results_json(results, release, own, id_)


@router.post(
    "/v1/similar",
    tags=["retrieval"],
    openapi_extra=json_body(SimilarRequest, {"id": "50", "k": 10}),
    responses={200: {"model": SimilarAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def similar(service: Service, scope: Scope, receive: Receive) -> bytes:
    """The labels nearest to each given label."""
    body = await read_body(scope, receive, SimilarRequest, service.settings)
    scope["state"]["preview"] = body.preview
    limits.check_similar(body, service.settings)
    own, id_ = scope["state"]["answer_id"], scope["state"]["request_id"]
    retriever = service.retriever(body.release)
    results = await service.search(retriever, body, own, id_, preview=body.preview)
    return results_json(results, retriever.name, own, id_)
