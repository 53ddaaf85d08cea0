"""The catalogue: what the release knows of a label, and labels added, hidden or brought back while it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.serving.core.label_changes import records_to_add, records_to_hide, records_to_restore
from longtail.serving.core.listing import LabelListing
from longtail.serving.core.queries import LabelId
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.auth import require_admin
from longtail.serving.http.requests import RequestRoute, errors, json_body, query_parameters, read_body, read_parameters
from longtail.serving.http.responses import json_response, service_of
from longtail.serving.http.schemas.labels import (
    HiddenAnswer,
    LabelAnswer,
    LabelIdsRequest,
    LabelPage,
    LabelsAnswer,
    LabelsRequest,
)

router = APIRouter(tags=["catalogue"], route_class=RequestRoute)
_LABEL = {
    "parameters": [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "examples": ["50"], "title": "Id"}}
    ]
}


@router.get(
    "/v1/labels",
    openapi_extra=query_parameters(LabelListing),
    responses={200: {"model": LabelPage}, **errors(401, 422, 429, 503)},
)
async def labels(request: Request) -> Response:
    """Page by page the labels of the release, hidden ones too, and those added since, in the order of their ids.

    Whatever is added, hidden or swapped between two pages, a label that is there all the while comes exactly once.
    """
    service = service_of(request)
    asked = read_parameters(request, LabelListing)
    if "limit" in asked.model_fields_set and asked.limit > (most := service.settings.max_k):
        raise InvalidRequestError(f"expected limit <= {most}, received {describe(asked.limit)}", field="limit")
    retriever = service.retriever()
    page = await service.read(lambda: retriever.list_labels(asked))
    answer = {"labels": page.labels, "next_cursor": page.next_cursor, "release": retriever.name}
    return json_response(request, answer)


@router.get(
    "/v1/labels/{id:path}", openapi_extra=_LABEL, responses={200: {"model": LabelAnswer}, **errors(401, 404, 503)}
)
async def label(request: Request) -> Response:
    """What the release knows about one label; its id may hold slashes."""
    id, retriever = request.path_params["id"], service_of(request).retriever()
    return json_response(request, {**retriever.label(id), "release": retriever.name})


@router.post(
    "/v1/labels",
    openapi_extra=json_body(LabelsRequest, {"labels": [{"id": "50", "features": {"title": "Alpha"}}]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def add_labels(request: Request) -> Response:
    """Add labels, or embed known ones anew, which also brings hidden ones back. Admin.

    They are on disk and in every answer of this process when the answer comes, in those of other workers a tenth
    of a second later. The next rebuild takes them in (`longtail-index merge`).
    """
    require_admin(request)
    service = service_of(request)
    body = await read_body(request, LabelsRequest)
    request.state.audited["labels"] = [label.id for label in body.labels]
    release = await service.change(
        lambda: service.change_labels(lambda retriever: records_to_add(body.labels, retriever))
    )
    return json_response(request, {"accepted": len(body.labels), "release": release})


@router.post(
    "/v1/labels/delete",
    openapi_extra=json_body(LabelIdsRequest, {"ids": ["50"]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def hide_labels(request: Request) -> Response:
    """Delete or hide many labels, as DELETE does one: all in one write to disk, or none. Admin."""
    return await _change_all(request, records_to_hide)


@router.post(
    "/v1/labels/restore",
    openapi_extra=json_body(LabelIdsRequest, {"ids": ["50"]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def restore_labels(request: Request) -> Response:
    """Bring many hidden labels back: all in one write to disk, or none. Admin."""
    return await _change_all(request, records_to_restore)


@router.delete(
    "/v1/labels/{id:path}",
    openapi_extra=_LABEL,
    responses={200: {"model": HiddenAnswer}, **errors(401, 403, 404, 429, 503)},
)
async def hide_label(request: Request) -> Response:
    """Delete an added label, or hide one of the catalogue; it is in no answer from now on. Admin."""
    id = request.path_params["id"]
    require_admin(request, labels=[id])
    service = service_of(request)
    release = await service.change(lambda: service.change_labels(lambda retriever: records_to_hide([id], retriever)))
    return json_response(request, {"id": id, "release": release})


async def _change_all(
    request: Request, change: Callable[[Sequence[LabelId], Retriever], Sequence[LabelRecord]]
) -> Response:
    """Hide or restore the labels of a body of ids."""
    require_admin(request)
    service = service_of(request)
    body = await read_body(request, LabelIdsRequest)
    ids = list(dict.fromkeys(map(str, body.ids)))
    request.state.audited["labels"] = ids
    release = await service.change(lambda: service.change_labels(lambda retriever: change(body.ids, retriever)))
    return json_response(request, {"accepted": len(ids), "release": release})
