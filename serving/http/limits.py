"""How much one request may contain: checked once, after its body is validated, against the service's settings."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import JsonValue

from longtail.bundle.errors import describe
from longtail.serving.core.queries import RequestModel, SearchOptions, features_json
from longtail.serving.errors import InvalidRequestError
from longtail.serving.settings import Settings

LONGEST_ID = 512
"""Characters of a label id that the release does not know."""
_LONGEST_NAME = 100


class Body(RequestModel):
    """Base of request bodies."""

    @abstractmethod
    def check_limits(self, settings: Settings) -> None:
        """Raise InvalidRequestError, which names the field, if the body exceeds a limit."""


def at_most(count: int, limit: int, what: str, field: str) -> None:
    """Raise InvalidRequestError if there are more than `limit` entries."""
    if count > limit:
        raise InvalidRequestError(f"expected at most {limit} {what}, received {count}", field=field)


def check_options(options: SearchOptions, settings: Settings, prefix: str = "") -> None:
    """Raise InvalidRequestError if the options of one query exceed a limit."""
    if options.k > settings.max_k:
        raise InvalidRequestError(f"expected k <= {settings.max_k}, received {describe(options.k)}", field=f"{prefix}k")
    at_most(len(options.exclude), settings.max_ids, "ids", f"{prefix}exclude")
    at_most(len(options.allow or ()), settings.max_ids, "ids", f"{prefix}allow")
    for column, condition in options.filter.items():
        for operator, values in condition.items() if isinstance(condition, dict) else ():
            if isinstance(values, list):
                field = f"{prefix}filter.{column[:_LONGEST_NAME]}.{operator[:_LONGEST_NAME]}"
                at_most(len(values), settings.max_ids, "values", field)


def check_total_k(total: int, settings: Settings, field: str, *, diverse: bool) -> None:
    """Raise InvalidRequestError if the queries of one request ask for too many labels together."""
    limit = max(settings.max_total_k, settings.max_k)
    if total > limit:
        pools = ", of max_per and mmr their pool," if diverse else ""
        raise InvalidRequestError(
            f"expected at most {limit} labels asked for, k{pools} summed over the queries (LONGTAIL_MAX_TOTAL_K), "
            f"received {total}",
            field=field,
        )


def check_recorded(features: dict[str, JsonValue], settings: Settings, field: str) -> None:
    """Raise InvalidRequestError if features that are recorded on disk are too long."""
    if settings.record_features and (length := len(features_json(features))) > settings.max_features_bytes:
        raise InvalidRequestError(
            f"expected features of at most {settings.max_features_bytes} bytes as JSON, as they are recorded "
            f"(LONGTAIL_RECORD_FEATURES), received {length}",
            field=field,
        )
