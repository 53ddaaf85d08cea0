"""Define the queries of a search as clients write them, and resolve them against one release."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from longtail.bundle import BUCKET_NAMES, Manifest, Popularity, Prior, Priors
from longtail.bundle.arrays import Float32, Int64
from longtail.bundle.conditions import unfilterable
from longtail.bundle.dates import DAY_SECONDS, span_seconds
from longtail.bundle.errors import describe
from longtail.bundle.sets import distinct
from longtail.bundle.validation import did_you_mean
from longtail.index import Condition, Filter
from longtail.serving.core import lifetimes
from longtail.serving.core.catalogue import Catalogue
from longtail.serving.core.ranking import NO_ROWS
from longtail.serving.errors import InvalidRequestError
from longtail.serving.monitoring import ArmAnswer
from longtail.serving.monitoring.records import RESTRICTIONS, Restriction
from longtail.serving.settings import MOST_QUERIES

MAX_IDS = 10_000
"""Most ids in one list of a request."""
MOST_POOL = 4_096
"""Largest pool; if k is larger, the pool may have k labels."""
_MOST_COMPARED = 1 << 21
"""Most pairs of labels that `mmr` compares: k times the pool."""
_LEAST_POOLED, _POOLED_PER_RESULT = 100, 4
"""Default size of a pool: at least so many labels, and so many per result."""
_GROWN_POOL, _OTHER_SEARCH = 512, 250
"""Estimated work, in labels searched, of a pool of `max_per`, which may grow, and of a search for slots or a floor."""
_MOST_FLOORS = 8
BucketName = Literal["head", "torso", "tail", "new"]
ELSEWHERE = {
    "lambda": "bias_removal", "λ": "bias_removal", "mu": "popularity", "μ": "popularity", "omega": "cooccurrence",
    "ω": "cooccurrence", "top_k": "k", "topk": "k",
    "limit": "k", "n": "k", "num_results": "k", "candidates": "allow", "exclude_ids": "exclude", "where": "filter",
    "inputs": "queries", "instances": "queries", "items": "labels", "item_id": "label_id",
}  # fmt: skip
"""Keys of requests by what papers and other services call them."""
_LONGEST_NAME = 100
_FIELD_OF_NAME = {"decay": "decay.column"}
"""Field of a request with the name of a prior, where the group's key is not."""
_SAME = 1e-6
"""Largest difference of two weights that are the same but for rounding to float32."""
_ANY = 1 << 62
_NO_MEMBERS: JsonDict = {"default": {}}
"""Extra JSON schema of fields with `default_factory=dict`. With `default={}` pydantic would deep-copy the default for
every query, which takes longer than the rest of the validation."""


_BELOW_ZERO = (
    "; below 0 the best labels are those that this release's tree p_n(y|x) all but rules out, which no search finds: "
    "popularity below 0 favours rare labels"
)


class _OneError:
    """Annotation that validates a union with a single error, where pydantic reports one per type."""

    def __init__(self, type_: str, message: str, *choices: CoreSchema) -> None:
        self._schema = core_schema.union_schema(
            list(choices), mode="left_to_right", custom_error_type=type_, custom_error_message=message
        )

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return self._schema


def _whole(value: float) -> int:
    """Convert a whole float to an integer, like training; raises ValueError."""
    if not value.is_integer():
        raise ValueError(value)
    return int(value)


