"""Define what callers send, and the request of each method.

Fields that the caller does not set are left out of the JSON, so that the service's defaults apply.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

from longtail.client.answers import Answer, BucketName, LabelState, T

LabelId = str | int
"""A label's id; `1` and `"1"` are the same label."""
Features = Mapping[str, Any]
"""JSON values by feature name, as `release()["query_features"]` lists them."""
Json = dict[str, Any]
"""An answer in the form of the service's OpenAPI document."""
Item = TypeVar("Item")
_SEVERAL = ("exclude", "allow", "buckets", "display", "labels", "ids", "history")
"""Fields that refuse a single string, because its characters would be taken for ids."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query: features or a vector, the dials, and conditions on the answered labels.

    Args:
        features: inputs of the query tower by name; None or absent values count as missing.
        k: number of labels; fewer are returned if fewer are eligible.
        bias_removal: λ of `u·v/T + b + λ·log ν + μ·log π` [METHODS §6]; None: the release's default, 0 for `similar`.
        popularity: μ of the same score: above 0 favours frequent labels, below 0 rare ones; None: the release's
            default, 0 for `similar`.
        cooccurrence: ω of `… + ω·c`, the weight of what was chosen together with the query's last labels; None: the
            release's default, 0 for `similar`.
        priors: weights of the release's priors, such as `{"recent": 0.5}`; absent priors get the release's default, 0
            for `similar`.
        bonus: bonus β of labels, by bucket or by the name of one of the release's filters, such as `{"tail": 1.5}`.
        slope: weights of columns of numbers, in logits per unit, such as `{"price": -0.02}`.
        decay: `column` of dates, `half_life` such as `7d`, and `weight`: how scores fade with the age of labels.
        exclude: ids that the answer must not contain.
        exclude_history: whether to exclude the labels of the query's history; None: the release's default.
        explain: whether to return the parts of each label's score, and the interval of λ in which the label is among
            the k best.
        allow: if given, only these ids may be answered; an empty list allows none.
        buckets: if given, only labels of these frequency buckets may be answered.
        filter: conditions that labels' columns must meet, such as `{"brand": {"in": ["a", "b"]}, "price": {"lt": 20}}`;
            `release()["filterable"]` lists the columns.
        explore: numbers of slots by bucket to draw at random from the bucket's best labels, such as `{"new": 2}`.
        at_least: floors, such as `[{"bucket": "tail", "n": 1}, {"filter": {"brand": "brand3"}, "n": 2}]`: at least n of
            the k labels are of a bucket or pass a filter, at the least loss of summed scores.
        max_per: most labels per value of a column, such as `{"brand": 2}`.
        mmr: weight of maximal marginal relevance, from 0 to 1, for diverse labels.
        pool: number of labels that `max_per` and `mmr` choose from.
        display: columns to return with each label: True all (the default), False none, or their names.
        vector: u in place of features, such as one from `embed`: `release()["dim"]` numbers, scaled to length 1 if the
            release's `similarity` is cosine.
        history: ids of the labels that the query chose, the latest last, unless a feature holds them; None: the
            labels that the release remembers of the query.
    """

    features: Features | None = None
    k: int | None = None
    bias_removal: float | None = None
    popularity: float | None = None
    cooccurrence: float | None = None
    priors: Mapping[str, float] | None = None
    bonus: Mapping[str, float] | None = None
    slope: Mapping[str, float] | None = None
    decay: Mapping[str, Any] | None = None
    exclude: Collection[LabelId] | None = None
    allow: Collection[LabelId] | None = None
    buckets: Collection[BucketName] | None = None
    filter: Mapping[str, Any] | None = None
    explore: Mapping[BucketName, int] | None = None
    at_least: Collection[Mapping[str, Any]] | Mapping[str, Any] | None = None
    max_per: Mapping[str, int] | None = None
    mmr: float | None = None
    pool: int | None = None
    display: bool | Collection[str] | None = None
    vector: Sequence[float] | None = None
    exclude_history: bool | None = None
    explain: bool | None = None
    history: Collection[LabelId] | None = None

    def json(self) -> dict[str, Any]:
        """Return the query as JSON; raises ValueError unless it has either features or a vector."""
        _require_one(features=self.features, vector=self.vector)
        sent = _json(self)
        if self.vector is not None:
            sent["vector"] = list(map(float, self.vector))
        return sent


