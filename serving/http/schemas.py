"""What clients send and get back. Requests are validated by these models; answers are documented by them.

Strict: a number is never read out of a string, and an unknown key is an error, so that a typo cannot
silently turn into a default.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from longtail.bundle import BiasRemoval, Buckets, Loss

BucketName = Literal["head", "torso", "tail"]


class _StringOrInteger:
    """One error for a wrong id, instead of one for each type that it is not."""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.union_schema(
            [core_schema.str_schema(strict=True), core_schema.int_schema(strict=True)],
            mode="left_to_right",
            custom_error_type="id_type",
            custom_error_message="Input should be an id (a string or an integer)",
        )


LabelId = Annotated[str | int, _StringOrInteger()]
"""A label's id; `1` and `"1"` are the same label."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Selection(_Request):
    """Which labels may be answered, how many, and how much head/tail bias is removed."""

    k: int = Field(default=10, ge=1, description="Labels wanted; fewer come back when fewer are eligible.")
    bias_removal: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="λ of `u·v/T + b + λ·log p_n`: 0 favours the tail, 1 removes the sampling bias. "
        "Null: the release's default (0 for /v1/similar). GET /v1/release says which p_n in `proposal`.",
    )
    exclude: list[LabelId] = Field(default=[], description="Labels never to answer; unknown ones are counted.")
    allow: list[LabelId] | None = Field(
        default=None, description="If given, only these labels may be answered; unknown ones are counted."
    )
    buckets: list[BucketName] | None = Field(
        default=None, min_length=1, description="If given, only labels of these frequency buckets may be answered."
    )


class Query(Selection):
    """One query: its features by name, as GET /v1/release lists them; null or absent means missing."""

    features: dict[str, JsonValue]


_RELEASE = Field(
    default=None, max_length=128, description="Answer from this release, if it is loaded still. Null: the current one."
)
_PREVIEW = Field(default=False, description="Nobody will see the answer: leave it out of exposure, drift and recall.")


class RetrieveRequest(_Request):
    """Body of POST /v1/retrieve."""

    queries: list[Query] = Field(min_length=1)
    release: str | None = _RELEASE
    preview: bool = _PREVIEW


class SimilarRequest(Selection):
    """Body of POST /v1/similar: one label's id, or several in `ids`."""

    id: LabelId | None = None
    ids: list[LabelId] | None = Field(default=None, min_length=1)
    release: str | None = _RELEASE
    preview: bool = _PREVIEW

    @property
    def labels(self) -> list[str | int]:
        """The ids asked about, in order."""
        if self.ids is not None:
            return self.ids
        return [] if self.id is None else [self.id]

    @model_validator(mode="after")
    def _one_of_id_and_ids(self) -> Self:
        if (self.id is None) == (self.ids is None):
            received = "neither" if self.id is None else "both"
            raise PydanticCustomError(
                "id_or_ids", "expected either id or ids, received {received}", {"received": received}
            )
        return self


class NewLabel(_Request):
    """A label to add, or to embed anew; one that is hidden comes back by its id alone."""

    id: LabelId
    features: dict[str, JsonValue] | None = Field(
        default=None, description="By name, as the label tower takes them; null or absent means missing."
    )
    display: dict[str, JsonValue] = Field(default={}, description="Columns shown with the label: title, …")

    @model_validator(mode="after")
    def _nothing_beside_the_id(self) -> Self:
        if self.features is None and self.display:
            raise PydanticCustomError("display_alone", "expected features beside display, received none")
        return self


class LabelsRequest(_Request):
    """Body of POST /v1/labels."""

    labels: list[NewLabel] = Field(min_length=1)


class Event(_Request):
    """What somebody chose: after an answer (`request_id`), or on their own (`features`)."""

    labels: list[LabelId] = Field(min_length=1, description="The labels chosen, whether they were answered or not.")
    request_id: str | None = Field(default=None, min_length=1, max_length=128, description="Of the answer.")
    query: int = Field(default=0, ge=0, description="Place of the query in that request.")
    features: dict[str, JsonValue] | None = Field(
        default=None, description="Query features of an organic choice: retrieved and scored without being shown."
    )
    bias_removal: float | None = Field(default=None, allow_inf_nan=False, description="λ of that retrieval.")
    exclude: list[LabelId] = Field(default=[], description="Labels that retrieval leaves out, such as seen ones.")

    @model_validator(mode="after")
    def _one_of_request_id_and_features(self) -> Self:
        if (self.request_id is None) == (self.features is None):
            received = "neither" if self.features is None else "both"
            raise PydanticCustomError(
                "request_or_features", "expected either request_id or features, received {received}",
                {"received": received},
            )  # fmt: skip
        form, others = (
            ("features", {"query"}) if self.request_id is None else ("request_id", {"bias_removal", "exclude"})
        )
        if others & self.model_fields_set:
            raise PydanticCustomError(
                "request_or_features", "expected no {keys} beside {form}, received some",
                {"keys": " and ".join(sorted(others & self.model_fields_set)), "form": form},
            )  # fmt: skip
        return self


