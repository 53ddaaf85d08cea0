"""What a caller sends, as JSON, and the request that each method of the clients makes of it.

What the caller leaves open is left out of the JSON, so that the service's defaults hold.
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
"""An answer as the service's OpenAPI document describes it."""
Item = TypeVar("Item")
_SEVERAL = ("exclude", "allow", "buckets", "display", "labels", "ids")
"""Fields where one string is refused: its characters would pass for ids."""


@dataclass(frozen=True, slots=True)
class Query:
    """Features of one query, or a vector in their place, and which labels may answer it.

    Args:
        features: what the query tower reads; None or absent means missing.
        k: labels wanted; fewer come back where the release has fewer, or fewer may be answered.
        bias_removal: λ of `u·v/T + b + λ·log ν + μ·log π` [METHODS §6]; None: the release's default, 0 for `similar`.
        popularity: μ of the same: above 0 favours frequent labels, below 0 rare ones; None: as of `bias_removal`.
        priors: weights of the release's priors, such as `{"recent": 0.5}`; left out, likewise.
        exclude: ids never to answer.
        exclude_history: whether labels of the history among the features are left out; None: as the release says.
        explain: whether labels come with the parts of their scores, and the λ between which they are among the k best.
        allow: if given, only these ids may be answered; empty allows none.
        buckets: if given, only labels of these frequency buckets may be answered.
        filter: conditions that labels' columns must meet, such as `{"brand": {"in": ["a", "b"]}, "price": {"lt": 20}}`;
            `release()["filterable"]` lists the columns.
        explore: slots by bucket that are drawn at random from its best labels, such as `{"new": 2}`.
        max_per: labels for each value of a column, at most, such as `{"brand": 2}`.
        mmr: weight of maximal marginal relevance, from 0 to 1, for labels unlike each other.
        pool: labels that `max_per` and `mmr` choose from.
        display: columns that come with each label: True all (the default), False none, or their names.
        vector: u in place of features, such as one of `embed`: `release()["dim"]` numbers, scored as they are.
    """

    features: Features | None = None
    k: int | None = None
    bias_removal: float | None = None
    popularity: float | None = None
    priors: Mapping[str, float] | None = None
    exclude: Collection[LabelId] | None = None
    allow: Collection[LabelId] | None = None
    buckets: Collection[BucketName] | None = None
    filter: Mapping[str, Any] | None = None
    explore: Mapping[BucketName, int] | None = None
    max_per: Mapping[str, int] | None = None
    mmr: float | None = None
    pool: int | None = None
    display: bool | Collection[str] | None = None
    vector: Sequence[float] | None = None
    exclude_history: bool | None = None
    explain: bool | None = None

    def json(self) -> dict[str, Any]:
        """Return the query as the service reads it; raises ValueError unless it has one of features and vector."""
        _one_of(features=self.features, vector=self.vector)
        sent = _json(self)
        if self.vector is not None:
            sent["vector"] = list(map(float, self.vector))
        return sent