_WHOLE = (
    core_schema.int_schema(strict=True),
    core_schema.no_info_after_validator_function(_whole, core_schema.float_schema(strict=True, allow_inf_nan=False)),
)
LabelId = Annotated[
    str | int,
    _OneError(
        "id_type", "Input should be an id (a string or a whole number)", core_schema.str_schema(strict=True), *_WHOLE
    ),
]
"""A label's id; `1`, `1.0` and `"1"` are the same label."""
ChosenId = Annotated[
    str | int,
    _OneError(
        "id_type",
        "Input should be an id (a string that is not empty, or a whole number)",
        core_schema.str_schema(strict=True, min_length=1),
        *_WHOLE,
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
    """Make lists and dictionaries of a schema stop at the first error, and bound their lengths."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
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
    """So many of an answer's labels, of one bucket, or that pass a filter, or both."""

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
            raise PydanticCustomError("floor_of_nothing", "expected a bucket or a filter beside n, received neither")
        return self


class Decay(RequestModel):
    """How scores fade with the age of labels: by `weight · log 2^(−age / half_life)`."""

    column: str = Field(description="A column of dates, as GET /v1/release lists them in `decay`.")
    half_life: str = Field(
        description="Such as `12h`, `7d` or `4w`: a label of this age loses `weight · log 2`, one to come gains."
    )
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    def per_day(self, field: str) -> float:
        """Return what a label loses in a day, in nats; raises InvalidRequestError."""
        try:
            return self.weight * math.log(2) * DAY_SECONDS / span_seconds(self.half_life)
        except ValueError as error:
            raise InvalidRequestError(str(error), field=field) from error


class SearchOptions(RequestModel):
    """Which labels may be answered, how many, and where the three dials stand."""

    k: int = Field(
        default=10,
        ge=1,
        description="Labels wanted; fewer come back when fewer are eligible, or the release has fewer.",
    )
    bias_removal: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="λ of `u·v/T + b + λ·log ν + μ·log π`: 0 ranks by what the query likes beyond the noise ν of "
        "training, beyond popularity where ν is near π; 1 with it. Null: the release's default (0 for /v1/similar). "
        "GET /v1/release says which ν in `bias_removal.noise`.",
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
        description="ω of `… + ω·c`, the weight of what was chosen together with the last labels of the query's "
        "history. Null: the release's default (0 for /v1/similar). GET /v1/release gives its limits in "
        "`cooccurrence`, null where the release has no such term.",
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
        description="How scores fade with the age of labels. Off where null.",
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
        examples=[{"category": {"in": ["shoes", "hats"]}, "price": {"ge": 5, "lt": 20}, "in_stock": True}],
    )
    explore: dict[BucketName, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="At least so many of the k slots go to labels of these buckets, drawn at random from each bucket's "
        "best by score and put at random places; every label then comes with its propensity. Off where empty.",
    )
    at_least: list[AtLeast] = Field(
        default_factory=list,
        max_length=_MOST_FLOORS,
        json_schema_extra={"default": []},
        description="Floors: at least so many labels of a bucket, or that pass a filter, at little loss of summed "
        'scores; together at most k. `{"bucket": {"tail": 1, "new": 1}}` is short for floors of buckets. The result\'s '
        "`floors` and `cost` say how many were found and what they cost.",
        examples=[[{"bucket": "tail", "n": 1}, {"filter": {"seller": "s1"}, "n": 2}]],
    )
    max_per: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        json_schema_extra=_NO_MEMBERS,
        description="At most so many labels for each value of a column that labels can be filtered by: the best by "
        "score. Labels without a value are not limited, a label of several counts for each.",
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
    def restricted(self) -> bool:
        """Whether the client restricts the eligible labels, so that the answer does not represent the release."""
        return bool(self.restrictions)

    @property
    def arranged(self) -> bool:
        """Whether the client arranges the labels otherwise than by score, so that no promise holds for the answer."""
        return bool(self.max_per or self.mmr or self.at_least)

    @property
    def restrictions(self) -> tuple[Restriction, ...]:
        """Return the options by which the client restricts the eligible labels."""
        if self.buckets is None and self.allow is None and not self.filter:
            return ()
        used = {"buckets": self.buckets is not None, "allow": self.allow is not None, "filter": bool(self.filter)}
        return tuple(name for name in RESTRICTIONS if used[name])

    @property
    def depth(self) -> int:
        """Estimate the number of labels to search for: k, or the pool of `max_per` and `mmr`."""
        return first_pool(self.pool, self.k, _ANY) if self.max_per or self.mmr is not None else self.k

    @property
    def extra(self) -> int:
        """Estimate what the search costs beyond `depth`, in labels."""
        return self.searched + self.listed

    @property
    def searched(self) -> int:
        """Estimate the cost of slots, floors, and pools that grow, in labels."""
        pooled = len(self.max_per) * max(_GROWN_POOL, self.depth)
        others = [*self.explore.values(), *(MOST_POOL if self.max_per else floor.n for floor in self.at_least)]
        return pooled + sum([_OTHER_SEARCH + labels for labels in others])

    @property
    def listed(self) -> int:
        """Count the entries of lists."""
        filters = [self.filter, *(floor.filter for floor in self.at_least)]
        conditions = [part for of in filters for one in of.values() if isinstance(one, dict) for part in one.values()]
        return entries([self.exclude, self.allow, self.display, *conditions])


def entries(values: Sequence[object]) -> int:
    """Count the entries of the lists and objects among values."""
    return sum([len(value) for value in values if isinstance(value, list | dict)])


class Query(SearchOptions):
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
        "`exclude_history`; in place of a feature of kind `history`, if the release reads one. Null: what the release "
        "remembers of the query, if anything. Unknown ones are counted.",
    )

    explain: bool = Field(
        default=False,
        description="Whether each label comes with what its score is made of, and the λ between which it is among the "
        "k best by score. Of one query of a request, with k <= 50; it takes some hundred searches.",
    )

    arm: ClassVar[ArmAnswer | None] = None
    """The query's arm of an experiment; None without an experiment."""

    @property
    def extra(self) -> int:
        """Estimate what the search costs beyond `depth`, in labels."""
        return super().extra + entries([self.history, *(self.features or {}).values()])

    def in_arm(self, arm: ArmAnswer, settings: Mapping[str, Any]) -> QueryInArm:
        """Return the query with the settings of its arm."""
        query = QueryInArm.model_construct(self.model_fields_set | settings.keys(), **{**dict(self), **settings})
        query._arm = arm
        return query

    @model_validator(mode="after")
    def _one_of_features_and_vector(self) -> Self:
        if (self.features is None) == (self.vector is None):
            raise _either("features", "vector", self.features)
        return self


