"""Define the queries of a search as clients write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from longtail.bundle.dates import nats_per_day
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring.records import RESTRICTIONS, Restriction
from longtail.serving.settings import MOST_QUERIES

MAX_IDS = 10_000
"""Most ids in one list of a request."""
MOST_POOL = 4_096
"""Largest pool; if k is larger, the pool may have k labels."""
_LEAST_POOLED, _POOLED_PER_RESULT = 100, 4
"""Smallest default size of a pool in labels, and labels per result."""
_MOST_FLOORS = 8
BucketName = Literal["head", "torso", "tail", "new"]
ELSEWHERE = {
    "lambda": "bias_removal", "λ": "bias_removal", "mu": "popularity", "μ": "popularity", "omega": "cooccurrence",
    "ω": "cooccurrence", "top_k": "k", "topk": "k",
    "limit": "k", "n": "k", "num_results": "k", "candidates": "allow", "exclude_ids": "exclude", "where": "filter",
    "inputs": "queries", "instances": "queries", "items": "labels", "item_id": "label_id",
}  # fmt: skip
"""Keys of requests by what papers and other services call them."""
_NO_MEMBERS: JsonDict = {"default": {}}
"""Extra JSON schema of fields with `default_factory=dict`. With `default={}` pydantic would deep-copy the default for
every query, which takes longer than the rest of the validation."""


class _OneError:
    """Annotation of a union that reports a single error."""

    def __init__(self, type_: str, message: str, *choices: CoreSchema) -> None:
        self._schema = core_schema.union_schema(
            list(choices), mode="left_to_right", custom_error_type=type_, custom_error_message=message
        )

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return self._schema


def _to_integer(value: float) -> int:
    """Convert a whole float to an integer, like training; raises ValueError."""
    if not value.is_integer():
        raise ValueError(value)
    return int(value)


_INTEGER_SCHEMAS = (
    core_schema.int_schema(strict=True),
    core_schema.no_info_after_validator_function(
        _to_integer, core_schema.float_schema(strict=True, allow_inf_nan=False)
    ),
)
LabelId = Annotated[
    str | int,
    _OneError(
        "id_type",
        "Input should be an id (a string or a whole number)",
        core_schema.str_schema(strict=True),
        *_INTEGER_SCHEMAS,
    ),
]
"""A label's id; `1`, `1.0` and `"1"` are the same label."""
ChosenId = Annotated[
    str | int,
    _OneError(
        "id_type",
        "Input should be an id (a string that is not empty, or a whole number)",
        core_schema.str_schema(strict=True, min_length=1),
        *_INTEGER_SCHEMAS,
    ),
]
"""The id of a label that was chosen: training refuses an empty one."""
_Display = Annotated[
    bool | list[str],
    _OneError(
        "display_type",
        "Input should be true, false or a list of columns",
        core_schema.bool_schema(strict=True),
        core_schema.list_schema(core_schema.str_schema(strict=True), strict=True),
    ),
]


def _bound_arrays(schema: Any) -> None:
    """Bound a schema's lists, and stop at their first error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            # Without this, ten thousand wrong ids would give ten thousand errors.
            schema["fail_fast"] = True
            schema.setdefault("max_length", MAX_IDS)
        for part in schema.values():
            _bound_arrays(part)
    elif isinstance(schema, list):
        for part in schema:
            _bound_arrays(part)


class RequestModel(BaseModel):
    """Base of the models that clients send.

    Strict: a number is never read out of a string, and an unknown key is an error, so that a typo cannot silently
    turn into a default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound_arrays(schema)
        return schema


class AtLeast(RequestModel):
    """A floor of labels of a bucket, a filter or both."""

    bucket: BucketName | None = Field(default=None, description="The frequency bucket of these labels.")
    filter: dict[str, JsonValue] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Conditions that these labels meet, written like the query's `filter`.",
    )
    n: int = Field(ge=1, description="Least number of such labels.")

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if self.bucket is None and not self.filter:
            raise PydanticCustomError("floor_of_nothing", "expected a bucket or a filter with n, received neither")
        return self