class Listing(TypedDict, total=False):
    """Options of `labels`: state of the labels, and the size of a page."""

    state: LabelState
    bucket: BucketName
    limit: int


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label to add, or to replace if it was added before.

    Args:
        id: the label's id.
        features: inputs of the label tower by name.
        display: columns to return in answers, such as a title.
        priors: values of the release's priors, such as `{"recent": 0.3}`.
    """

    id: LabelId
    features: Features
    display: Mapping[str, Any] | None = None
    priors: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """A choice from a result, or without one (an organic interaction, for organic recall).

    Args:
        answer_id: id of the result; None: organic, and `features` are those of the query before the choice.
        labels: ids of the chosen labels.
        features: features of the query, for training on the choice; None: the choice only counts in the figures.
        event: type of the event, such as `purchase`. The service takes None for `click`.
        weight: weight in training; None: the service's default, 1.
        bias_removal, popularity, cooccurrence: for an organic choice: λ, μ and ω at which the service is measured.
        exclude: for an organic choice: ids that the answer would not have contained.
        exclude_history: for an organic choice: whether to exclude the labels of the query's history.
        history: for an organic choice: ids of the labels that the query chose before, the latest last.
        idempotency_key: key by which repeated events are recognised, at most 128 characters.
    """

    answer_id: str | None
    labels: Collection[LabelId]
    features: Features | None = None
    event: str | None = None
    weight: float | None = None
    bias_removal: float | None = None
    popularity: float | None = None
    cooccurrence: float | None = None
    exclude: Collection[LabelId] | None = None
    exclude_history: bool | None = None
    history: Collection[LabelId] | None = None
    idempotency_key: str = field(default_factory=lambda: uuid4().hex, compare=False)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One idempotent request, without host and key, with the type of its answer."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    answer: type[T]
    body: Mapping[str, Any] | None = None


def retrieve(
    queries: Query | Iterable[Query] | None = None,
    *,
    features: Features | None = None,
    release: str | None = None,
    preview: bool = False,
    answer_ids: bool = True,
    unit: str | None = None,
    arm: str | None = None,
    **selection: Any,
) -> Call[Answer]:
    """Get the best labels for each query.

    Args:
        queries: one query or several; None: a single query given by keywords, the fields of `Query`.
        features: features of the single query.
        release: name of a loaded release; None: the current one.
        preview: no user sees the answer, so no figures include it.
        answer_ids: give each result an `answer_id`, for feedback.
        unit: unit of an experiment, such as a user; the same unit always gets the same arm. None: a feature decides.
        arm: name of the arm that answers; None: the unit's arm.
        selection: the other fields of the single query.
    """
    if isinstance(queries, Mapping):
        raise ValueError(f"expected a Query or several, received features: did you mean features={dict(queries)!r}?")
    _require_one(queries=queries, features=features)
    if queries is not None and selection:
        raise ValueError(f"expected {', '.join(selection)} in every Query, received them as well as queries")
    sent = [query.json() for query in _list(Query(features, **selection) if queries is None else queries)]
    options = _set_options(
        release=release, preview=preview or None, answer_ids=None if answer_ids else False, unit=unit, arm=arm
    )
    return Call("POST", "/v1/retrieve", Answer, {"queries": sent, **options})


def similar(
    ids: LabelId | Iterable[LabelId],
    *,
    by: Literal["embedding", "cooccurrence"] | None = None,
    release: str | None = None,
    preview: bool = False,
    answer_ids: bool = True,
    **selection: Any,
) -> Call[Answer]:
    """Get the labels nearest to each of the given labels, without the label itself.

    Args:
        ids: id of one label, or ids of several.
        by: `embedding`, labels like it, which is the default; or `cooccurrence`, labels chosen together with it.
        release, preview, answer_ids: see `retrieve`.
        selection: fields of a `Query`.
    """
    options = _set_options(by=by, release=release, preview=preview or None, answer_ids=None if answer_ids else False)
    sent = Query({}, **selection).json() | options
    del sent["features"]
    body = {"ids": list(ids)} if isinstance(ids, Iterable) and not isinstance(ids, str) else {"id": ids}
    return Call("POST", "/v1/similar", Answer, {**body, **sent})


def queries_for(
    ids: LabelId | Iterable[LabelId] | None = None,
    *,
    features: Features | None = None,
    by: Literal["log_p", "choices"] | None = None,
    release: str | None = None,
    **selection: Any,
) -> Call[Json]:
    """Get the known queries that are likeliest to choose each label.

    Args:
        ids: id of one label, or ids of several.
        features: features of a label that the release lacks, in place of `ids`.
        by: `log_p`, how likely the next choice is the label, which is the default; or `choices`, among the next n.
        release: see `retrieve`.
        selection: `k`, `bias_removal`, `filter`, `exclude`, `exclude_history` and `display`, of queries.
    """
    _require_one(ids=ids, features=features)
    several = isinstance(ids, Iterable) and not isinstance(ids, str)
    label = _several("ids", ids) if several else _set_options(id=ids, features=features)  # type: ignore[arg-type]
    sent = Query({}, **selection).json() | _set_options(by=by, release=release)
    del sent["features"]
    return Call("POST", "/v1/queries", Json, {**sent, **label})


def embed(
    queries: Features | Iterable[Features] | None = None,
    *,
    labels: Collection[LabelId] | None = None,
    release: str | None = None,
) -> Call[Json]:
    """Get the vectors of queries, or of labels: u or v of the scores `u·v/T + …`.

    Args:
        queries: features of one query or of several.
        labels: ids of labels, in place of `queries`.
        release: see `retrieve`.
    """
    _require_one(queries=queries, labels=labels)
    features = [queries] if isinstance(queries, Mapping) else queries or ()
    sent = (
        {"queries": [{"features": dict(query)} for query in features]} if labels is None else _several("labels", labels)
    )
    return Call("POST", "/v1/embed", Json, sent | _set_options(release=release))


def label(id: LabelId) -> Call[Json]:
    """Get all data of one label; raises NotFoundError for an unknown one."""
    return Call("GET", _label_path(id), Json)


def label_page(cursor: str | None, listing: Listing) -> Call[Json]:
    """Get one page of labels, starting after a cursor."""
    options = _set_options(cursor=cursor, **listing)
    return Call("GET", f"/v1/labels?{urlencode(options)}" if options else "/v1/labels", Json)


def add_labels(labels: NewLabel | Iterable[NewLabel]) -> Call[Json]:
    """Add labels by their features; when this returns, they are stored and retrievable. Needs an admin key."""
    return Call("POST", "/v1/labels", Json, {"labels": [_json(label) for label in _list(labels)]})


def patch_label(id: LabelId, display: Mapping[str, Any]) -> Call[Json]:
    """Change columns of a label, such as its price. Needs an admin key."""
    return Call("PATCH", _label_path(id), Json, {"display": dict(display)})


def patch_labels(display: Mapping[LabelId, Mapping[str, Any]]) -> Call[Json]:
    """Change columns of labels by id, all or none. Needs an admin key.

    Raises NotFoundError, which names a hidden or unknown label.
    """
    return Call(
        "PATCH",
        "/v1/labels",
        Json,
        {"labels": [{"id": id, "display": dict(columns)} for id, columns in display.items()]},
    )


def delete_label(id: LabelId) -> Call[Json]:
    """Delete an added label, or hide a label of the release. Needs an admin key.

    NotFoundError may mean that a first attempt deleted the label, and only its answer was lost.
    """
    return Call("DELETE", _label_path(id), Json)


def delete_labels(ids: Collection[LabelId]) -> Call[Json]:
    """Delete or hide labels in one write, all or none. Needs an admin key."""
    return Call("POST", "/v1/labels/delete", Json, _several("ids", ids))


def restore_labels(ids: Collection[LabelId]) -> Call[Json]:
    """Restore hidden labels in one write, all or none. Needs an admin key."""
    return Call("POST", "/v1/labels/restore", Json, _several("ids", ids))


def feedback(events: Feedback | Iterable[Feedback]) -> Call[Json]:
    """Report choices from results; when this returns, they are stored durably, and exported once."""
    return Call("POST", "/v1/feedback", Json, {"events": [_json(event) for event in _list(events)]})


def release(*, curve: bool = False) -> Call[Json]:
    """Get the release being served: the features of a query, an example of them, the model and the dial.

    Args:
        curve: with the offline figures at every λ and μ, in `bias_removal`; tens of kilobytes.
    """
    return Call("GET", "/v1/release?include=curve" if curve else "/v1/release", Json)


def staged() -> Call[Json]:
    """Get the comparison of the staged release with the current one; raises NotFoundError without one."""
    return Call("GET", "/v1/release/staged", Json)


def monitoring() -> Call[Json]:
    """Get figures by bucket for the last minutes, hour and day, and the baseline."""
    return Call("GET", "/v1/monitoring", Json)


def reload() -> Call[Json]:
    """Load the published release now instead of at the next poll. Needs an admin key."""
    return Call("POST", "/v1/release/reload", Json)


def _json(item: Any) -> dict[str, Any]:
    """Convert a dataclass to JSON without the fields that are None."""
    sent: dict[str, Any] = {}
    for name in (attribute.name for attribute in fields(item)):
        value = getattr(item, name)
        if value is not None:
            several = name in _SEVERAL and not isinstance(value, bool | Mapping)
            sent |= _several(name, value) if several else {name: dict(value) if isinstance(value, Mapping) else value}
    return sent


def _require_one(**options: object) -> None:
    """Raise ValueError unless exactly one of two arguments is given."""
    present = [name for name, value in options.items() if value is not None]
    if len(present) != 1:
        raise ValueError(f"expected either {' or '.join(options)}, received {'both' if present else 'neither'}")


def _several(name: str, values: Collection[LabelId]) -> dict[str, Any]:
    if isinstance(values, str):
        raise TypeError(f"{name}: expected a collection, received one string {values!r}")
    return {name: list(values)}


def _set_options(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _list(one_or_several: Item | Iterable[Item]) -> list[Item]:
    return list(one_or_several) if isinstance(one_or_several, Iterable) else [one_or_several]


def _label_path(id: LabelId) -> str:
    """Return a label's path. Slashes are quoted; so are `.` and `..`, which URLs would resolve."""
    quoted = quote(str(id), safe="")
    return f"/v1/labels/{quoted.replace('.', '%2E') if quoted in ('.', '..') else quoted}"
