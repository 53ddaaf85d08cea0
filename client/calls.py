"""Every method of both clients: arguments in, one request and the way to read its answer out. Nothing is sent here.

All but `interactions` are repeatable: reads change nothing, an upsert, a deletion and a reload end where they ended,
and the service counts one request id's feedback once. An organic interaction has no id to be recognised by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from longtail.client import answers
from longtail.client.answers import Accepted, Answer, CatalogueLabel, Deleted, Reloaded
from longtail.client.questions import BucketName, Features, Feedback, Interaction, LabelId, NewLabel, Query, selection

T = TypeVar("T")
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, without host and key.

    Args:
        method: of HTTP.
        path: below the service's URL, quoted.
        read: the value of a success' JSON; raises KeyError or TypeError if it is of another shape.
        body: JSON to send.
        repeatable: twice does what once does.
        otherwise: if given, the value where the service is busy or does not answer; then nothing is tried again.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    repeatable: bool = True
    otherwise: T | None = None


def retrieve(
    queries: Query | Iterable[Query] | None = None,
    *,
    features: Features | None = None,
    k: int | None = None,
    bias_removal: float | None = None,
    exclude: Collection[LabelId] = (),
    allow: Collection[LabelId] | None = None,
    buckets: Collection[BucketName] | None = None,
    release: str | None = None,
    preview: bool = False,
) -> Call[Answer]:
    """The best labels for each query.

    Args:
        queries: one or several; or none, and the parts of a single one (see `Query`) in its place:
        features, k, bias_removal, exclude, allow, buckets: those parts.
        release: answer from this release, if the service still has it loaded; None: from the current one.
        preview: nobody will see the answer: it counts in no exposure, drift or recall.

    Raises:
        ValueError: both or neither of queries and features, or a part beside queries.
        NotFoundError: `unknown_release`.
        LongtailError: the service refused, or did not answer.
    """
    if (queries is None) == (features is None):
        raise ValueError(f"expected either queries or features, received {'neither' if queries is None else 'both'}")
    parts = selection(k, bias_removal, exclude, allow, buckets)
    if queries is None:
        asked = [{"features": dict(features or {}), **parts}]
    elif parts:
        raise ValueError(f"expected {', '.join(parts)} in every Query, received them beside queries")
    else:
        asked = [query.json() for query in _all(queries)]
    return Call("POST", "/v1/retrieve", answers.answer, {"queries": asked, **_asked_of(release, preview)})


def similar(
    ids: LabelId | Iterable[LabelId],
    *,
    k: int | None = None,
    bias_removal: float | None = None,
    exclude: Collection[LabelId] = (),
    allow: Collection[LabelId] | None = None,
    buckets: Collection[BucketName] | None = None,
    release: str | None = None,
    preview: bool = False,
) -> Call[Answer]:
    """The labels nearest to each of the given labels, itself left out.

    Args:
        ids: one label, or several.
        k, exclude, allow, buckets: as in `Query`.
        bias_removal: None means 0 here: nearness, not popularity.
        release, preview: as for `retrieve`.

    Raises:
        NotFoundError: `unknown_label`, `unknown_release`.
        LongtailError: the service refused, or did not answer.
    """
    asked = {"id": ids} if isinstance(ids, str | int) else {"ids": list(ids)}
    parts = selection(k, bias_removal, exclude, allow, buckets)
    return Call("POST", "/v1/similar", answers.answer, {**asked, **parts, **_asked_of(release, preview)})


def label(id: LabelId) -> Call[CatalogueLabel]:
    """What the release knows about one label.

    Raises:
        NotFoundError: `unknown_label`.
        LongtailError: the service did not answer.
    """
    return Call("GET", _label_path(id), answers.catalogue_label)


def add_labels(labels: NewLabel | Iterable[NewLabel]) -> Call[Accepted]:
    """Add labels from their features, durable and retrievable when this returns. Needs an admin key.

    Raises:
        DeniedError: no admin key.
        LongtailError: `no_label_tower` if the release cannot embed labels, or the service refused or did not answer.
    """
    added = [label.json() for label in _all(labels)]
    return Call("POST", "/v1/labels", answers.accepted, {"labels": added})


def restore_label(id: LabelId) -> Call[Accepted]:
    """Bring a hidden label of the catalogue back. Needs an admin key.

    Raises:
        DeniedError, NotFoundError, LongtailError: as `delete_label`.
    """
    return Call("POST", "/v1/labels", answers.accepted, {"labels": [{"id": id}]})


def delete_label(id: LabelId) -> Call[Deleted]:
    """Take a label out of every answer: an added one is deleted, one of the catalogue hidden. Needs an admin key.

    Raises:
        DeniedError: no admin key.
        NotFoundError: `unknown_label`; also if a first attempt deleted it and only its answer was lost.
        LongtailError: the service did not answer.
    """
    return Call("DELETE", _label_path(id), answers.deleted)


def feedback(events: Feedback | Iterable[Feedback]) -> Call[Accepted]:
    """Tell what was chosen from answers; durable when this returns.

    Raises:
        LongtailError: the service refused, or did not answer.
    """
    return Call("POST", "/v1/feedback", answers.accepted, {"events": [e.json() for e in _all(events)]})


def interactions(events: Interaction | Iterable[Interaction]) -> Call[Accepted]:
    """Tell what was chosen without an answer of the service; durable when this returns.

    Raises:
        NoAnswerError: the events may or may not have been taken, unless it is `ConnectError` that caused it.
        LongtailError: the service refused.
    """
    body = {"events": [event.json() for event in _all(events)]}
    return Call("POST", "/v1/feedback", answers.accepted, body, repeatable=False)


def release() -> Call[dict[str, Any]]:
    """The release being served: its model, the dial's curve, the features of a query and an example.

    Raises:
        LongtailError: the service did not answer.
    """
    return Call("GET", "/v1/release", answers.document)


def monitoring() -> Call[dict[str, Any]]:
    """What head, torso and tail got in the last minutes, hour and day, beside the baseline.

    Raises:
        LongtailError: the service did not answer.
    """
    return Call("GET", "/v1/monitoring", answers.document)


def reload() -> Call[Reloaded]:
    """Load the published release now instead of at the next poll. Needs an admin key.

    Raises:
        DeniedError: no admin key.
        LongtailError: `release_refused` (409), or the service did not answer.
    """
    return Call("POST", "/v1/release/reload", answers.reloaded)


def ready() -> Call[bool]:
    """Whether the service takes requests, asked once: False too if it cannot be reached.

    Raises:
        LongtailError: something else answered.
    """
    return Call("GET", "/readyz", lambda body: bool(body["status"] == "ready"), otherwise=False)


def _label_path(id: LabelId) -> str:
    """Slashes are quoted; so are `.` and `..`, which URLs would resolve."""
    quoted = quote(str(id), safe="")
    return f"/v1/labels/{quoted.replace('.', '%2E') if quoted in ('.', '..') else quoted}"


def _asked_of(release: str | None, preview: bool) -> dict[str, Any]:
    return ({} if release is None else {"release": release}) | ({"preview": True} if preview else {})


def _all(one_or_several: Event | Iterable[Event]) -> list[Event]:
    return list(one_or_several) if isinstance(one_or_several, Iterable) else [one_or_several]
