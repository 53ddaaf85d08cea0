"""Bodies and answers of /v1/labels."""

from __future__ import annotations

from pydantic import BaseModel, Field, JsonValue

from longtail.serving.core.label_changes import NewLabel
from longtail.serving.core.queries import BucketName, RequestModel


class LabelsRequest(RequestModel):
    """Body of POST /v1/labels."""

    labels: list[NewLabel] = Field(min_length=1)


class LabelAnswer(BaseModel):
    """Answer of GET /v1/labels/{id}."""

    id: str
    count: int = Field(description="Training pairs.")
    log_pn: float = Field(description="Natural log of the noise ν, which λ multiplies; with a tree, of π.")
    log_popularity: float = Field(description="Natural log of the smoothed training frequency π, which μ multiplies.")
    bucket: BucketName
    bias: float | None = Field(description="The model's bias of this label in logits; null for a model without.")
    display: dict[str, JsonValue]
    release: str
    request_id: str


class LabelsAnswer(BaseModel):
    """Answer of POST /v1/labels: the labels are on disk, and in every answer from now on."""

    accepted: int
    release: str
    request_id: str


class HiddenAnswer(BaseModel):
    """Answer of DELETE /v1/labels/{id}: the label is in no answer from now on."""

    id: str
    release: str
    request_id: str