class QueryInArm(Query):
    """A query with the arm that an experiment gave it; a field of `Query` would cost every request time."""

    _arm: ArmAnswer = PrivateAttr()

    @property
    def arm(self) -> ArmAnswer:  # type: ignore[override]  # a value per query in place of the class variable
        """Return the query's arm of an experiment."""
        return self._arm


def features_json(features: dict[str, JsonValue]) -> bytes:
    """Encode features as JSON, including integers beyond 64 bits, which orjson refuses."""
    try:
        return orjson.dumps(features)
    except orjson.JSONEncodeError:
        return json.dumps(features).encode()


_ALONE = ("bias_removal", "popularity", "cooccurrence", "priors", "bonus", "slope", "decay")
"""Options of a score that has other parts than co-occurrence."""


class SimilarQuery(SearchOptions):
    """Labels whose nearest labels are wanted: one label's id, or several in `ids`."""

    id: LabelId | None = None
    ids: list[LabelId] | None = Field(default=None, min_length=1, max_length=MOST_QUERIES)
    by: Literal["embedding", "cooccurrence"] = Field(
        default="embedding",
        description="What is near: `embedding`, labels like this one, or `cooccurrence`, labels chosen together with "
        "it, best first, by nothing else; fewer than k where fewer were.",
    )

    @property
    def extra(self) -> int:
        """Estimate what the search of one id costs beyond `depth`, in labels; lists are read once for many ids."""
        return self.searched + self.listed // 8

    @property
    def labels(self) -> list[str | int]:
        """Return the requested ids, in order."""
        if self.ids is not None:
            return self.ids
        return [] if self.id is None else [self.id]

    @model_validator(mode="after")
    def _one_of_id_and_ids(self) -> Self:
        if (self.id is None) == (self.ids is None):
            raise _either("id", "ids", self.id)
        if self.by == "cooccurrence" and (given := [name for name in _ALONE if name in self.model_fields_set]):
            raise PydanticCustomError(
                "by_alone", "expected no {name} beside by: cooccurrence, which alone ranks, received one",
                {"name": given[0]},
            )  # fmt: skip
        return self


