"""Bodies and answers of /v1/labels."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from longtail.bundle.errors import describe
from longtail.serving.core.label_changes import LabelPatch, LabelPatchById, LabelToAdd
from longtail.serving.core.listing import LabelState
from longtail.serving.core.queries import MAX_IDS, BucketName, LabelId
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.bridge import LONGEST_ID, Body, at_most
from longtail.serving.settings import MOST_QUERIES, Settings


class LabelsRequest(Body):
    """Body of POST /v1/labels."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"labels": [{"id": "50", "features": {"title": "Alpha"}}]}]}
    )

    labels: list[LabelToAdd] = Field(min_length=1, max_length=MOST_QUERIES)

    def check_limits(self, settings: Settings) -> None:
        """Check the number of labels and the length of their ids."""
        at_most(len(self.labels), settings.max_queries, "labels", "labels")
        for index, label in enumerate(self.labels):
            if not 1 <= len(str(label.id)) <= LONGEST_ID:
                raise InvalidRequestError(
                    f"expected an id of 1 to {LONGEST_ID} characters, received {describe(label.id)}",
                    field=f"labels.{index}.id",
                )


class PatchRequest(LabelPatch, Body):
    """Body of PATCH /v1/labels/{id}."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"display": {"price": 9.5, "in_stock": False}}]})


class PatchesRequest(Body):
    """Body of PATCH /v1/labels."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"labels": [{"id": "50", "display": {"price": 9.5}}]}]})

    labels: list[LabelPatchById] = Field(min_length=1, max_length=MOST_QUERIES)

    def check_limits(self, settings: Settings) -> None:
        """Check the number of labels."""
        at_most(len(self.labels), settings.max_queries, "labels", "labels")


class LabelIdsRequest(Body):
    """Body of POST /v1/labels/delete and POST /v1/labels/restore."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": ["50"]}]})

    ids: list[LabelId] = Field(
        min_length=1, max_length=MAX_IDS, description="All labels change, in one write to disk, or none."
    )


class LabelAnswer(BaseModel):
    """All data of one label: the answer of GET /v1/labels/{id}, and one label of a page."""

    id: str
    count: int = Field(description="Training pairs.")
    log_pn: float = Field(description="Natural log of the noise ν, which λ multiplies; with a tree, of π.")
    log_popularity: float = Field(
        description="Natural log of the smoothed training frequency π, which μ multiplies; with a "
        "forecast, of ν·π*/π_w."
    )
    bucket: BucketName
    bias: float | None = Field(description="The model's bias of this label in logits; null for a model without.")
    display: dict[str, JsonValue]
    state: LabelState | None = Field(
        default=None,
        description="Only in a page. `visible`: a label of the release that answers may have. `hidden`: a label of the "
        "release that no answer has. `added`: a label added since.",
    )
    available: bool = Field(
        description="Whether answers may have it now, by its columns `available_from` and `available_until`."
    )
    release: str | None = Field(default=None, description="Left out in a page, which names the release itself.")
    request_id: str | None = None


class LabelPage(BaseModel):
    """Answer of GET /v1/labels: some labels, in the order of their ids."""

    labels: list[LabelAnswer]
    next_cursor: str | None = Field(
        description="`cursor` of the next page: the last id of this page; null on the last page."
    )
    release: str
    request_id: str


class LabelsAnswer(BaseModel):
    """Answer of every change of labels: the changes are on disk and apply to all later answers."""

    accepted: int = Field(description="Distinct labels.")
    release: str
    request_id: str
