"""Top-k labels for queries and for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longtail.serving.core.queries import Query, SimilarQuery
from longtail.serving.http import limits
from longtail.serving.http.body import read_body
from longtail.serving.http.openapi import errors, json_body
from longtail.serving.http.responses import answer_id, request_id, results_response, service_of
from longtail.serving.http.schemas.retrieval import RetrieveAnswer, RetrieveRequest, SimilarAnswer, SimilarRequest


class _DirectRoute(APIRoute):
    """Hands requests to its endpoint as they are: it has no dependencies to resolve, and reads its body itself."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response: Response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = app


router = APIRouter(route_class=_DirectRoute)


@router.post(
    "/v1/retrieve",
    tags=["retrieval"],
    openapi_extra=json_body(RetrieveRequest),
    responses={200: {"model": RetrieveAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def retrieve(request: Request) -> Response:
    """The best labels for each query."""
    service = service_of(request)
    await service.admit()
    body = await read_body(request, RetrieveRequest, service.settings)
    request.state.preview = body.preview
    limits.check_retrieve(body, service.settings)
    return await _answer(request, body.queries, release=body.release, preview=body.preview)


@router.post(
    "/v1/similar",
    tags=["retrieval"],
    openapi_extra=json_body(SimilarRequest),
    responses={200: {"model": SimilarAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def similar(request: Request) -> Response:
    """The labels nearest to each given label."""
    service = service_of(request)
    await service.admit()
    body = await read_body(request, SimilarRequest, service.settings)
    request.state.preview = body.preview
    limits.check_similar(body, service.settings)
    return await _answer(request, body, release=body.release, preview=body.preview)


async def _answer(
    request: Request, asked: Sequence[Query] | SimilarQuery, *, release: str | None, preview: bool
) -> Response:
    """Answer a request from one release; the current one unless it names another."""
    service, own, id_ = service_of(request), answer_id(request), request_id(request)
    retriever = service.retriever(release)
    results = await service.search(retriever, asked, own, id_, preview=preview)
    return results_response(results, retriever.name, own, id_)
