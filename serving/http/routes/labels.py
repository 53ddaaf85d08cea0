"""Routes of the catalogue: show labels, and add, change, hide or restore them while serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.serving.core.label_changes import (
    LabelPatchById,
    records_to_add,
    records_to_hide,
    records_to_patch,
    records_to_restore,
)
from longtail.serving.core.listing import LabelListing, list_labels
from longtail.serving.core.queries import LabelId
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.auth import require_admin
from longtail.serving.http.requests import RequestRoute, errors, json_body, query_parameters, read_body, read_parameters
from longtail.serving.http.responses import json_response, service_of
from longtail.serving.http.schemas.labels import (
    LabelAnswer,
    LabelIdsRequest,
    LabelPage,
    LabelsAnswer,
    LabelsRequest,
    PatchesRequest,
    PatchRequest,
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
    """List the release's labels, hidden ones included, and added labels, by pages in order of ids.

    A label that exists all the time is listed exactly once, even if labels are added or hidden, or the release is
    swapped, between two pages.
    """
    service = service_of(request)
    asked = read_parameters(request, LabelListing)
    if "limit" in asked.model_fields_set and asked.limit > (most := service.settings.max_k):
        raise InvalidRequestError(f"expected limit <= {most}, received {describe(asked.limit)}", field="limit")
    retriever = service.retriever()
    page = await service.read(lambda: list_labels(retriever, asked))
    return json_response(request, {**page, "release": retriever.name})


@router.get(
    "/v1/labels/{id:path}", openapi_extra=_LABEL, responses={200: {"model": LabelAnswer}, **errors(401, 404, 503)}
)
async def label(request: Request) -> Response:
    """Show all data of one label; its id may contain slashes."""
    id, retriever = request.path_params["id"], service_of(request).retriever()
    return json_response(request, {**retriever.label(id), "release": retriever.name})


@router.post(
    "/v1/labels",
    openapi_extra=json_body(LabelsRequest, {"labels": [{"id": "50", "features": {"title": "Alpha"}}]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def add_labels(request: Request) -> Response:
    """Add labels, or embed known ones again, which also brings hidden ones back. Admin.

    When the response arrives, the labels are on disk and in every answer of this process; other workers follow a tenth
    of a second later. `longtail-index merge` adds them to the bundle for the next build.
    """
    require_admin(request)
    body = await read_body(request, LabelsRequest)
    return await _change(request, [str(label.id) for label in body.labels], partial(records_to_add, body.labels))


@router.post(
    "/v1/labels/delete",
    openapi_extra=json_body(LabelIdsRequest, {"ids": ["50"]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def hide_labels(request: Request) -> Response:
    """Delete or hide many labels in one write, all or none; see DELETE. Admin."""
    require_admin(request)
    ids = (await read_body(request, LabelIdsRequest)).ids
    return await _change(request, ids, partial(records_to_hide, ids))


@router.post(
    "/v1/labels/restore",
    openapi_extra=json_body(LabelIdsRequest, {"ids": ["50"]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def restore_labels(request: Request) -> Response:
    """Restore many hidden labels in one write, all or none. Admin."""
    require_admin(request)
    ids = (await read_body(request, LabelIdsRequest)).ids
    return await _change(request, ids, partial(records_to_restore, ids))


@router.patch(
    "/v1/labels",
    openapi_extra=json_body(PatchesRequest, {"labels": [{"id": "50", "display": {"price": 9.5}}]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def patch_labels(request: Request) -> Response:
    """Change columns of many labels in one write, all or none; see PATCH of one label. Admin."""
    require_admin(request)
    labels = (await read_body(request, PatchesRequest)).labels
    return await _change(request, [label.id for label in labels], partial(records_to_patch, labels))


@router.patch(
    "/v1/labels/{id:path}",
    openapi_extra=_LABEL | json_body(PatchRequest, {"display": {"price": 9.5, "in_stock": False}}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def patch_label(request: Request) -> Response:
    """Change columns of a label, such as its price or availability; nothing is embedded. Admin.

    Answers show the new values and filters use them, until a release with newer data is served, or one that contains
    the changes (`longtail-index merge`). Hidden labels are refused.
    """
    require_admin(request, labels=[request.path_params["id"]])
    patch = await read_body(request, PatchRequest)
    one = LabelPatchById(id=request.path_params["id"], display=patch.display)
    return await _change(request, [one.id], partial(records_to_patch, [one]))


@router.delete(
    "/v1/labels/{id:path}",
    openapi_extra=_LABEL,
    responses={200: {"model": LabelsAnswer}, **errors(401, 403, 404, 429, 503)},
)
async def hide_label(request: Request) -> Response:
    """Delete an added label, or hide a label of the release; no later answer has it. Admin."""
    ids = [request.path_params["id"]]
    require_admin(request, labels=ids)
    return await _change(request, ids, partial(records_to_hide, ids))


async def _change(
    request: Request, ids: Sequence[LabelId], change: Callable[[Retriever], Sequence[LabelRecord]]
) -> Response:
    request.state.audited["labels"] = distinct = list(dict.fromkeys(map(str, ids)))
    release = await service_of(request).change_labels(change)
    return json_response(request, {"accepted": len(distinct), "release": release})
