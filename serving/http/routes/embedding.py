"""Vectors of queries and labels."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.types import Receive, Scope

from longtail.serving.core.service import Service
from longtail.serving.http import limits
from longtail.serving.http.body import read_body
from longtail.serving.http.direct import DirectRoute
from longtail.serving.http.openapi import errors, json_body
from longtail.serving.http.schemas.retrieval import EmbedAnswer, EmbedRequest

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/embed",
    tags=["retrieval"],
    openapi_extra=json_body(EmbedRequest, {"queries": [{"features": {"user_id": "42"}}]}),
    responses={200: {"model": EmbedAnswer}, **errors(400, 401, 404, 408, 413, 415, 422, 429, 503)},
)
async def embed(service: Service, scope: Scope, receive: Receive) -> bytes:
    """The vectors of queries, by the query tower, or of labels: u or v of the scores.

    It waits with searches and counts as they do: a vector as a query. It is in no figure of what was answered.
    """
    body = await read_body(scope, receive, EmbedRequest, service.settings)
    retriever = service.retriever(body.release)
    manifest = retriever.manifest
    limits.check_embed(body, service.settings, manifest.dim)
    vectors = await service.embed(retriever, body)
    described = {"dim": manifest.dim, "similarity": manifest.similarity, "temperature": manifest.temperature}
    rest = orjson.dumps({**described, "release": retriever.name, "request_id": scope["state"]["request_id"]})
    return b'{"vectors":[%b],%b' % (b",".join(vectors), rest[1:])
