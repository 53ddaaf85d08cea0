"""Define the answers of /v1/release and the probes, and the shape of errors."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from longtail.bundle import BiasRemoval, Buckets, CurvePoint, FeatureKind, Loss, Popularity
from longtail.bundle.filterable import FilterKind
from longtail.serving.core.queries import RequestModel


class ReloadAnswer(BaseModel):
    """Answer of POST /v1/release/reload."""

    release: str
    changed: bool
    request_id: str


class ExpectedFeature(BaseModel):
    """One feature that a query may have."""

    name: str
    kind: FeatureKind
    expects: str
    max_length: int | None = Field(description="Number of entries that are read, the last of a longer list.")
    dims: int | None = Field(description="Numbers in a vector; null for other kinds.")


class ReleaseExposure(BaseModel):
    """What the prior `exposed` knows of the service's answers."""

    half_life: str = Field(description="Time in which a place in an answer loses half its weight.")
    until: float | None = Field(
        description="Time of the newest answers that count, in seconds since 1970; null: none so far, and the prior of "
        "every label is 0."
    )
    mean: float = Field(description="Decayed places in answers of an average label.")


class ReleasePrior(BaseModel):
    """A prior of the release, and the weights that requests may give it in `priors`."""

    name: str
    minimum: float
    default: float
    maximum: float
    exposure: ReleaseExposure | None = Field(description="Only for the prior `exposed`; null for priors of a table.")


class ReleaseBonus(Popularity):
    """A bonus β of labels: its default, its limits, and the filter of labels that get it."""

    filter: dict[str, JsonValue] = Field(default={}, description="Empty for the bonus of a bucket.")


class ReleaseSlope(Popularity):
    """A column of numbers: the weights that a request may give it, in logits per unit."""

    origin: float = Field(description="The column's median, at which it adds nothing.")


class ReleaseDecay(BaseModel):
    """A column of dates by which scores may decay."""

    half_life: str = Field(description="Shortest half-life at weight 1; at weight w, w times as long.")


class FilterableColumn(BaseModel):
    """One display column that requests may filter labels by."""

    name: str
    kind: FilterKind = Field(description="Type in which values are compared; `strings` are lists of strings.")
    operators: list[str]


class ReleaseQueries(BaseModel):
    """The index of known queries that /v1/queries searches."""

    count: int
    bias_removal: list[float] = Field(description="The λ at which queries can be compared.")
    filterable: list[FilterableColumn] = Field(description="Columns of queries that `filter` of a request may name.")


class ReleaseCooccurrence(Popularity):
    """The dial ω: its default and limits, and how c is computed from a history."""

    default: float
    minimum: float
    maximum: float
    kind: Literal["walk", "cosine", "next"] = Field(
        description="`walk` and `cosine`: chosen by the same queries; `next`: chosen soon after."
    )
    last: int = Field(description="Number of last entries of a history that count.")
    decay: float = Field(description="Weight of each entry relative to the next newer one.")
    query_id: str | None = Field(
        description="Feature with the id of a query whose last labels the release remembers, for requests "
        "without a history. Null: it remembers none."
    )


class ReleaseForecast(BaseModel):
    """The forecast of popularity that `popularity` of a request multiplies."""

    kind: Literal["decayed", "forecast"]
    served: Literal["decayed", "forecast", "released"] = Field(
        description="The kind that made the latest pairs likeliest, which is served. `released`: the forecast as "
        "before its first refresh."
    )
    until: float = Field(description="Time of the last pair that the forecast knows, in seconds since 1970.")
    horizon: float = Field(description="Length of the forecast period after `until`, in seconds.")
    nats: dict[str, float] = Field(
        description="Mean log-probability of the latest pairs under the prior before them, by kind: count, decayed, "
        "forecast, released."
    )


class ReleaseParameters(RequestModel):
    """Query string of GET /v1/release."""

    include: Literal["curve"] | None = Field(
        default=None,
        description="`curve`: with the offline figures at every λ and μ, in `bias_removal.curve`; tens of kilobytes.",
    )


class ReleaseDial(BiasRemoval):
    """The dial: the default λ of a request, its limits, and how every λ scored offline."""

    curve: list[CurvePoint] | None = Field(  # type: ignore[assignment]  # left out unless it is wanted
        default=None, description="Only with `include=curve`; empty if the release was not evaluated offline."
    )