class Decay(RequestModel):
    """How scores fade with the age of labels: by `weight · log 2^(−age / half_life)`."""

    column: str = Field(description="A column of dates, as GET /v1/release lists them in `decay`.")
    half_life: str = Field(
        description="For example `12h`, `7d` or `4w`: a label of this age loses `weight · log 2`; a label "
        "with a future date gains."
    )
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def per_day(self, field: str) -> float:
        """Return what a label loses in a day, in nats; raises InvalidRequestError."""
        try:
            return self.weight * nats_per_day(self.half_life)
        except ValueError as error:
            raise InvalidRequestError(str(error), field=field) from error


class SearchOptions(RequestModel):
    """Which labels may be answered, and at which weights."""

    k: int = Field(
        default=10,
        ge=1,
        description="Labels wanted; fewer come back when fewer are eligible, or the release has fewer.",
    )
    bias_removal: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="λ of `u·v/T + b + λ·log ν + μ·log π`: 0 ranks by preference beyond the noise ν of "
        "training, that is beyond popularity if ν is near π; 1 includes it. Null: the release's "
        "default (0 for /v1/similar). `bias_removal.noise` of GET /v1/release names ν.",
    )
    popularity: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="μ of the same: the weight of the label frequency π as a prior, above 0 for frequent labels, below "
        "0 for rare ones. Null: the release's default (0 for /v1/similar). Where ν is π, only λ + μ counts, and must "
        "lie within the limits of `bias_removal`.",
    )
    cooccurrence: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="ω of `… + ω·c`, the weight of labels chosen together with the last labels of the "
        "query's history. Null: the release's default (0 for /v1/similar). GET /v1/release "
        "gives its limits in `cooccurrence`, null if the release has no such term.",
    )
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Weights w of the release's priors r in `… + Σ w·r`, by name; of those left out, the release's "
        "defaults (0 for /v1/similar). GET /v1/release lists them with their limits.",
    )
    bonus: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Bonus β, in logits, of the labels of a bucket, `torso`, `tail` or `new`, or of a filter that the "
        "release declares; of those left out, the release's defaults (0 for /v1/similar). GET /v1/release lists them "
        "in `bonus`.",
        examples=[{"tail": 1.5, "torso": 0.3}],
    )
    slope: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Logits per unit of a column of numbers, counted from the column's median, such as −0.02 of "
        "`price`: cheaper labels first. GET /v1/release lists the columns in `slope`.",
        examples=[{"price": -0.02}],
    )
    decay: Decay | None = Field(
        default=None,
        description="How scores fade with the age of labels. Null: they do not fade.",
        examples=[{"column": "listed_at", "half_life": "7d"}],
    )
    exclude: list[LabelId] = Field(
        default_factory=list,
        max_length=MAX_IDS,
        json_schema_extra={"default": []},
        description="Labels never to answer; unknown ones are counted.",
    )
    allow: list[LabelId] | None = Field(
        default=None,
        max_length=MAX_IDS,
        description="If given, only these labels may be answered; unknown ones are counted.",
    )
    buckets: list[BucketName] | None = Field(
        default=None, min_length=1, description="If given, only labels of these frequency buckets may be answered."
    )
    filter: dict[str, JsonValue] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="If given, only labels whose columns meet all of these conditions may be answered: by column, as "
        "GET /v1/release lists them in `filterable`, a value to equal, or an object of operators: `eq`, `ne`, `in`, "
        "`not_in`, `exists`, of numbers and dates also `lt`, `le`, `gt`, `ge`.",
        examples=[{"category": {"in": ["teapot", "mug"]}, "price": {"ge": 5, "lt": 20}, "in_stock": True}],
    )
    explore: dict[BucketName, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Least number of the k slots for labels of each bucket, drawn at random from the bucket's best by "
        "score and put at random positions; every label then comes with its propensity. Off where empty.",
    )
    at_least: list[AtLeast] = Field(
        default_factory=list,
        max_length=_MOST_FLOORS,
        json_schema_extra={"default": []},
        description="Floors: the least number of labels from a bucket, or of labels that pass a filter, at little "
        'loss of summed scores; together at most k. `{"bucket": {"tail": 1, "new": 1}}` is short for floors of '
        "buckets. The result's `floors` and `cost` give the numbers met and their cost.",
        examples=[[{"bucket": "tail", "n": 1}, {"filter": {"brand": "brand3"}, "n": 2}]],
    )
    max_per: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Most labels for each value of a column that labels can be filtered by: the best by score. Labels "
        "without a value are not limited; a label with several values counts for each value.",
        examples=[{"brand": 2}],
    )
    mmr: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Weight w of maximal marginal relevance, which chooses labels that are unlike each other by "
        "`(1 − w)·r − w·c`: r the score, from 0 to 1 over the pool, c the largest cosine of the label's embedding with "
        "those before it. 0: by score alone. Off where null.",
    )
    pool: int | None = Field(
        default=None,
        ge=1,
        description="How many of the best labels `mmr` and `max_per` choose from, at least k; more where too few of "
        "them may be answered. Null: 4·k, at least 100.",
    )
    display: _Display = Field(
        default=True, description="Which columns come with each label: all, none (false), or these."
    )

    @field_validator("at_least", mode="before")
    @classmethod
    def _floors_of_buckets(cls, floors: object) -> object:
        """Write the short form out."""
        if isinstance(floors, dict) and floors.keys() == {"bucket"} and isinstance(floors["bucket"], dict):
            return [{"bucket": bucket, "n": n} for bucket, n in floors["bucket"].items()]
        return floors

    @property
    def restrictions(self) -> tuple[Restriction, ...]:
        """Return the options by which the client restricts the eligible labels."""
        used = {"buckets": self.buckets is not None, "allow": self.allow is not None, "filter": bool(self.filter)}
        return tuple(name for name in RESTRICTIONS if used[name])