class QueriesFor(RequestModel):
    """Labels whose likeliest queries are wanted: one label's id, several in `ids`, or a new label's features."""

    id: LabelId | None = None
    ids: list[LabelId] | None = Field(default=None, min_length=1, max_length=MOST_QUERIES)
    features: dict[str, JsonValue] | None = Field(
        default=None, description="Of a label that the release lacks: inputs of its label tower, by name."
    )
    k: int = Field(default=10, ge=1, description="Queries wanted of each label; fewer where fewer may be answered.")
    by: Literal["log_p", "choices"] = Field(
        default="log_p",
        description="The order: `log_p`, how likely the next choice of query x is label y; or `choices`, n·p(y|x), how "
        "many of its next n choices are expected to be, with n of the index's column of choices.",
    )
    bias_removal: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="λ of s and p(y|x), one of those that GET /v1/release lists in `queries`. Null: the release's "
        "default. μ and the weights of priors have their defaults, and ω is 0.",
    )
    filter: dict[str, JsonValue] = Field(
        default_factory=dict, json_schema_extra=_NO_MEMBERS, description="Of queries, by their columns; see `Query`."
    )
    exclude: list[LabelId] = Field(
        default_factory=list, json_schema_extra={"default": []}, description="Ids of queries never to answer."
    )
    exclude_history: bool | None = Field(
        default=None,
        description="Whether queries that chose the label are left out, as far as the release remembers their last "
        "labels. Null: the release's own `exclude_history`, if it remembers queries.",
    )
    display: _Display = Field(default=True, description="Columns of the queries: all, none (false), or these.")

    @property
    def labels(self) -> list[str | int]:
        """Return the requested ids, in order."""
        return self.ids if self.ids is not None else [] if self.id is None else [self.id]

    @property
    def depth(self) -> int:
        """Return the number of queries to search for."""
        return self.k

    @property
    def extra(self) -> int:
        """Estimate what the search of one label costs beyond `depth`; lists are read once for many labels."""
        return entries([self.exclude, *(self.features or {}).values()]) // 8

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        given = [name for name in ("id", "ids", "features") if getattr(self, name) is not None]
        if len(given) == 1:
            return self
        received = {"received": " and ".join(given) or "none"}
        raise PydanticCustomError("one_of_three", "expected one of id, ids and features, received {received}", received)


class QueryFeatures(RequestModel):
    """One query of which the vector is wanted."""

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
        description="Or ids of labels that may be answered; those added count too.",
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


def _either(one: str, other: str, given: object) -> PydanticCustomError:
    """Create the error of a request with both or neither of two fields."""
    return PydanticCustomError(
        f"{one}_or_{other}",
        f"expected either {one} or {other}, received {{received}}",
        {"received": "neither" if given is None else "both"},
    )


@dataclass(frozen=True, slots=True)
class _Range:
    default: float
    minimum: float
    maximum: float

    def refusal(self, name: str, received: str, field: str, why: str = "") -> InvalidRequestError:
        return InvalidRequestError(
            f"expected {self.minimum} <= {name} <= {self.maximum}, received {received}{why}", field=field
        )


