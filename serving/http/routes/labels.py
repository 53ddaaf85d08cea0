"""The catalogue: what the release knows of a label, and labels added, hidden or brought back while it serves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from longtail.serving.core.label_changes import record_to_hide, records_to_add
from longtail.serving.http import limits
from longtail.serving.http.auth import require_admin
from longtail.serving.http.body import read_body
from longtail.serving.http.openapi import errors, json_body
from longtail.serving.http.responses import json_response, request_id, service_of, to_json
from longtail.serving.http.schemas.labels import HiddenAnswer, LabelAnswer, LabelsAnswer, LabelsRequest


class _LabelIdRoute(APIRoute):
    """Takes an id with line breaks, too: Starlette's `path` ends before one, and names another label."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.path_regex = re.compile(self.path_regex.pattern, re.DOTALL)


LabelPath = Annotated[str, Path(examples=["50"])]

router = APIRouter(tags=["catalogue"], route_class=_LabelIdRoute)


@router.get("/v1/labels/{id:path}", responses={200: {"model": LabelAnswer}, **errors(401, 404, 503)})
async def label(request: Request, id: LabelPath) -> Response:
    """What the release knows about one label; its id may hold slashes."""
    retriever = service_of(request).retriever()
    return json_response(to_json({**retriever.label(id), "release": retriever.name}, request_id(request)))


@router.post(
    "/v1/labels",
    openapi_extra=json_body(LabelsRequest, {"labels": [{"id": "50"}]}),
    responses={200: {"model": LabelsAnswer}, **errors(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)},
)
async def add_labels(request: Request) -> Response:
    """Add labels, embed known ones anew, bring hidden ones back. Admin.

    They are on disk and in every answer of this process when the answer comes, in those of other workers a tenth
    of a second later. The next rebuild takes them in (`longtail-index merge`).
    """
    require_admin(request)
    service = service_of(request)
    body = await read_body(request.scope, request.receive, LabelsRequest, service.settings)
    limits.check_labels(body, service.settings)
    request.state.audited["labels"] = [label.id for label in body.labels]
    release = await service.change(
        lambda: service.change_labels(lambda retriever: records_to_add(body.labels, retriever))
    )
    return json_response(to_json({"accepted": len(body.labels), "release": release}, request_id(request)))


@router.delete("/v1/labels/{id:path}", responses={200: {"model": HiddenAnswer}, **errors(401, 403, 404, 429, 503)})
async def hide_label(request: Request, id: LabelPath) -> Response:
    """Delete an added label, or hide one of the catalogue; it is in no answer from now on. Admin."""
    require_admin(request, labels=[id])
    service = service_of(request)
    release = await service.change(lambda: service.change_labels(lambda retriever: [record_to_hide(id, retriever)]))
    return json_response(to_json({"id": id, "release": release}, request_id(request)))