class RetrieveQuery(SearchOptions):
    """One query: its features, or in their place a vector."""

    features: dict[str, JsonValue] | None = Field(
        default=None, description="By name, as GET /v1/release lists them; those left out, or null, are missing."
    )
    vector: list[Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None,
        description="In place of features: u itself, as many numbers as GET /v1/release says in `dim`, such as a "
        "vector of /v1/embed or a mean of them. Where `similarity` is cosine, it is scaled to length 1. Where "
        "`proposal` is a tree, `bias_removal` must be 0.",
    )

    exclude_history: bool | None = Field(
        default=None,
        description="Whether the labels of the query's history are left out of its answer: of its features of kind "
        "`history`, of `history`, or the labels that the release remembers of the query. Null: the release's own "
        "`exclude_history`.",
    )

    history: list[LabelId] | None = Field(
        default=None,
        max_length=MAX_IDS,
        description="Ids of the labels that the query chose, the latest last, for `cooccurrence` and "
        "`exclude_history`; instead of a feature of kind `history`, if the release reads one. "
        "Null: the labels that the release remembers of the query. Unknown ids are counted.",
    )

    explain: bool = Field(
        default=False,
        description="Whether each label comes with the parts of its score, and the λ between which it is among the k "
        "best by score. Allowed in one query of a request, with k <= 50; it takes some hundred searches.",
    )


def count_entries(features: Mapping[str, JsonValue]) -> int:
    """Count the entries of the lists and objects among features."""
    return sum([len(value) for value in features.values() if isinstance(value, list | dict)])


def features_json(features: dict[str, JsonValue]) -> bytes:
    """Encode features as JSON, also integers beyond 64 bits."""
    try:
        return orjson.dumps(features)
    except orjson.JSONEncodeError:
        return json.dumps(features).encode()


_ALONE = ("bias_removal", "popularity", "cooccurrence", "priors", "bonus", "slope", "decay")
"""Options of a score that has other parts than co-occurrence."""


class OfLabels(RequestModel):
    """Labels by their ids."""

    id: LabelId | None = None
    ids: list[LabelId] | None = Field(default=None, min_length=1, max_length=MOST_QUERIES)

    @property
    def labels(self) -> list[str | int]:
        """Return the requested ids, in order."""
        return self.ids if self.ids is not None else [] if self.id is None else [self.id]


