"""Top-k labels for queries and for labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longtail.serving.http import limits
from longtail.serving.http.body import read_body
from longtail.serving.http.openapi import errors, json_body
from longtail.serving.http.responses import request_id, results_response, service_of
from longtail.serving.http.schemas import RetrieveAnswer, RetrieveRequest, SimilarAnswer, SimilarRequest
from longtail.serving.settings import Settings

Wanted = TypeVar("Wanted", RetrieveRequest, SimilarRequest)


class _Plain(APIRoute):
    """Hands requests to its endpoint as they are: it has no dependencies to resolve, and reads its body itself."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response: Response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = app


router = APIRouter(route_class=_Plain)


@router.post(
    "/v1/retrieve",
    tags=["retrieval"],
    openapi_extra=json_body(RetrieveRequest),
    responses={200: {"model": RetrieveAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def retrieve(request: Request) -> Response:
    """The best labels for each query."""
    return await _search(request, RetrieveRequest, limits.check_retrieve)


@router.post(
    "/v1/similar",
    tags=["retrieval"],
    openapi_extra=json_body(SimilarRequest),
    responses={200: {"model": SimilarAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def similar(request: Request) -> Response:
    """The labels nearest to each given label."""
    return await _search(request, SimilarRequest, limits.check_similar)


async def _search(request: Request, model: type[Wanted], check: Callable[[Wanted, Settings], None]) -> Response:
    """Read and check a request, and answer it from one release."""
    service, id_ = service_of(request), request_id(request)
    await service.admit()
    wanted = await read_body(request, model, service.settings)
    check(wanted, service.settings)
    retriever = service.retriever(wanted.release)
    return results_response(await service.search(retriever, wanted, id_), retriever.name, id_)
