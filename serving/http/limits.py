"""How much one request may ask for, whatever release answers it."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import JsonValue

from longtail.bundle.errors import describe
from longtail.serving.core.listing import LabelListing
from longtail.serving.core.queries import SearchOptions, features_json
from longtail.serving.errors import InvalidRequestError
from longtail.serving.http.schemas.labels import LabelIdsRequest, LabelsRequest
from longtail.serving.http.schemas.monitoring import FeedbackRequest
from longtail.serving.http.schemas.retrieval import EmbedRequest, RetrieveRequest, SimilarRequest
from longtail.serving.settings import Settings

_LONGEST_ID = 512
_FLOAT32_BYTES = 4
_LONGEST_NAME = 100


def check_retrieve(request: RetrieveRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.queries), settings.max_queries, "queries", "queries")
    total, apart = 0, False
    for index, query in enumerate(request.queries):
        _check_options(query, settings, f"queries.{index}.")
        if not request.preview and query.features is not None:
            _check_recorded(query.features, settings, f"queries.{index}.features")
        total += query.depth
        apart = apart or bool(query.max_per or query.mmr)
    _check_total_k(total, settings, "queries", apart=apart)


def check_similar(request: SimilarRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.labels), settings.max_queries, "ids", "ids")
    _check_options(request, settings, "")
    apart = bool(request.max_per or request.mmr)
    _check_total_k(request.depth * len(request.labels), settings, "k", apart=apart)


def check_embed(request: EmbedRequest, settings: Settings, dim: int) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field.

    Args:
        request: what is wanted.
        settings: of the service.
        dim: numbers in a vector of the release that answers.
    """
    name = "queries" if request.labels is None else "labels"
    _at_most(request.count, settings.max_queries, name, name)
    received = request.count * dim * _FLOAT32_BYTES
    if received > settings.max_embed_bytes:
        raise InvalidRequestError(
            f"expected vectors of at most {settings.max_embed_bytes} bytes together (LONGTAIL_MAX_EMBED_BYTES), "
            f"received {request.count} to make of {dim} numbers, 4 bytes each",
            field=name,
        )


def check_labels(request: LabelsRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.labels), settings.max_queries, "labels", "labels")
    for index, label in enumerate(request.labels):
        if not 1 <= len(str(label.id)) <= _LONGEST_ID:
            raise InvalidRequestError(
                f"expected an id of 1 to {_LONGEST_ID} characters, received {describe(label.id)}",
                field=f"labels.{index}.id",
            )


def check_label_ids(request: LabelIdsRequest, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    _at_most(len(request.ids), settings.max_ids, "ids", "ids")


def check_listing(request: LabelListing, settings: Settings) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field."""
    if "limit" in request.model_fields_set and request.limit > settings.max_k:
        raise InvalidRequestError(
            f"expected limit <= {settings.max_k}, received {describe(request.limit)}", field="limit"
        )


def check_feedback(request: FeedbackRequest, settings: Settings, knows: Callable[[str], bool]) -> None:
    """Raise InvalidRequestError if a limit is passed; names the field.

    Args:
        request: to be recorded.
        settings: of the service.
        knows: whether the release has a label; a catalogue's ids may be longer than those of any other labels.
    """
    _at_most(len(request.events), settings.max_queries, "events", "events")
    for index, event in enumerate(request.events):
        _at_most(len(event.labels), settings.max_ids, "ids", f"events.{index}.labels")
        _at_most(len(event.exclude), settings.max_ids, "ids", f"events.{index}.exclude")
        for place, id_ in enumerate(map(str, event.labels)):
            if len(id_) > _LONGEST_ID and not knows(id_):
                raise InvalidRequestError(
                    f"expected a label of the release, or an id of at most {_LONGEST_ID} characters, received "
                    f"{describe(id_)}",
                    field=f"events.{index}.labels.{place}",
                )
        if event.features is not None:
            _check_recorded(event.features, settings, f"events.{index}.features")


def _check_options(options: SearchOptions, settings: Settings, prefix: str) -> None:
    if options.k > settings.max_k:
        raise InvalidRequestError(f"expected k <= {settings.max_k}, received {describe(options.k)}", field=f"{prefix}k")
    _at_most(len(options.exclude), settings.max_ids, "ids", f"{prefix}exclude")
    _at_most(len(options.allow or ()), settings.max_ids, "ids", f"{prefix}allow")
    for column, asked in options.filter.items():
        for operator, values in asked.items() if isinstance(asked, dict) else ():
            if isinstance(values, list):
                where = f"{prefix}filter.{column[:_LONGEST_NAME]}.{operator[:_LONGEST_NAME]}"
                _at_most(len(values), settings.max_ids, "values (LONGTAIL_MAX_IDS)", where)


def _check_total_k(total: int, settings: Settings, field: str, *, apart: bool) -> None:
    """What a request costs grows with it, and so does what others wait for."""
    limit = max(settings.max_total_k, settings.max_k)
    if total > limit:
        pools = ", of max_per and mmr their pool," if apart else ""
        raise InvalidRequestError(
            f"expected at most {limit} labels asked for, k{pools} summed over the queries (LONGTAIL_MAX_TOTAL_K), "
            f"received {total}",
            field=field,
        )


def _check_recorded(features: dict[str, JsonValue], settings: Settings, field: str) -> None:
    """Features that are recorded have a bound of their own, whatever the body's is: the disk keeps many of them."""
    if settings.record_features and (length := len(features_json(features))) > settings.max_features_bytes:
        raise InvalidRequestError(
            f"expected features of at most {settings.max_features_bytes} bytes as JSON, as they are recorded "
            f"(LONGTAIL_MAX_FEATURES_BYTES, LONGTAIL_RECORD_FEATURES), received {length}",
            field=field,
        )


def _at_most(count: int, limit: int, what: str, field: str) -> None:
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)
