"""Define bodies and answers of /v1/retrieve, /v1/similar, /v1/queries and /v1/embed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from longtail.bundle.errors import describe
from longtail.serving.core.queries import (
    MAX_IDS,
    AtLeast,
    BucketName,
    Decay,
    OfLabels,
    QueriesFor,
    RetrieveQuery,
    SearchOptions,
    SimilarQuery,
    ToEmbed,
)
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.bridge import Body, at_most, check_lengths
from longtail.serving.settings import MOST_QUERIES, Settings

_RELEASE = Field(
    default=None, max_length=128, description="Answer from this release, if it is loaded still. Null: the current one."
)
_PREVIEW = Field(
    default=False, description="Whether no user will see the answer, so that exposure, drift and recall leave it out."
)
_LONGEST_NAME = 100
_EXPLAINED = 50
"""Largest k of a query with `explain`."""
_ANSWER_IDS = Field(default=True, description="Give every result an `answer_id`, for feedback.")


class _SearchBody(Body):
    """Base of the bodies that search."""

    def check_limits(self, settings: Settings) -> None:
        """Check counts, options and lengths of lists."""
        options: Sequence[SearchOptions | QueriesFor] = self.queries if isinstance(self, RetrieveRequest) else [self]  # type: ignore[list-item]
        ids = len(self.labels) if isinstance(self, OfLabels) else 0
        if (count := max(len(options), ids)) > settings.max_queries:
            name = "ids" if ids else "queries"
            raise InvalidRequestError(f"expected at most {settings.max_queries} {name}, received {count}", field=name)
        explained = 0
        for i, query in enumerate(options):
            prefix = f"queries.{i}." if isinstance(self, RetrieveRequest) else ""
            if query.k > settings.max_k:
                raise InvalidRequestError(
                    f"expected k <= {settings.max_k}, received {describe(query.k)}", field=f"{prefix}k"
                )
            features = query.features if isinstance(query, RetrieveQuery | QueriesFor) else None
            entries = [(f"features.{name[:_LONGEST_NAME]}", value) for name, value in (features or {}).items()]
            for column, condition in query.filter.items():
                for operator, value in condition.items() if isinstance(condition, dict) else ():
                    entries.append((f"filter.{column[:_LONGEST_NAME]}.{operator[:_LONGEST_NAME]}", value))
            for name, value in entries:
                if isinstance(value, list | dict) and len(value) > MAX_IDS:
                    at_most(len(value), MAX_IDS, "entries", prefix + name)
            if isinstance(query, RetrieveQuery) and query.explain:
                explained += 1
                if explained > 1 or query.k > _EXPLAINED:
                    raise InvalidRequestError(
                        f"expected one query with explain, of k <= {_EXPLAINED}, because it takes some hundred "
                        f"searches, received {'two' if explained > 1 else f'one of k = {query.k}'}",
                        field=f"{prefix}explain",
                    )


class RetrieveRequest(_SearchBody):
    """Body of POST /v1/retrieve."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"queries": [{"features": {"user_id": "42"}, "k": 10}]}]})

    queries: list[RetrieveQuery] = Field(min_length=1, max_length=MOST_QUERIES)
    release: str | None = _RELEASE
    preview: bool = _PREVIEW
    answer_ids: bool = _ANSWER_IDS
    unit: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="User or other unit of an experiment; equal units get the same arm. Null: the "
        "experiment's feature, per query. Ignored while no experiment runs.",
    )
    arm: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Answer as this arm of the experiment does, and leave the answer out of its figures unless the "
        "unit is in that arm. Null: the unit's arm. Ignored while no experiment runs.",
    )


class SimilarRequest(SimilarQuery, _SearchBody):
    """Body of POST /v1/similar: one label's id, or several in `ids`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "50", "k": 10}]})

    release: str | None = _RELEASE
    preview: bool = _PREVIEW
    answer_ids: bool = _ANSWER_IDS


class QueriesRequest(QueriesFor, _SearchBody):
    """Body of POST /v1/queries: a label's id, several in `ids`, or the features of a new label."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": "50", "k": 100, "filter": {"country": "NO"}}]})

    release: str | None = _RELEASE


