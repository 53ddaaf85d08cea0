"""Routes of retrieval: top-k labels for queries and for labels, queries for labels, and the vectors of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from longtail.serving.core.service import Search
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.requests import RequestRoute, errors, json_body, read_body
from longtail.serving.http.responses import json_response, service_of
from longtail.serving.http.schemas.retrieval import (
    EmbedAnswer,
    EmbedRequest,
    QueriesAnswer,
    QueriesRequest,
    RetrieveAnswer,
    RetrieveRequest,
    SimilarAnswer,
    SimilarRequest,
)

router = APIRouter(tags=["retrieval"], route_class=RequestRoute)
_ERRORS = errors(400, 401, 404, 408, 413, 415, 422, 429, 503)
_FLOAT32_BYTES = 4
Result = TypeVar("Result")
_WATCHED_FROM_SECONDS = 0.05
"""Duration from which a request is watched for its client hanging up; most searches end sooner."""


async def _while_connected(request: Request, search: Awaitable[Result]) -> Result:
    """Await a search; cancel it when its client hangs up.

    Raises:
        ClientDisconnect: the client has hung up.
    """
    task, loop, hung_up = asyncio.current_task(), asyncio.get_running_loop(), False
    watching: list[asyncio.Task[None]] = []

    async def watch() -> None:
        nonlocal hung_up
        while (await request.receive())["type"] != "http.disconnect":
            pass
        hung_up = True
        if task is not None:
            task.cancel()

    timer = loop.call_later(_WATCHED_FROM_SECONDS, lambda: watching.append(loop.create_task(watch())))
    try:
        return await search
    except asyncio.CancelledError:
        if not hung_up:
            raise
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        for watcher in watching:
            watcher.cancel()


@router.post(
    "/v1/retrieve",
    openapi_extra=json_body(RetrieveRequest, {"queries": [{"features": {"user_id": "42"}, "k": 10}]}),
    responses={200: {"model": RetrieveAnswer}, **_ERRORS},
)
async def retrieve(request: Request) -> Response:
    """Find the best labels for each query."""
    service, state, body = service_of(request), request.scope["state"], await read_body(request, RetrieveRequest)
    state["preview"] = body.preview
    search = service.retrieve(
        body.queries, state["name"], release=body.release, preview=body.preview, answer_ids=body.answer_ids,
        unit=body.unit, arm=body.arm,
    )  # fmt: skip
    results, release = await _while_connected(request, search)
    return json_response(request, {"results": results, "release": release})


@router.post(
    "/v1/similar",
    openapi_extra=json_body(SimilarRequest, {"id": "50", "k": 10}),
    responses={200: {"model": SimilarAnswer}, **_ERRORS},
)
async def similar(request: Request) -> Response:
    """Find the labels nearest to each given label."""
    service, state, body = service_of(request), request.scope["state"], await read_body(request, SimilarRequest)
    state["preview"], options = body.preview, [body] * len(body.labels)
    retriever = service.retriever(body.release)
    search = service.search(Search(retriever, options, None, state["name"], body.preview, body.answer_ids))
    results = await _while_connected(request, search)
    return json_response(request, {"results": results, "release": retriever.name})


@router.post(
    "/v1/queries",
    openapi_extra=json_body(QueriesRequest, {"id": "50", "k": 100, "filter": {"country": "AT"}}),
    responses={200: {"model": QueriesAnswer}, **_ERRORS},
)
async def queries(request: Request) -> Response:
    """Find the known queries that are likeliest to choose each given label.

    The request waits in the queue of searches. No figures of answers include it.
    """
    service, body = service_of(request), await read_body(request, QueriesRequest)
    retriever = service.retriever(body.release)
    search = Search(retriever, [body] * max(1, len(body.labels)), name=request.scope["state"]["name"], preview=True)
    results = await _while_connected(request, service.search(search))
    return json_response(request, {"results": results, "release": retriever.name})


@router.post(
    "/v1/embed",
    openapi_extra=json_body(EmbedRequest, {"queries": [{"features": {"user_id": "42"}}]}),
    responses={200: {"model": EmbedAnswer}, **_ERRORS},
)
async def embed(request: Request) -> Response:
    """Compute the vectors of queries (u, by the query tower) or of labels (v).

    The request waits in the queue of searches, where a vector counts as a query. No figures of answers include it.
    """
    service, body = service_of(request), await read_body(request, EmbedRequest)
    retriever, limit = service.retriever(body.release), service.settings.max_embed_bytes
    manifest = retriever.manifest
    if body.count * manifest.dim * _FLOAT32_BYTES > limit:
        raise InvalidRequestError(
            f"expected vectors of at most {limit} bytes together, received "
            f"{body.count} to make of {manifest.dim} numbers, 4 bytes each",
            field="queries" if body.labels is None else "labels",
        )
    vectors = await _while_connected(request, service.search(Search(retriever, embed=body, preview=True)))
    described = {"dim": manifest.dim, "similarity": manifest.similarity, "temperature": manifest.temperature}
    return json_response(request, {"vectors": vectors, **described, "release": retriever.name})
