"""How much one request may ask for, whatever release answers it."""

from __future__ import annotations

from serving.errors import InvalidRequestError
from serving.schemas import RetrieveRequest, Selection, SimilarRequest
from serving.settings import Settings
from serving.wording import received


def check_retrieve(request: RetrieveRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.queries), settings.max_queries, "queries", "queries")
    for index, query in enumerate(request.queries):
        _check_selection(query, settings, f"queries.{index}.")


def check_similar(request: SimilarRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.labels), settings.max_queries, "ids", "ids")
    _check_selection(request, settings, "")


def _check_selection(selection: Selection, settings: Settings, prefix: str) -> None:
    if selection.k > settings.max_k:
        raise InvalidRequestError(
            f"expected k <= {settings.max_k}, received {received(selection.k)}", field=f"{prefix}k"
        )
    _at_most(len(selection.exclude), settings.max_ids, "ids", f"{prefix}exclude")
    _at_most(len(selection.allow or ()), settings.max_ids, "ids", f"{prefix}allow")


def _at_most(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)
