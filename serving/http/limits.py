"""How much one request may ask for, whatever release answers it."""

from __future__ import annotations

from longtail.bundle.errors import describe
from longtail.serving.core.queries import SearchOptions
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.schemas.labels import LabelsRequest
from longtail.serving.http.schemas.monitoring import FeedbackRequest
from longtail.serving.http.schemas.retrieval import RetrieveRequest, SimilarRequest
from longtail.serving.settings import Settings

_LONGEST_ID = 512


def check_retrieve(request: RetrieveRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.queries), settings.max_queries, "queries", "queries")
    for index, query in enumerate(request.queries):
        _check_options(query, settings, f"queries.{index}.")


def check_similar(request: SimilarRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.labels), settings.max_queries, "ids", "ids")
    _check_options(request, settings, "")


def check_labels(request: LabelsRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.labels), settings.max_queries, "labels", "labels")
    for index, label in enumerate(request.labels):
        if not 1 <= len(str(label.id)) <= _LONGEST_ID:
            raise InvalidRequestError(
                f"expected an id of 1 to {_LONGEST_ID} characters, received {describe(label.id)}",
                field=f"labels.{index}.id",
            )


def check_feedback(request: FeedbackRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.events), settings.max_queries, "events", "events")
    for index, event in enumerate(request.events):
        _at_most(len(event.labels), settings.max_ids, "ids", f"events.{index}.labels")
        _at_most(len(event.exclude), settings.max_ids, "ids", f"events.{index}.exclude")


def _check_options(options: SearchOptions, settings: Settings, prefix: str) -> None:
    if options.k > settings.max_k:
        raise InvalidRequestError(f"expected k <= {settings.max_k}, received {describe(options.k)}", field=f"{prefix}k")
    _at_most(len(options.exclude), settings.max_ids, "ids", f"{prefix}exclude")
    _at_most(len(options.allow or ()), settings.max_ids, "ids", f"{prefix}allow")


def _at_most(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)
