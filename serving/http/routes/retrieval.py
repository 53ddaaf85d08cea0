"""Routes of retrieval: top-k labels for queries and for labels, queries for labels, and the vectors of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect

from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.bridge import BODY_ERRORS, ServiceRoute, errors
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

router = APIRouter(tags=["retrieval"], route_class=ServiceRoute, responses=errors(*BODY_ERRORS, 404))
_FLOAT32_BYTES = 4
_MOST_EMBED_BYTES = 1 << 20
"""Largest size of the vectors that one request of /v1/embed may request."""
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


@router.post("/v1/retrieve", response_model=RetrieveAnswer)
async def retrieve(request: Request, body: RetrieveRequest) -> dict[str, Any]:
    """Find the best labels for each query."""
    service: Service = request.app.state.service
    state = request.scope["state"]
    state["preview"] = body.preview
    search = service.searches.retrieve(
        body.queries, state["name"], release=body.release, preview=body.preview, answer_ids=body.answer_ids,
        unit=body.unit, arm=body.arm,
    )  # fmt: skip
    return await _while_connected(request, search)


@router.post("/v1/similar", response_model=SimilarAnswer)
async def similar(request: Request, body: SimilarRequest) -> dict[str, Any]:
    """Find the labels nearest to each given label."""
    service: Service = request.app.state.service
    state = request.scope["state"]
    state["preview"] = body.preview
    search = service.searches.similar(
        body, state["name"], release=body.release, preview=body.preview, answer_ids=body.answer_ids
    )
    return await _while_connected(request, search)


@router.post("/v1/queries", response_model=QueriesAnswer)
async def queries(request: Request, body: QueriesRequest) -> dict[str, Any]:
    """Find the known queries that are likeliest to choose each given label.

    The request waits in the queue of searches. No figures of answers include it.
    """
    service: Service = request.app.state.service
    return await _while_connected(request, service.searches.find_queries(body, release=body.release))


@router.post("/v1/embed", response_model=EmbedAnswer)
async def embed(request: Request, body: EmbedRequest) -> dict[str, Any]:
    """Compute the vectors of queries (u, by the query tower) or of labels (v).

    The request waits in the queue of searches, where a vector counts as a query. No figures of answers include it.
    """
    service: Service = request.app.state.service
    retriever = service.retriever(body.release)
    manifest = retriever.manifest
    if body.count * manifest.dim * _FLOAT32_BYTES > _MOST_EMBED_BYTES:
        raise InvalidRequestError(
            f"expected vectors of at most {_MOST_EMBED_BYTES} bytes together, received "
            f"{body.count} to make of {manifest.dim} numbers, 4 bytes each",
            field="queries" if body.labels is None else "labels",
        )
    vectors = await _while_connected(request, service.searches.embed(body, retriever))
    described = {"dim": manifest.dim, "similarity": manifest.similarity, "temperature": manifest.temperature}
    return {"vectors": vectors, **described, "release": retriever.name}
