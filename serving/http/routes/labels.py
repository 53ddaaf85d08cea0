"""Routes of the catalogue: show labels, and add, change, hide or restore them while serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request

from longtail.bundle import LabelRecord
from longtail.bundle.errors import describe
from longtail.serving.core.label_changes import (
    LabelPatchById,
    create_hides,
    create_patches,
    create_restores,
    create_upserts,
)
from longtail.serving.core.listing import LabelListing, list_labels
from longtail.serving.core.queries import LabelId
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.auth import require_admin
from longtail.serving.http.bridge import BODY_ERRORS, ServiceRoute, errors
from longtail.serving.http.schemas.labels import (
    LabelAnswer,
    LabelIdsRequest,
    LabelPage,
    LabelsAnswer,
    LabelsRequest,
    PatchesRequest,
    PatchRequest,
)

router = APIRouter(tags=["catalogue"], route_class=ServiceRoute)
_CHANGES: dict[str, Any] = {
    "response_model": LabelsAnswer,
    "dependencies": [Depends(require_admin)],
    "responses": errors(*BODY_ERRORS, 403, 404),
}
_Id = Annotated[str, Path(examples=["50"])]


@router.get("/v1/labels", response_model=LabelPage, responses=errors(401, 422, 429, 503))
async def labels(request: Request, listing: Annotated[LabelListing, Query()]) -> dict[str, Any]:
    """List the release's labels, hidden ones included, and added labels, by pages in order of ids.

    A label that exists all the time is listed exactly once, even if labels are added or hidden, or the release is
    swapped, between two pages.
    """
    service: Service = request.app.state.service
    if "limit" in listing.model_fields_set and listing.limit > (most := service.settings.max_k):
        raise InvalidRequestError(f"expected limit <= {most}, received {describe(listing.limit)}", field="limit")
    retriever = service.retriever()
    page = await service.read(lambda: list_labels(retriever, listing))
    return {**page, "release": retriever.name}


@router.get("/v1/labels/{id:path}", response_model=LabelAnswer, responses=errors(401, 404, 503))
async def label(request: Request, id: _Id) -> dict[str, Any]:
    """Show all data of one label; its id may contain slashes."""
    retriever = request.app.state.service.retriever()
    return {**retriever.label(id), "release": retriever.name}


@router.post("/v1/labels", **_CHANGES)
async def add_labels(request: Request, body: LabelsRequest) -> dict[str, Any]:
    """Add labels, or embed known ones again, which also brings hidden ones back. Admin.

    When the response arrives, the labels are on disk and in every answer of this process; other workers follow a tenth
    of a second later. `longtail-index merge` adds them to the bundle for the next build.
    """
    return await _change(request, [str(label.id) for label in body.labels], partial(create_upserts, body.labels))


@router.post("/v1/labels/delete", **_CHANGES)
async def hide_labels(request: Request, body: LabelIdsRequest) -> dict[str, Any]:
    """Delete or hide many labels in one write, all or none; see DELETE. Admin."""
    return await _change(request, body.ids, partial(create_hides, body.ids))


@router.post("/v1/labels/restore", **_CHANGES)
async def restore_labels(request: Request, body: LabelIdsRequest) -> dict[str, Any]:
    """Restore many hidden labels in one write, all or none. Admin."""
    return await _change(request, body.ids, partial(create_restores, body.ids))


@router.patch("/v1/labels", **_CHANGES)
async def patch_labels(request: Request, body: PatchesRequest) -> dict[str, Any]:
    """Change columns of many labels in one write, all or none; see PATCH of one label. Admin."""
    return await _change(request, [label.id for label in body.labels], partial(create_patches, body.labels))


@router.patch("/v1/labels/{id:path}", **_CHANGES)
async def patch_label(request: Request, id: _Id, body: PatchRequest) -> dict[str, Any]:
    """Change columns of a label, such as its price or availability; nothing is embedded. Admin.

    Answers show the new values and filters use them, until a release with newer data is served, or one that contains
    the changes (`longtail-index merge`). Hidden labels are refused.
    """
    return await _change(request, [id], partial(create_patches, [LabelPatchById(id=id, display=body.display)]))


@router.delete("/v1/labels/{id:path}", **_CHANGES | {"responses": errors(401, 403, 404, 429, 503)})
async def hide_label(request: Request, id: _Id) -> dict[str, Any]:
    """Delete an added label, or hide a label of the release; no later answer has it. Admin."""
    return await _change(request, [id], partial(create_hides, [id]))


async def _change(
    request: Request, ids: Sequence[LabelId], change: Callable[[Retriever], Sequence[LabelRecord]]
) -> dict[str, Any]:
    request.state.audited["labels"] = distinct = list(dict.fromkeys(map(str, ids)))
    return {"accepted": len(distinct), "release": await request.app.state.service.change_labels(change)}