class EmbedRequest(ToEmbed, Body):
    """Body of POST /v1/embed: queries, or labels by their ids."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"queries": [{"features": {"user_id": "42"}}]}]})

    release: str | None = _RELEASE

    def check_limits(self, settings: Settings) -> None:
        """Check the number of requested vectors."""
        name = "queries" if self.labels is None else "labels"
        at_most(self.count, settings.max_queries, name, name)
        check_lengths([query.features for query in self.queries or ()], "queries.{}.features")


class EmbedAnswer(BaseModel):
    """Answer of POST /v1/embed."""

    vectors: list[list[float]] = Field(
        description="Vectors of the queries or labels in order, float32: u or v of `u·v/T`, of norm 1 if `similarity` "
        "is cosine. Vectors of different releases cannot be compared."
    )
    dim: int = Field(description="Length of each vector.")
    similarity: Literal["dot", "cosine"]
    temperature: float = Field(description="T of `u·v/T`.")
    release: str
    request_id: str


class Because(BaseModel):
    """An entry of the history behind a label's c."""

    id: str
    share: float = Field(description="Share of c, from 0 to 1; a repeated entry appears once.")


class ForFloors(BaseModel):
    """Why a label that is not among the k best is in the answer."""

    floors: list[int] = Field(description="Positions in `floors` of the floors that the label meets.")
    price: float = Field(
        description="How much the score of the label whose place it has is higher; the prices add up to `cost`."
    )


class Explanation(BaseModel):
    """Parts of a label's score in logits; their sum is the score."""

    taste: float = Field(description="u·v/T.")
    bias: float = Field(description="b.")
    noise: float = Field(description="λ·log ν.")
    popularity: float = Field(description="μ·log π.")
    cooccurrence: float = Field(default=0.0, description="ω·c.")
    because: list[Because] = Field(
        default=[], description="The entries of the history behind c, at most 5, the largest share first."
    )
    priors: dict[str, float] = Field(default={}, description="w·r of each of the release's priors.")
    bonus: dict[str, float] = Field(
        default={}, description="β of each bonus with a weight; 0 if it does not apply to the label."
    )
    slope: dict[str, float] = Field(default={}, description="Weight times the column's distance from its median.")
    decay: float = Field(default=0.0, description="weight · log 2^(−age / half_life).")
    bias_removal: tuple[float, float] | None = Field(
        description="The λ between which the label is among the k best by score, all else as it is, to a thousandth; "
        "changes within a 32nd of the dial may be missed. Null for a label that is not among the k best, such as a "
        "drawn label."
    )
    floor: ForFloors | None = Field(default=None, description="Only for a label that `at_least` added.")


class KeptFloor(AtLeast):
    """A floor of the query, and how many labels of the answer meet it."""

    met: int = Field(description="Below `n` if too few may be answered, or `max_per` leaves them no room.")


class RankedLabel(BaseModel):
    """One label of an answer."""

    id: str
    score: float = Field(
        description="s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c, in logits; r are priors, bonuses, slopes, decay."
    )
    bucket: BucketName
    display: dict[str, JsonValue] = Field(description="The columns that came with the labels: title, …")
    propensity: float = Field(
        default=1.0,
        description="Only for queries that explore: probability that this label is in the answer, 1 if it was not "
        "drawn. Feedback weighted by the inverse is unbiased among the candidates.",
    )
    explanation: Explanation | None = Field(default=None, description="Only of a query with `explain`.")


class Exploration(BaseModel):
    """The random part of the answer to a query that explores."""

    slots: dict[BucketName, int] = Field(
        description="Slots drawn for each bucket; fewer than requested if fewer of its labels are eligible."
    )
    candidates: dict[BucketName, int] = Field(description="Labels that each bucket's slots were drawn from.")
    temperature: float = Field(description="Temperature of the softmax over the candidates' scores, in logits.")