@dataclass(frozen=True, slots=True)
class Dials:
    """Limits and defaults of λ, μ, ω and the weights of priors for one kind of request.

    Where ν is π, one coordinate of the index holds λ + μ, so the sum must stay within the limits of λ, for which recall
    of the index was measured. With a tree p_n(y|x) the coordinate holds μ alone, except in requests for similar labels,
    which have no features that the tree could use.
    """

    bias_removal: _Range
    popularity: _Range
    total: _Range | None
    """Limits of λ + μ; None where λ and μ have separate coordinates."""
    tree: bool
    priors: tuple[Prior, ...]
    defaults_P: Float32
    """Default weight of every prior."""
    table: int
    """Number of priors of a table, which come first."""
    cooccurrence: _Range | None
    """Limits of ω; None without such a term."""

    @classmethod
    def of_queries(cls, manifest: Manifest, priors: Priors, *, tree: bool) -> Self:
        """Create the dials of queries; all defaults are the release's."""
        dial, prior = _range(manifest.bias_removal), _range(manifest.popularity)
        total = dial if manifest.kappa_popularity is None and not tree else None
        weight = None if manifest.cooccurrence is None else _range(manifest.cooccurrence)
        return cls(dial, prior, total, tree, priors.settings, priors.defaults, len(priors.of_table), weight)

    @classmethod
    def of_labels(cls, manifest: Manifest, priors: Priors, *, tree: bool) -> Self:
        """Create the dials of requests for similar labels.

        These seek similarity, not popularity, so all defaults are 0, or the limit nearest to 0.
        """
        dial, prior = _around_zero(_range(manifest.bias_removal)), _around_zero(_range(manifest.popularity))
        if tree:
            dial = _Range(dial.default, min(dial.minimum, prior.minimum), max(dial.maximum, prior.maximum))
        defaults_P = np.array([_around_zero(_range(each)).default for each in priors.settings], np.float32)
        weight = None if manifest.cooccurrence is None else _around_zero(_range(manifest.cooccurrence))
        total = dial if manifest.kappa_popularity is None else None
        return cls(dial, prior, total, False, priors.settings, defaults_P, len(priors.of_table), weight)

    def read(self, asked: SearchOptions, prefix: str = "") -> tuple[float, float]:
        """Return λ and μ of a request; raises InvalidRequestError if they exceed the release's limits."""
        noise = self.bias_removal.default if asked.bias_removal is None else asked.bias_removal
        prior = self.popularity.default if asked.popularity is None else asked.popularity
        if not self.bias_removal.minimum <= noise <= self.bias_removal.maximum:
            why = _BELOW_ZERO if self.tree and noise < 0 else ""
            raise self.bias_removal.refusal("bias_removal", describe(noise), f"{prefix}bias_removal", why)
        if not self.popularity.minimum <= prior <= self.popularity.maximum:
            raise self.popularity.refusal("popularity", describe(prior), f"{prefix}popularity")
        if self.total is not None and not self.total.minimum <= noise + prior <= self.total.maximum:
            raise self.total.refusal(
                "bias_removal + popularity",
                f"{describe(noise)} + {describe(prior)}",
                f"{prefix}{'bias_removal' if asked.popularity is None else 'popularity'}",
                "; this release has one log p_n for both, the label frequency",
            )
        return noise, prior

    def read_cooccurrence(self, asked: SearchOptions, prefix: str = "") -> float:
        """Return ω of a request; raises InvalidRequestError if the release has no such term, or other limits."""
        limits, weight = self.cooccurrence, asked.cooccurrence
        if limits is None:
            if weight:
                raise InvalidRequestError(
                    f"expected cooccurrence 0 or none, as this release knows nothing of what was chosen together, "
                    f"received {describe(weight)}",
                    field=f"{prefix}cooccurrence",
                )
            return 0.0
        if weight is None:
            return limits.default
        if not limits.minimum <= weight <= limits.maximum:
            raise limits.refusal("cooccurrence", describe(weight), f"{prefix}cooccurrence")
        return weight

    def reach(self, popularity: float) -> tuple[float, float]:
        """Return the smallest and the largest λ that are allowed with a given μ."""
        low, high = self.bias_removal.minimum, self.bias_removal.maximum
        if self.total is not None:
            low, high = max(low, self.total.minimum - popularity), min(high, self.total.maximum - popularity)
        return low, high

    def judged_at(self, bias_removal: float, popularity: float, cooccurrence: float, priors: Sequence[float]) -> float:
        """Return the λ whose promise holds for an answer at these weights, the others at their defaults; else NaN.

        Args:
            priors: weights of all priors, or of the first ones if the others have their defaults.
        """
        defaults = [0.0 if self.cooccurrence is None else self.cooccurrence.default]
        if priors:
            defaults += self.defaults_P.tolist()
        weights = [cooccurrence, *priors]
        if len(priors) not in (self.table, len(self.priors)) or any(
            abs(weight - default) > _SAME for weight, default in zip(weights, defaults, strict=False)
        ):
            return math.nan
        beyond = popularity - self.popularity.default
        if abs(beyond) <= _SAME:
            return bias_removal
        # One coordinate holds λ + μ: the answers are those at λ and the default μ that have the same sum.
        return math.nan if self.total is None else bias_removal + beyond

    def read_priors(self, asked: SearchOptions, prefix: str, at: float | None) -> tuple[Float32, float]:
        """Return a request's weight of every prior, float32 [P], and what decay adds to the scores of all labels.

        Decay is of the time `at`, seconds since 1970; None: now.

        Raises InvalidRequestError for a name or a weight that the release does not have.
        """
        if not (asked.priors or asked.bonus or asked.slope or asked.decay):
            return self.defaults_P, 0.0
        weights_P, shift, why = self.defaults_P.copy(), 0.0, ""
        groups = {"priors": asked.priors, "bonus": asked.bonus, "slope": asked.slope}
        if asked.decay is not None:
            groups["decay"] = {asked.decay.column: asked.decay.per_day(f"{prefix}decay.half_life")}
        for group, weights in groups.items():
            places = {prior.key: place for place, prior in enumerate(self.priors) if prior.group == group}
            for name, weight in weights.items():
                if name not in places:
                    raise _unknown_prior(group, name, list(places), f"{prefix}{_FIELD_OF_NAME.get(group, group)}")
                prior, field = self.priors[places[name]], f"{prefix}{group}.{name}"
                if group == "decay" and asked.decay is not None:
                    least = 24 * asked.decay.weight * math.log(2) / prior.maximum
                    field = f"{prefix}decay.half_life"
                    why = f" a day: with this weight half_life must be at least {least:.3g}h"
                    # The coordinate counts days from the newest label of the build, and the score counts from now.
                    shift = weight * (prior.origin - (lifetimes.now() if at is None else at) / DAY_SECONDS)
                if not prior.minimum <= weight <= prior.maximum * (1 + _SAME):
                    raise _range(prior).refusal(f"{group}.{name}", describe(weight), field, why)
                weights_P[places[name]] = weight
        return weights_P, shift


