"""What a caller sends, as JSON, and the request each method of the clients makes of it.

What the caller leaves open is left out of the JSON, so that the service's defaults hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode
from uuid import uuid4

from longtail.client.responses import BucketName, LabelState

LabelId = str | int
"""A label's id; `1` and `"1"` are the same label."""
Features = Mapping[str, Any]
"""JSON values by feature name, as `release()["query_features"]` lists them."""

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Query:
    """Features of one query, or a vector in their place, and which labels may answer it.

    Args:
        features: what the query tower reads; None or absent means missing.
        k: labels wanted; None: the service's default.
        bias_removal: λ of `u·v/T + b + λ·log ν + μ·log π` [METHODS §6]; None: the release's default.
        exclude: ids never to answer.
        allow: if given, only these ids may be answered; empty allows none.
        buckets: if given, only labels of these frequency buckets may be answered.
        popularity: μ of the same: above 0 favours frequent labels, below 0 rare ones; None: the release's default.
        explore: slots by bucket that are drawn at random from its best labels, such as `{"new": 2}`; None: none.
        display: columns that come with each label: True all, False none, or their names; None: all.
        priors: weights of the release's priors, such as `{"recent": 0.5}`; None, or left out: the default.
        vector: u in place of features, such as one of `embed`: `release()["dim"]` numbers, scored as they are.
        filter: conditions that labels' columns must meet, such as `{"brand": {"in": ["a", "b"]}, "price": {"lt": 20}}`;
            `release()["filterable"]` lists the columns; None: none.
        max_per: labels for each value of such a column, at most, such as `{"brand": 2}`; None: any number.
        mmr: weight of maximal marginal relevance, from 0 to 1, for labels unlike each other; None: off.
        pool: labels that `max_per` and `mmr` choose from; None: the service's default.
    """

    features: Features | None = None
    k: int | None = None
    bias_removal: float | None = None
    exclude: Collection[LabelId] = ()
    allow: Collection[LabelId] | None = None
    buckets: Collection[BucketName] | None = None
    popularity: float | None = None
    explore: Mapping[BucketName, int] | None = None
    display: bool | Collection[str] | None = None
    priors: Mapping[str, float] | None = None
    vector: Sequence[float] | None = None
    filter: Mapping[str, Any] | None = None
    max_per: Mapping[str, int] | None = None
    mmr: float | None = None
    pool: int | None = None

    def json(self) -> dict[str, Any]:
        """The query as the service reads it.

        Raises:
            ValueError: both or neither of features and vector.
            TypeError: as `selection_json`.
        """
        if (self.features is None) == (self.vector is None):
            received = "neither" if self.features is None else "both"
            raise ValueError(f"expected either features or vector, received {received}")
        selected = selection_json(
            self.k,
            self.bias_removal,
            self.popularity,
            self.exclude,
            self.allow,
            self.buckets,
            self.explore,
            self.display,
            self.priors,
            self.filter,
            self.max_per,
            self.mmr,
            self.pool,
        )
        if self.vector is not None:
            return {"vector": list(map(float, self.vector)), **selected}
        return {"features": dict(self.features or {}), **selected}


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label to add, or to replace if it was added before.

    Args:
        id: the label's id.
        features: what the label tower reads.
        display: columns that come back in answers, such as a title.
        priors: values of the release's priors, such as `{"recent": 0.3}`; of those left out, what the release gives it.
    """

    id: LabelId
    features: Features
    display: Mapping[str, Any] | None = None
    priors: Mapping[str, float] | None = None

    def json(self) -> dict[str, Any]:
        """The label as the service reads it."""
        display = {} if self.display is None else {"display": dict(self.display)}
        priors = {} if self.priors is None else {"priors": dict(self.priors)}
        return {"id": self.id, "features": dict(self.features), **display, **priors}


@dataclass(frozen=True, slots=True)
class Feedback:
    """What was chosen from an answer.

    Args:
        request_id: the answer's, where there is no `answer_id`, as of a service older than these. Gateways may give
            several requests one id: such feedback is left out.
        labels: ids of what was chosen.
        query: which of the answer's results it was, from 0.
        event: what was done, such as `purchase`; None: the service's default, `click`.
        weight: what it is worth in training; None: the service's default, 1.
        answer_id: the answer's; counts where both are given.
    """

    request_id: str | None = None
    labels: Collection[LabelId] = ()
    query: int = 0
    event: str | None = None
    weight: float | None = None
    answer_id: str | None = None

    def json(self) -> dict[str, Any]:
        """The event as the service reads it.

        Raises:
            TypeError: labels is one string.
            ValueError: neither id.
        """
        if self.answer_id is not None:
            name = {"answer_id": self.answer_id}
        elif self.request_id is not None:
            name = {"request_id": self.request_id}
        else:
            raise ValueError("expected an answer_id, or the request_id of an older service's answer, received neither")
        chosen = {**name, "query": self.query, "labels": _several("labels", self.labels)}
        return chosen | _event_json(self.event, self.weight)


@dataclass(frozen=True, slots=True)
class Interaction:
    """What was chosen without an answer of the service (an organic interaction), for shadow recall.

    Args:
        features: features of the query as it was before the choice.
        labels: ids of what was chosen.
        bias_removal: λ at which the service is measured; None: the release's default.
        exclude: ids that would not have been answered.
        popularity: μ at which the service is measured; None: the release's default.
        event, weight: as of `Feedback`.
        idempotency_key: by which the service knows it when it comes again, at most 128 characters; made anew for every
            interaction unless given. None: there is none, as a service older than these keys wants it.
    """

    features: Features
    labels: Collection[LabelId]
    bias_removal: float | None = None
    exclude: Collection[LabelId] = ()
    popularity: float | None = None
    event: str | None = None
    weight: float | None = None
    idempotency_key: str | None = field(default_factory=lambda: uuid4().hex, compare=False)

    def json(self) -> dict[str, Any]:
        """The event as the service reads it; raises TypeError if labels or exclude is one string."""
        selected = selection_json(None, self.bias_removal, self.popularity, self.exclude, None, None, None, None, None)
        chosen = {"features": dict(self.features), "labels": _several("labels", self.labels), **selected}
        if self.idempotency_key is not None:
            chosen["idempotency_key"] = self.idempotency_key
        return chosen | _event_json(self.event, self.weight)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, without host and key, and the type of its answer.

    Args:
        method: HTTP method.
        path: below the service's URL, quoted.
        answer: type that the JSON of a 2xx answer is read as, by `responses.read`.
        body: JSON to send; None: no body.
        repeatable: whether sending it twice has the effect of sending it once.
        when_busy: if given, the value where the service is busy or does not answer; then nothing is tried again.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer: type[T]
    body: Mapping[str, Any] | None = None
    repeatable: bool = True
    when_busy: T | None = None


def queries_json(
    queries: Query | Iterable[Query] | None, features: Features | None, selection: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The queries of one `retrieve`: those given, or the single one that features and selection describe.

    Raises:
        ValueError: both or neither of queries and features, or a selection beside queries.
    """
    if (queries is None) == (features is None):
        raise ValueError(f"expected either queries or features, received {'neither' if queries is None else 'both'}")
    if queries is None:
        return [{"features": dict(features or {}), **selection}]
    if selection:
        raise ValueError(f"expected {', '.join(selection)} in every Query, received them beside queries")
    return [query.json() for query in as_list(queries)]