class ReleaseAvailability(BaseModel):
    """The labels that answers may have now."""

    labels: int = Field(description="Labels that are not hidden and within their lifetimes, added labels included.")
    next_change: datetime | None = Field(description="When the next label becomes available or ends; null: never.")


class ReleaseAnswer(BaseModel):
    """Answer of GET /v1/release."""

    name: str
    created_at: datetime
    model: str
    example: dict[str, JsonValue] = Field(description="Features of a valid query, to copy and change.")
    query_features: list[ExpectedFeature]
    exclude_history: bool = Field(description="Whether answers exclude a query's history by default.")
    filterable: list[FilterableColumn] = Field(description="What `filter` of a request may name.")
    priors: list[ReleasePrior]
    bonus: dict[str, ReleaseBonus] = Field(default={}, description="What `bonus` of a request may name.")
    slope: dict[str, ReleaseSlope] = Field(default={}, description="Columns of numbers that `slope` may name.")
    decay: dict[str, ReleaseDecay] = Field(default={}, description="Columns of dates that `decay` may name.")
    labels: int
    available: ReleaseAvailability
    dim: int
    similarity: Literal["dot", "cosine"]
    temperature: float
    loss: Loss
    popularity: Popularity
    buckets: Buckets
    proposal: str = Field(
        description="The noise whose log `bias_removal` multiplies in /v1/retrieve: `label frequencies`, "
        "the name in `bias_removal.noise`, or `p_n(y|x), a tree of depth N`, which depends on "
        "the query's features. With a tree, in /v1/similar: label frequencies."
    )
    forecast: ReleaseForecast | None = Field(default=None, description="Null if popularity is the training frequency.")
    bias_removal: ReleaseDial
    queries: ReleaseQueries | None = Field(description="Null if the release has no index of queries.")
    cooccurrence: ReleaseCooccurrence | None = Field(
        default=None, description="Null if the release has no co-occurrence."
    )
    request_id: str


class StagedRefusals(BaseModel):
    """Mirrored queries that the staged release could not answer."""

    queries: int
    reason: str | None = Field(description="Reason of the first refusal.")


class StagedShare(BaseModel):
    """A bucket's share of the answered labels, over the same queries; null before the first query."""

    staged: float | None
    current: float | None


class StagedRecall(BaseModel):
    """Share of organic choices that each release would have answered, and their paired difference [95 % interval]."""

    positives: int
    staged: float | None
    current: float | None
    difference: float | None
    interval: list[float] | None


class StagedAnswer(BaseModel):
    """Answer of GET /v1/release/staged."""

    staged: str = Field(description="The release that gets shadow queries.")
    current: str = Field(description="The release in service.")
    queries: int = Field(
        description="Mirrored queries: the share LONGTAIL_MIRROR_SHARE of the queries of /v1/retrieve."
    )
    refused: StagedRefusals
    skipped: int = Field(description="Queries that were to be mirrored while the mirror was too busy.")
    overlap: float | None = Field(description="Mean share of the served labels that the staged release also answers.")
    exposure: dict[str, StagedShare]
    organic_recall: dict[str, StagedRecall]
    request_id: str


class HealthAnswer(BaseModel):
    """Answer of /livez; the answer of /readyz has further fields."""

    status: Literal["alive", "ready"]


class WorkerCount(BaseModel):
    """The processes that share the port."""

    expected: int
    ready: int = Field(
        description="Processes that serve a release; a process that has ended is restarted, after growing pauses."
    )


class ReadyAnswer(HealthAnswer):
    """Answer of /readyz."""

    workers: WorkerCount


class ErrorDetail(BaseModel):
    """Description of an error."""

    type: str = Field(description="Stable name of the kind of error.")
    message: str = Field(description="Expected and received values.")
    field: str | None = Field(
        default=None, description="Dotted path of the invalid field (`queries.0.k`); absent if the error has no field."
    )


class ErrorAnswer(BaseModel):
    """Answer with a status of 4xx or 5xx: a problem of RFC 9457, as application/problem+json."""

    type: str = Field(description="`urn:longtail:` and `error.type`.")
    title: str = Field(description="HTTP's phrase for the status.")
    status: int
    detail: str = Field(description="The message of `error`.")
    error: ErrorDetail
    request_id: str