class SimilarQuery(OfLabels, SearchOptions):
    """Labels whose nearest labels are wanted: one label's id, or several in `ids`."""

    by: Literal["embedding", "cooccurrence"] = Field(
        default="embedding",
        description="Measure of nearness: `embedding` finds labels like this one; `cooccurrence` finds labels chosen "
        "together with it and ranks them by that alone, fewer than k if fewer were chosen.",
    )

    @model_validator(mode="after")
    def _one_of_id_and_ids(self) -> Self:
        if (self.id is None) == (self.ids is None):
            raise _either("id", "ids", self.id)
        if self.by == "cooccurrence" and (names := [name for name in _ALONE if name in self.model_fields_set]):
            raise PydanticCustomError(
                "by_alone", "expected no {name} with by: cooccurrence, which alone ranks, received one",
                {"name": names[0]},
            )  # fmt: skip
        return self


class QueriesFor(OfLabels):
    """Labels whose likeliest queries are wanted: one label's id, several in `ids`, or a new label's features."""

    features: dict[str, JsonValue] | None = Field(
        default=None, description="Features of a label that the release lacks, by name, as the label tower takes them."
    )
    k: int = Field(default=10, ge=1, description="Queries wanted of each label; fewer where fewer may be answered.")
    by: Literal["log_p", "choices"] = Field(
        default="log_p",
        description="The order: `log_p`, how likely query x chooses label y next; or `choices`, n·p(y|x), how many of "
        "the next n choices of x are expected to be y, with n from the index's column of choices.",
    )
    bias_removal: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="λ of s and p(y|x), one of the values in `queries` of GET /v1/release. Null: the "
        "release's default. μ and the weights of priors have their defaults, and ω is 0.",
    )
    filter: dict[str, JsonValue] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="Conditions on the columns of queries, written like the `filter` of `RetrieveQuery`.",
    )
    exclude: list[LabelId] = Field(
        default_factory=list, json_schema_extra={"default": []}, description="Ids of queries never to answer."
    )
    exclude_history: bool | None = Field(
        default=None,
        description="Whether queries that chose the label are excluded, if it is among their last labels "
        "that the release remembers; queries that last rejected it always are. Null: the "
        "release's `exclude_history`, if it remembers queries.",
    )
    display: _Display = Field(default=True, description="Columns of the queries: all, none (false), or these.")

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        names = [name for name in ("id", "ids", "features") if getattr(self, name) is not None]
        if len(names) == 1:
            return self
        received = {"received": " and ".join(names) or "none"}
        raise PydanticCustomError("one_of_three", "expected one of id, ids and features, received {received}", received)


class QueryFeatures(RequestModel):
    """One query to embed."""

    features: dict[str, JsonValue] = Field(description="By name, as GET /v1/release lists them.")


class ToEmbed(RequestModel):
    """Queries or labels whose vectors are wanted."""

    queries: list[QueryFeatures] | None = Field(
        default=None, min_length=1, max_length=MOST_QUERIES, description="Queries, to embed by the query tower."
    )
    labels: list[LabelId] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_QUERIES,
        description="Or ids of labels that may be answered, added labels included.",
    )

    @property
    def count(self) -> int:
        """Count the vectors wanted."""
        return len(self.queries or self.labels or ())

    @model_validator(mode="after")
    def _one_of_queries_and_labels(self) -> Self:
        if (self.queries is None) == (self.labels is None):
            raise _either("queries", "labels", self.queries)
        return self


def _either(first: str, other: str, value: object) -> PydanticCustomError:
    """Create the error of both or neither of two fields."""
    return PydanticCustomError(
        f"{first}_or_{other}",
        f"expected either {first} or {other}, received {{received}}",
        {"received": "neither" if value is None else "both"},
    )


def first_pool(pool: int | None, k: int, labels: int) -> int:
    """Return the initial size of the pool: the request's, or 4·k and at least 100."""
    return min(max(_LEAST_POOLED, _POOLED_PER_RESULT * k) if pool is None else pool, max(MOST_POOL, k), labels)