def _unknown_prior(group: str, name: str, known: list[str], field: str) -> InvalidRequestError:
    """Create the error about a name that the release has no prior of."""
    hint = did_you_mean(name, known) or f"; longtail-index build --{group} declares others"
    if (group, name) == ("bonus", "head"):
        hint = ": the others are measured against it, so give each of them a bonus below 0"
    noun = {"priors": "priors", "bonus": "bonuses"}.get(group, "columns")
    return InvalidRequestError(
        f"expected {noun} of this release, {known}, received {describe(name)}{hint}", field=field
    )


def _range(limits: Popularity | Prior) -> _Range:
    return _Range(limits.default, limits.minimum, limits.maximum)


def _around_zero(limits: _Range) -> _Range:
    return _Range(min(max(0.0, limits.minimum), limits.maximum), limits.minimum, limits.maximum)


class History(NamedTuple):
    """The labels that a query chose, as far as its answer needs them.

    Attributes:
        last_H: int64, rows of those that count for `cooccurrence`, oldest first.
        left_out: int64, rows that its answer leaves out; they may repeat.
        named: number of ids in the query that were looked up.
        unknown: of these, ids that the release does not know.
    """

    last_H: Int64 = NO_ROWS
    left_out: Int64 = NO_ROWS
    named: int = 0
    unknown: int = 0


NO_HISTORY = History()