def selection_json(
    k: int | None,
    bias_removal: float | None,
    popularity: float | None,
    exclude: Collection[LabelId],
    allow: Collection[LabelId] | None,
    buckets: Collection[BucketName] | None,
    explore: Mapping[BucketName, int] | None,
    display: bool | Collection[str] | None,
    priors: Mapping[str, float] | None,
    filter: Mapping[str, Any] | None = None,
    max_per: Mapping[str, int] | None = None,
    mmr: float | None = None,
    pool: int | None = None,
) -> dict[str, Any]:
    """Which labels may be answered, how many, on which dials and with which columns, without what was left open.

    Raises:
        TypeError: one string where several are expected; its characters would pass for ids.
    """
    given = {
        "k": k,
        "bias_removal": bias_removal,
        "popularity": popularity,
        "exclude": _several("exclude", exclude) or None,
        "allow": None if allow is None else _several("allow", allow),
        "buckets": None if buckets is None else _several("buckets", buckets),
        "explore": None if explore is None else dict(explore),
        "display": display if display is None or isinstance(display, bool) else _several("display", display),
        "priors": None if priors is None else dict(priors),
        "filter": None if filter is None else dict(filter),
        "max_per": None if max_per is None else dict(max_per),
        "mmr": None if mmr is None else {"weight": mmr},
        "pool": pool,
    }
    return {name: value for name, value in given.items() if value is not None}


def options_json(release: str | None, preview: bool, unit: str | None = None, arm: str | None = None) -> dict[str, Any]:
    """The options of a whole request, without what was left open."""
    given = {"release": release, "preview": preview or None, "unit": unit, "arm": arm}
    return {name: value for name, value in given.items() if value is not None}


def ids_json(ids: Collection[LabelId]) -> dict[str, Any]:
    """The body about some labels; raises TypeError for one string, whose characters would pass for ids."""
    return {"ids": _several("ids", ids)}


def embed_json(
    queries: Features | Iterable[Features] | None, labels: Collection[LabelId] | None, release: str | None
) -> dict[str, Any]:
    """The body of `embed`.

    Raises:
        ValueError: both or neither of queries and labels.
        TypeError: one string in place of labels.
    """
    if (queries is None) == (labels is None):
        raise ValueError(f"expected either queries or labels, received {'neither' if queries is None else 'both'}")
    if labels is not None:
        return {"labels": _several("labels", labels), **options_json(release, False)}
    features = [queries] if isinstance(queries, Mapping) else queries or ()
    return {"queries": [{"features": dict(each)} for each in features], **options_json(release, False)}


def labels_path(
    search: str, state: LabelState | None, bucket: BucketName | None, limit: int | None, cursor: str | None
) -> str:
    """Path and parameters of one page of labels, without what was left open."""
    given = {"limit": limit, "cursor": cursor, "search": search or None, "state": state, "bucket": bucket}
    parameters = urlencode({name: value for name, value in given.items() if value is not None})
    return f"/v1/labels?{parameters}" if parameters else "/v1/labels"


def label_path(id: LabelId) -> str:
    """Path of one label. Slashes are quoted; so are `.` and `..`, which URLs would resolve."""
    quoted = quote(str(id), safe="")
    return f"/v1/labels/{quoted.replace('.', '%2E') if quoted in ('.', '..') else quoted}"


def as_list(one_or_several: Item | Iterable[Item]) -> list[Item]:
    """One item, or an iterable of them, as a list."""
    return list(one_or_several) if isinstance(one_or_several, Iterable) else [one_or_several]


def _event_json(event: str | None, weight: float | None) -> dict[str, Any]:
    return {name: value for name, value in (("event", event), ("weight", weight)) if value is not None}


def _several(name: str, values: Collection[LabelId]) -> list[LabelId]:
    if isinstance(values, str):
        raise TypeError(f"{name}: expected a collection, received one string {values!r}")
    return list(values)
