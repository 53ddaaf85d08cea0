"""What clients send and get back. Requests are validated by these models; answers are documented by them.

Strict: a number is never read out of a string, and an unknown key is an error, so that a typo cannot
silently turn into a default.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from bundle import BiasRemoval, Buckets, Loss

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


class RetrieveRequest(_Request):
    """Body of POST /v1/retrieve."""

    queries: list[Query] = Field(min_length=1)


class SimilarRequest(Selection):
    """Body of POST /v1/similar: one label's id, or several in `ids`."""

    id: LabelId | None = None
    ids: list[LabelId] | None = Field(default=None, min_length=1)

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