@dataclass(frozen=True, slots=True)
class ResolvedQuery:
    """The options of one query, checked against a release, with rows in place of ids.

    Attributes:
        history_H: int64, rows of the history that count for `cooccurrence`, oldest first.
        shift: what `decay` adds to the scores of all labels.
        chosen_with: whether only labels with c > 0 may be answered, by ω·c alone.
        filter: filter of the eligible label rows; None if all are eligible.
        explore: numbers of slots to draw at random, by bucket; all above 0.
        diversity: settings of diversity; None: labels are answered by score alone.
        floors: least numbers of labels of some kinds.
    """

    k: int
    bias_removal: float
    popularity: float
    cooccurrence: float
    priors: Float32
    shift: float
    decay: Decay | None
    filter: Filter | None
    unknown_exclude: int
    unknown_allow: int
    history_H: Int64
    chosen_with: bool = False
    explore: Mapping[int, int] = field(default_factory=dict)
    display: frozenset[str] | None = None
    diversity: Diversity | None = None
    floors: Sequence[Floor] = ()
    restrictions: tuple[Restriction, ...] = ()

    @classmethod
    def from_options(
        cls,
        options: SearchOptions,
        dials: Dials,
        catalogue: Catalogue,
        *,
        prefix: str = "",
        history: History = NO_HISTORY,
        at: float | None = None,
    ) -> ResolvedQuery:
        """Check a query's options against a release and look their ids up.

        Args:
            prefix: prefix of the fields in errors, such as `queries.0.`.
            history: labels that the query chose.
            at: the time that ages are of, seconds since 1970; None: now.

        Raises:
            InvalidRequestError: the release does not support an option; the error names it.
        """
        k = min(options.k, catalogue.labels)
        bias_removal, popularity = dials.read(options, prefix)
        priors, shift = dials.read_priors(options, prefix, at)
        apart = options.max_per or options.mmr is not None or options.pool is not None
        filter_, unknown_exclude, unknown_allow = None, 0, 0
        restricts = options.exclude or options.filter or options.allow is not None or options.buckets is not None
        if restricts or history.left_out.size:
            exclude, unknown_exclude = catalogue.rows(options.exclude)
            if history.left_out.size:
                exclude = distinct(np.concatenate([exclude, history.left_out]))
            allow, unknown_allow = catalogue.rows(options.allow or ())
            selection, beyond = (
                catalogue.attributes.select(options.filter, f"{prefix}filter") if options.filter else (None, None)
            )
            filter_ = Filter(
                exclude=exclude if len(exclude) else None,
                allow=None if options.allow is None else allow,
                buckets=None if options.buckets is None else frozenset(map(BUCKET_NAMES.index, options.buckets)),
                selection=selection,
                beyond=beyond,
            )
        return cls(
            k=k,
            bias_removal=bias_removal,
            popularity=popularity,
            cooccurrence=dials.read_cooccurrence(options, prefix),
            priors=priors,
            shift=shift,
            decay=options.decay,
            filter=filter_,
            unknown_exclude=unknown_exclude,
            unknown_allow=unknown_allow,
            history_H=history.last_H,
            explore=_explored(options, f"{prefix}explore") if options.explore else {},
            display=None if options.display is True else _shown(options.display, catalogue, f"{prefix}display"),
            diversity=_diversity(options, k, catalogue, prefix) if apart else None,
            floors=_floors(options, catalogue, f"{prefix}at_least") if options.at_least else (),
            restrictions=options.restrictions,
        )

    def like(self, row: int, *, alone: bool) -> ResolvedQuery:
        """Return the query for labels near one label, which is excluded.

        Args:
            alone: only labels chosen together with it count.
        """
        before = self.filter or Filter()
        exclude = np.array([row]) if before.exclude is None else before.exclude
        at = np.searchsorted(exclude, row)
        if row not in exclude[at : at + 1]:
            exclude = np.insert(exclude, at, row)
        query = replace(self, filter=replace(before, exclude=exclude), history_H=np.array([row]))
        if not alone:
            return query
        return replace(query, bias_removal=0.0, popularity=0.0, cooccurrence=1.0, chosen_with=True)


def _shown(asked: Literal[False] | list[str], catalogue: Catalogue, where: str) -> frozenset[str]:
    """Check the columns to show; raises InvalidRequestError for one that the release lacks."""
    columns = catalogue.display_columns
    for place, name in enumerate(asked or ()):
        if name not in columns:
            raise InvalidRequestError(
                f"expected display columns of this release, {list(columns)}, received {describe(name)}",
                field=f"{where}.{place}",
            )
    return frozenset(asked or ())


@dataclass(frozen=True, slots=True)
class Diversity:
    """Settings for diverse answers.

    Attributes:
        max_per: most labels per value of a column, by column.
        weight: w of MMR, from 0, where only the score counts, to 1.
        pool: initial size of the pool, at least k.
        most: largest size of the pool.
    """

    max_per: Mapping[str, int]
    weight: float
    pool: int
    most: int


