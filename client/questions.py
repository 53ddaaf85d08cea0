"""What a caller sends, and its JSON; what is left open is left out of it, for the service's defaults to hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LabelId = str | int
"""A label's id; `1` and `"1"` are the same label."""
BucketName = Literal["head", "torso", "tail"]
Features = Mapping[str, Any]
"""JSON values by feature name, as `release()["query_features"]` lists them."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query.

    Args:
        features: what the query tower reads; None or absent means missing.
        k: labels wanted; None: the service's default.
        bias_removal: λ of `u·v/T + b + λ·log p_n` [METHODS §6]; None: the release's default.
        exclude: ids never to answer.
        allow: if given, only these ids may be answered; empty allows none.
        buckets: if given, only labels of these frequency buckets may be answered.
    """

    features: Features
    k: int | None = None
    bias_removal: float | None = None
    exclude: Collection[LabelId] = ()
    allow: Collection[LabelId] | None = None
    buckets: Collection[BucketName] | None = None

    def json(self) -> dict[str, Any]:
        """The query as the service reads it; raises TypeError as `selection`."""
        selected = selection(self.k, self.bias_removal, self.exclude, self.allow, self.buckets)
        return {"features": dict(self.features), **selected}


@dataclass(frozen=True, slots=True)
class NewLabel:
    """A label to add, or to replace if it was added before.

    Args:
        id: its id.
        features: what the label tower reads.
        display: columns that come back in answers, such as a title.
    """

    id: LabelId
    features: Features
    display: Mapping[str, Any] | None = None

    def json(self) -> dict[str, Any]:
        """The label as the service reads it."""
        display = {} if self.display is None else {"display": dict(self.display)}
        return {"id": self.id, "features": dict(self.features), **display}


@dataclass(frozen=True, slots=True)
class Feedback:
    """What was chosen from an answer.

    Args:
        request_id: the answer's.
        labels: ids of what was chosen.
        query: which of the answer's results it was, from 0.
    """

    request_id: str
    labels: Collection[LabelId]
    query: int = 0

    def json(self) -> dict[str, Any]:
        """The event as the service reads it; raises TypeError if labels is one string."""
        return {"request_id": self.request_id, "query": self.query, "labels": _several("labels", self.labels)}


@dataclass(frozen=True, slots=True)
class Interaction:
    """What was chosen without an answer of the service: an organic interaction, for shadow recall.

    Args:
        features: of the query as it was before the choice.
        labels: ids of what was chosen.
        bias_removal: λ at which the service is measured; None: the release's default.
        exclude: ids that would not have been answered.
    """

    features: Features
    labels: Collection[LabelId]
    bias_removal: float | None = None
    exclude: Collection[LabelId] = ()

    def json(self) -> dict[str, Any]:
        """The event as the service reads it; raises TypeError if labels or exclude is one string."""
        selected = selection(None, self.bias_removal, self.exclude, None, None)
        return {"features": dict(self.features), "labels": _several("labels", self.labels), **selected}


def selection(
    k: int | None,
    bias_removal: float | None,
    exclude: Collection[LabelId],
    allow: Collection[LabelId] | None,
    buckets: Collection[BucketName] | None,
) -> dict[str, Any]:
    """Which labels may be answered, how many, and at which λ, without what was left open.

    Raises:
        TypeError: one string where several are expected; its characters would pass for ids.
    """
    given = {
        "k": k,
        "bias_removal": bias_removal,
        "exclude": _several("exclude", exclude) or None,
        "allow": None if allow is None else _several("allow", allow),
        "buckets": None if buckets is None else _several("buckets", buckets),
    }
    return {name: value for name, value in given.items() if value is not None}


def _several(name: str, values: Collection[LabelId]) -> list[LabelId]:
    if isinstance(values, str):
        raise TypeError(f"{name}: expected a collection, received one string {values!r}")
    return list(values)