class FeedbackRequest(_Request):
    """Body of POST /v1/feedback."""

    events: list[Event] = Field(min_length=1)


class RankedLabel(BaseModel):
    """One label of an answer."""

    id: str
    score: float = Field(description="s_λ = u·v/T + b + λ·log p_n, in logits.")
    bucket: BucketName
    display: dict[str, JsonValue] = Field(description="The columns that came with the labels: title, …")


class UnknownIds(BaseModel):
    """How many ids of the request the release does not know; they were ignored."""

    exclude: int
    allow: int


class RetrieveResult(BaseModel):
    """The answer to one query, best label first."""

    labels: list[RankedLabel]
    bias_removal: float
    unknown: UnknownIds


class RetrieveAnswer(BaseModel):
    """Answer of POST /v1/retrieve; every result comes from the one release that is named."""

    results: list[RetrieveResult]
    release: str
    request_id: str


class SimilarResult(RetrieveResult):
    """The labels nearest to label `id`, itself left out."""

    id: str


class SimilarAnswer(BaseModel):
    """Answer of POST /v1/similar."""

    results: list[SimilarResult]
    release: str
    request_id: str


class LabelAnswer(BaseModel):
    """Answer of GET /v1/labels/{id}."""

    id: str
    count: int = Field(description="Training pairs.")
    log_pn: float = Field(description="Natural log of the smoothed training frequency.")
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


class FeedbackAnswer(BaseModel):
    """Answer of POST /v1/feedback: the events are on disk."""

    accepted: int
    request_id: str


class ReloadAnswer(BaseModel):
    """Answer of POST /v1/release/reload."""

    release: str
    changed: bool
    request_id: str


class ExpectedFeature(BaseModel):
    """One feature that a query may carry."""

    name: str
    kind: Literal["id", "history", "bag", "text", "number"]
    expects: str
    max_length: int | None = Field(description="Entries that are read; of a longer list, the last ones.")


class ReleaseAnswer(BaseModel):
    """Answer of GET /v1/release."""

    name: str
    created_at: datetime
    model: str
    labels: int
    dim: int
    similarity: Literal["dot", "cosine"]
    temperature: float
    loss: Loss
    bias_removal: BiasRemoval
    buckets: Buckets
    proposal: str = Field(
        description="Which log p_n `bias_removal` multiplies in /v1/retrieve: `label frequencies`, or "
        "`p_n(y|x), a tree of depth N`, which depends on the query's features. In /v1/similar: always the former."
    )
    query_features: list[ExpectedFeature]
    example: dict[str, JsonValue] = Field(description="Features of a valid query, to copy and change.")
    request_id: str


class Share(BaseModel):
    """What one bucket got."""

    count: int
    share: float | None
    coverage: float = Field(description="Share of the bucket's labels that were answered at all.")


class Recall(BaseModel):
    """Of the labels chosen, how many were answered, with a 95 % Wilson interval."""

    positives: int
    hits: int
    value: float | None
    low: float | None
    high: float | None


class Scores(BaseModel):
    """Scores answered, by the baseline's deciles."""

    counts: list[int]


class Drift(BaseModel):
    """Population stability index against the baseline; null for too few labels or without a baseline."""

    buckets: float | None
    scores: float | None


class Load(BaseModel):
    """Requests for labels."""

    count: int
    per_second: float
    p50_ms: float | None
    p99_ms: float | None
    shed: int
    errors: int


class Window(BaseModel):
    """Figures of the release being served over the last so many seconds."""

    seconds: int
    queries: int
    bias_removal: float | None = Field(description="Mean λ.")
    exposures: dict[BucketName, Share]
    coverage: float
    gini: float | None
    popularity: float | None = Field(description="Mean training pairs of the answered labels.")
    scores: Scores
    psi: Drift
    recall: dict[Literal["feedback", "shadow"], dict[Literal["head", "torso", "tail", "all"], Recall]]
    requests: Load


class MonitoringAnswer(BaseModel):
    """Answer of GET /v1/monitoring."""

    release: str
    since: datetime
    now: datetime
    baseline: dict[str, JsonValue] | None = Field(
        description="What held-out queries are answered: bias_removal, k, shares, popularity, scores."
    )
    windows: dict[Literal["5m", "1h", "24h"], Window]
    series: dict[str, JsonValue] = Field(description="By minute, oldest first, over all releases.")
    releases: list[dict[str, JsonValue]] = Field(description="What served when: name, from, until.")
    labels: dict[Literal["added", "hidden"], int]
    request_id: str


class HealthAnswer(BaseModel):
    """Answer of /livez and /readyz."""

    status: Literal["alive", "ready"]


class ErrorDetail(BaseModel):
    """What was wrong."""

    type: str = Field(description="Stable name of the kind of error.")
    message: str = Field(description="What was expected and what was received.")
    field: str | None = Field(
        default=None, description="Dotted path such as `queries.0.k`; absent if none is at fault."
    )


class ErrorAnswer(BaseModel):
    """Every answer whose status is 4xx or 5xx."""

    error: ErrorDetail
    request_id: str