@dataclass(frozen=True, slots=True)
class Floor:
    """A least number of an answer's labels, of a bucket or that meet conditions.

    Attributes:
        n: the least number.
        bucket: 0 head, 1 torso, 2 tail, 3 new; None: of all buckets.
        json: the floor as the request has it.
    """

    n: int
    bucket: int | None
    conditions: tuple[Condition, ...]
    json: Mapping[str, JsonValue]


def _most_pooled(k: int, mmr: float | None) -> int:
    """Return the largest pool for an answer of k labels."""
    return max(k, min(MOST_POOL, _MOST_COMPARED // k) if mmr else MOST_POOL)


def first_pool(asked: int | None, k: int, labels: int) -> int:
    """Return the initial size of the pool: the request's, or 4·k and at least 100."""
    return min(max(_LEAST_POOLED, _POOLED_PER_RESULT * k) if asked is None else asked, max(MOST_POOL, k), labels)


def _diversity(options: SearchOptions, k: int, catalogue: Catalogue, prefix: str) -> Diversity | None:
    """Read the settings of diversity, None without any; raises InvalidRequestError."""
    columns = catalogue.attributes.kinds
    for name in options.max_per:
        if name not in columns:
            field = f"{prefix}max_per.{name[:_LONGEST_NAME]}"
            raise InvalidRequestError(unfilterable(name, list(columns)), field=field)
    asked = [name for name, given in (("max_per", bool(options.max_per)), ("mmr", options.mmr is not None)) if given]
    if options.pool is not None and not asked:
        raise InvalidRequestError("expected max_per or mmr beside pool, received neither", field=f"{prefix}pool")
    most = _most_pooled(options.k, options.mmr)
    if options.pool is not None and not options.k <= options.pool <= most:
        raise InvalidRequestError(
            f"expected {options.k} <= pool <= {most}, from k on, received {describe(options.pool)}",
            field=f"{prefix}pool",
        )
    if asked and any(options.explore.values()):
        raise InvalidRequestError(
            f"expected explore or {' and '.join(asked)}, received both: what is drawn at random is not kept apart",
            field=f"{prefix}explore",
        )
    weight = options.mmr or 0.0
    if not options.max_per and weight == 0:
        return None
    pool = min(first_pool(options.pool, k, catalogue.labels), most)
    return Diversity(dict(options.max_per), weight, pool, most)


def _explored(options: SearchOptions, where: str) -> dict[int, int]:
    """Read the slots to draw by bucket, 0 head, 1 torso, …; raises InvalidRequestError."""
    asked = sum(options.explore.values())
    if asked > options.k:
        raise InvalidRequestError(
            f"expected at most k = {options.k} slots to explore together, received {describe(asked)}", field=where
        )
    for bucket in options.explore:
        if options.buckets is not None and bucket not in options.buckets:
            raise InvalidRequestError(
                f"expected buckets to explore that may be answered, {options.buckets}, received {bucket!r}",
                field=f"{where}.{bucket}",
            )
    return {BUCKET_NAMES.index(bucket): slots for bucket, slots in options.explore.items() if slots}


def _floors(options: SearchOptions, catalogue: Catalogue, where: str) -> list[Floor]:
    """Read the floors of a request; raises InvalidRequestError."""
    drawn = sum(options.explore.values())
    places = sum(floor.n for floor in options.at_least)
    if places + drawn > options.k:
        of_chance = f" less the {drawn} slots to explore" if drawn else ""
        raise InvalidRequestError(
            f"expected floors of together at most k = {options.k} labels{of_chance}, received {describe(places)}",
            field=where,
        )
    floors = []
    for position, floor in enumerate(options.at_least):
        if options.buckets is not None and floor.bucket is not None and floor.bucket not in options.buckets:
            raise InvalidRequestError(
                f"expected floors of buckets that may be answered, {options.buckets}, received {floor.bucket!r}",
                field=f"{where}.{position}.bucket",
            )
        bucket = None if floor.bucket is None else BUCKET_NAMES.index(floor.bucket)
        conditions = catalogue.attributes.read(floor.filter, f"{where}.{position}.filter")
        floors.append(Floor(floor.n, bucket, conditions, floor.model_dump(exclude_unset=True)))
    return floors
