"""What the service answers, and how it is read from JSON. Keys that a newer service adds are ignored.

Every reader raises KeyError or TypeError on JSON of another shape; `exchange` makes a `LongtailError` of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtail.client.questions import BucketName


@dataclass(frozen=True, slots=True)
class Label:
    """One label of an answer: s_λ = u·v/T + b + λ·log p_n in logits, its frequency bucket, its display columns."""

    id: str
    score: float
    bucket: BucketName
    display: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unknown:
    """How many ids of a question the release does not know; the service ignored them."""

    exclude: int
    allow: int


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one query, best label first; `id` is the label asked about, None in answers of `retrieve`."""

    labels: tuple[Label, ...]
    bias_removal: float
    unknown: Unknown
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One result per query, in order, all from one release; `request_id` is what feedback refers to."""

    results: tuple[Result, ...]
    release: str
    request_id: str


@dataclass(frozen=True, slots=True)
class CatalogueLabel:
    """What the release knows about one label.

    `count` is in training pairs (0 for an added label), `log_pn` in nats, `bias` in logits (None for a model without).
    """

    id: str
    count: int
    log_pn: float
    bucket: BucketName
    bias: float | None
    display: dict[str, Any]
    release: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """How many labels or events are now durable; `release` is None for events."""

    accepted: int
    request_id: str
    release: str | None = None


@dataclass(frozen=True, slots=True)
class Deleted:
    """A label that no answer holds any more."""

    id: str
    release: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The release that serves now, and whether another one served before."""

    release: str
    changed: bool
    request_id: str


def answer(body: Any) -> Answer:
    """Answer of POST /v1/retrieve and /v1/similar."""
    results = tuple(_result(result) for result in body["results"])
    return Answer(results, release=body["release"], request_id=body["request_id"])


def _result(body: Any) -> Result:
    unknown = Unknown(exclude=body["unknown"]["exclude"], allow=body["unknown"]["allow"])
    labels = tuple(
        Label(id=label["id"], score=label["score"], bucket=label["bucket"], display=label["display"])
        for label in body["labels"]
    )
    return Result(labels, bias_removal=body["bias_removal"], unknown=unknown, id=body.get("id"))


def catalogue_label(body: Any) -> CatalogueLabel:
    """Answer of GET /v1/labels/{id}."""
    return CatalogueLabel(
        id=body["id"],
        count=body["count"],
        log_pn=body["log_pn"],
        bucket=body["bucket"],
        bias=body["bias"],
        display=body["display"],
        release=body["release"],
        request_id=body["request_id"],
    )


def accepted(body: Any) -> Accepted:
    """Answer of POST /v1/labels and /v1/feedback."""
    return Accepted(body["accepted"], request_id=body["request_id"], release=body.get("release"))


def deleted(body: Any) -> Deleted:
    """Answer of DELETE /v1/labels/{id}."""
    return Deleted(id=body["id"], release=body["release"], request_id=body["request_id"])


def reloaded(body: Any) -> Reloaded:
    """Answer of POST /v1/release/reload."""
    return Reloaded(release=body["release"], changed=body["changed"], request_id=body["request_id"])


def document(body: Any) -> dict[str, Any]:
    """Any JSON object, as it is."""
    if not isinstance(body, dict):
        raise TypeError("expected a JSON object")
    return body