class UnknownIds(BaseModel):
    """Numbers of ids in the request that the release does not know and ignored."""

    query: int = Field(default=0, description="Ids in features of kind `id` or `bag`, and the remembered query's id.")
    history: int = Field(default=0, description="Ids of the history, as far as the answer needed it.")
    exclude: int
    allow: int


class Ranking(BaseModel):
    """The answer to one query, best label first.

    Labels drawn for exploration stand at random positions, and labels chosen by MMR in the order of choice.
    """

    labels: list[RankedLabel]
    bias_removal: float
    popularity: float
    cooccurrence: float = Field(default=0.0, description="ω; left out if the release has no such term.")
    priors: dict[str, float] = Field(default={}, description="Weight of every prior of the release; left out if none.")
    bonus: dict[str, float] = Field(default={}, description="β that is not 0, by name; left out if none.")
    slope: dict[str, float] = Field(default={}, description="Weights of columns that are not 0; left out if none.")
    decay: Decay | None = Field(default=None, description="Only of queries with `decay`.")
    exploration: Exploration | None = Field(default=None, description="Only of queries that explore.")
    pool: int | None = Field(
        default=None,
        description="Only for queries with `max_per` or `mmr`: number of labels that the answer was chosen from.",
    )
    floors: list[KeptFloor] | None = Field(default=None, description="Only of queries with `at_least`.")
    cost: float | None = Field(
        default=None,
        description="Only for queries with `at_least`: the sum of the scores without floors minus the sum with them, "
        "in logits; if the query explores, over the labels that were not drawn. May be below 0 with `mmr` or "
        "`max_per`, or if an approximate search without floors missed a label.",
    )
    unknown: UnknownIds
    answer_id: str | None = Field(
        default=None,
        description="Name of this result in feedback: a signed text with the release, the time, λ, μ, the first 100 "
        "labels and the drawn labels. Absent in a preview, or without `answer_ids`.",
    )


class RetrieveResult(Ranking):
    """The answer to one query, with its arm while an experiment runs."""

    basis: Literal["model", "cooccurrence", "popularity"] = Field(
        description="Score that ranks the labels: `model`, the complete score. If every feature of the "
        "query is missing or unknown: `cooccurrence`, `log π + ω·c`, if its history is known, "
        "otherwise `popularity`, log π alone; π is from the release's forecast if it has one. "
        "The result's λ is then 0 and its μ 1, even if the request sets others.",
    )
    run: str | None = Field(
        default=None, description="The experiment that runs, with a hash of its arms; absent if none does."
    )
    arm: str | None = None
    counted: bool | None = Field(
        default=None,
        description="Whether the comparison of arms counts this answer: not if the request sets an option of the arms "
        "or names another arm than the assigned one, or if the default answers because the arm cannot.",
    )
    release: str | None = Field(default=None, description="Release that answered this query, while an experiment runs.")


class RetrieveAnswer(BaseModel):
    """Answer of POST /v1/retrieve; `release` gave all results, except for an experiment's arms that name another."""

    results: list[RetrieveResult]
    release: str
    request_id: str


class SimilarResult(Ranking):
    """The labels nearest to label `id`, without the label itself."""

    id: str


class SimilarAnswer(BaseModel):
    """Answer of POST /v1/similar."""

    results: list[SimilarResult]
    release: str
    request_id: str


class RankedQuery(BaseModel):
    """One query of an answer."""

    id: str
    score: float = Field(description="s(x, y) of this query and the label, in logits, at ω = 0.")
    log_p: float = Field(description="log p(y|x): s less the logarithm of Σ exp(s) over the labels as built, in nats.")
    choices: float = Field(description="(n + ½)·p(y|x), with n of the index's column of choices, 1 without one.")
    display: dict[str, JsonValue] = Field(description="The query's columns.")


class QueriesResult(BaseModel):
    """The best known queries of one label, best first."""

    id: str | None = Field(default=None, description="The label's id; omitted if the request has features.")
    queries: list[RankedQuery]
    bias_removal: float
    unknown: UnknownIds


class QueriesAnswer(BaseModel):
    """Answer of POST /v1/queries."""

    results: list[QueriesResult]
    release: str
    request_id: str