class Listing(TypedDict, total=False):
    """Which labels `labels` lists, and how many it reads at a time."""

    state: LabelState
    bucket: BucketName
    limit: int


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label to add, or to replace if it was added before.

    Args:
        id: the label's id.
        features: what the label tower reads.
        display: columns that come back in answers, such as a title.
        priors: values of the release's priors, such as `{"recent": 0.3}`.
    """

    id: LabelId
    features: Features
    display: Mapping[str, Any] | None = None
    priors: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """What was chosen from a result, or without one (an organic interaction, for organic recall).

    Args:
        answer_id: the result's; None: organic, and `features` are those of the query as it was before the choice.
        labels: ids of what was chosen.
        features: of the query, to train on the choice; None: it counts in the figures alone.
        event: what was done, such as `purchase`; None: the service's default, `click`.
        weight: what it is worth in training; None: the service's default, 1.
        bias_removal, popularity: of an organic one, λ and μ at which the service is measured.
        exclude: of an organic one, ids that would not have been answered.
        exclude_history: of an organic one, as of a query.
        idempotency_key: by which the export knows an event that was sent again, at most 128 characters.
    """

    answer_id: str | None
    labels: Collection[LabelId]
    features: Features | None = None
    event: str | None = None
    weight: float | None = None
    bias_removal: float | None = None
    popularity: float | None = None
    exclude: Collection[LabelId] | None = None
    exclude_history: bool | None = None
    idempotency_key: str = field(default_factory=lambda: uuid4().hex, compare=False)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, without host and key, and the type that its answer is read as. Sent twice, it acts once."""

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
        queries: one or several; or none, with the parts of a single one (see `Query`) as keywords.
        features: of that single one.
        release: answers, if the service has it loaded; None: the current one.
        preview: no user sees the answer, so that no figure counts it.
        answer_ids: give each result an `answer_id`, for feedback.
        unit: a user, say: while an experiment runs, the same unit gets the same arm; None: a feature says.
        arm: answer as this arm does; None: as the unit's does.
        selection: the other parts of the single query.
    """
    _one_of(queries=queries, features=features)
    if queries is not None and selection:
        raise ValueError(f"expected {', '.join(selection)} in every Query, received them beside queries")
    sent = [query.json() for query in _list(Query(features, **selection) if queries is None else queries)]
    options = _given(
        release=release, preview=preview or None, answer_ids=None if answer_ids else False, unit=unit, arm=arm
    )
    return Call("POST", "/v1/retrieve", Answer, {"queries": sent, **options})


def similar(
    ids: LabelId | Iterable[LabelId],
    *,
    release: str | None = None,
    preview: bool = False,
    answer_ids: bool = True,
    **selection: Any,
) -> Call[Answer]:
    """Get the labels nearest to each of the given labels, itself left out.

    Args:
        ids: one label, or several.
        release, preview, answer_ids: as for `retrieve`.
        selection: parts of a `Query`.
    """
    options = _given(release=release, preview=preview or None, answer_ids=None if answer_ids else False)
    sent = Query({}, **selection).json() | options
    del sent["features"]
    asked = {"id": ids} if isinstance(ids, str | int) else {"ids": list(ids)}
    return Call("POST", "/v1/similar", Answer, {**asked, **sent})


def embed(
    queries: Features | Iterable[Features] | None = None,
    *,
    labels: Collection[LabelId] | None = None,
    release: str | None = None,
) -> Call[Json]:
    """Get the vectors of queries, or of labels: u or v of the scores `u·v/T + …`.

    Args:
        queries: features of one query or of several.
        labels: or ids of labels.
        release: as for `retrieve`.
    """
    _one_of(queries=queries, labels=labels)
    features = [queries] if isinstance(queries, Mapping) else queries or ()
    sent = (
        {"queries": [{"features": dict(each)} for each in features]} if labels is None else _several("labels", labels)
    )
    return Call("POST", "/v1/embed", Json, sent | _given(release=release))


def label(id: LabelId) -> Call[Json]:
    """Get what the release knows about one label; raises NotFoundError for an unknown one."""
    return Call("GET", _label_path(id), Json)


def label_page(cursor: str | None, listing: Listing) -> Call[Json]:
    """Get one page of the labels, from a cursor on."""
    given = _given(cursor=cursor, **listing)
    return Call("GET", f"/v1/labels?{urlencode(given)}" if given else "/v1/labels", Json)


def add_labels(labels: NewLabel | Iterable[NewLabel]) -> Call[Json]:
    """Add labels from their features; on disk and retrievable when this returns. Needs an admin key."""
    return Call("POST", "/v1/labels", Json, {"labels": [_json(label) for label in _list(labels)]})


def patch_label(id: LabelId, display: Mapping[str, Any]) -> Call[Json]:
    """Change columns of a label, such as its price. Needs an admin key."""
    return Call("PATCH", _label_path(id), Json, {"display": dict(display)})


def patch_labels(display: Mapping[LabelId, Mapping[str, Any]]) -> Call[Json]:
    """Change columns of labels by id, all or none. Needs an admin key.

    NotFoundError names a label that is hidden or unknown.
    """
    return Call(
        "PATCH", "/v1/labels", Json, {"labels": [{"id": id, "display": dict(of)} for id, of in display.items()]}
    )


def delete_label(id: LabelId) -> Call[Json]:
    """Take a label out of every answer: an added one is deleted, one of the catalogue hidden. Needs an admin key.

    NotFoundError may mean that a first attempt deleted it, and that only its answer was lost.
    """
    return Call("DELETE", _label_path(id), Json)


def delete_labels(ids: Collection[LabelId]) -> Call[Json]:
    """Take labels out of every answer, all in one write to disk, or none. Needs an admin key."""
    return Call("POST", "/v1/labels/delete", Json, _several("ids", ids))


def restore_labels(ids: Collection[LabelId]) -> Call[Json]:
    """Bring hidden labels of the catalogue back, all in one write to disk, or none. Needs an admin key."""
    return Call("POST", "/v1/labels/restore", Json, _several("ids", ids))


def feedback(events: Feedback | Iterable[Feedback]) -> Call[Json]:
    """Report what was chosen from results; kept for good when this returns, and exported once."""
    return Call("POST", "/v1/feedback", Json, {"events": [_json(event) for event in _list(events)]})


def release(*, curve: bool = False) -> Call[Json]:
    """Get the release being served: the features of a query, an example of them, the model and the dial.

    Args:
        curve: with the offline figures at every λ and μ, in `bias_removal`; tens of kilobytes.
    """
    return Call("GET", "/v1/release?include=curve" if curve else "/v1/release", Json)


def staged() -> Call[Json]:
    """Get how the staged release would have answered a share of live queries; raises NotFoundError without one."""
    return Call("GET", "/v1/release/staged", Json)


def monitoring() -> Call[Json]:
    """Get what head, torso, tail and new labels got in the last minutes, hour and day, and the baseline."""
    return Call("GET", "/v1/monitoring", Json)


def reload() -> Call[Json]:
    """Load the published release now instead of at the next poll. Needs an admin key."""
    return Call("POST", "/v1/release/reload", Json)


def _json(item: Any) -> dict[str, Any]:
    """Return a dataclass as JSON, without what is None."""
    sent: dict[str, Any] = {}
    for name in (one.name for one in fields(item)):
        value = getattr(item, name)
        if value is not None:
            several = name in _SEVERAL and not isinstance(value, bool | Mapping)
            sent |= _several(name, value) if several else {name: dict(value) if isinstance(value, Mapping) else value}
    return sent


def _one_of(**given: object) -> None:
    """Raise ValueError unless one of two arguments is given."""
    present = [name for name, value in given.items() if value is not None]
    if len(present) != 1:
        raise ValueError(f"expected either {' or '.join(given)}, received {'both' if present else 'neither'}")


def _several(name: str, values: Collection[LabelId]) -> dict[str, Any]:
    if isinstance(values, str):
        raise TypeError(f"{name}: expected a collection, received one string {values!r}")
    return {name: list(values)}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _list(one_or_several: Item | Iterable[Item]) -> list[Item]:
    return list(one_or_several) if isinstance(one_or_several, Iterable) else [one_or_several]


def _label_path(id: LabelId) -> str:
    """Return a label's path. Slashes are quoted; so are `.` and `..`, which URLs would resolve."""
    quoted = quote(str(id), safe="")
    return f"/v1/labels/{quoted.replace('.', '%2E') if quoted in ('.', '..') else quoted}"
