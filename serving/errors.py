"""Define the errors of the service; http.responses maps them to HTTP statuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from longtail.bundle import InputError, TowerError


class ServingError(Exception):
    """Base of everything this package raises. Every message is fit for the client to read.

    Args:
        message: what was expected and what was received.
        field: dotted path of the wrong part of the request, such as `queries.0.k`.

    Attributes:
        piece: position of the piece of a queued request that failed, set by the queue.
    """

    piece = 0

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def renumbered(self, items: str, positions: Sequence[int]) -> Self:
        """Return the error with positions in the request's list `items`; entry i is at `positions[i]`."""
        _, *path = (self.field or items).split(".")
        if path:
            path[0] = str(positions[int(path[0])])
        return type(self)(self.message, field=".".join([items, *path]))


class UnauthenticatedError(ServingError):
    """The request has no API key, or an unknown one."""


class ForbiddenError(ServingError):
    """An action without the admin key that it needs."""


class MalformedBodyError(ServingError):
    """The request body is not JSON in UTF-8."""


class SlowBodyError(ServingError):
    """The request body did not arrive in time."""


class ContentTypeError(ServingError):
    """The request declares a body of another type than JSON."""


class BodyTooLargeError(ServingError):
    """The request body exceeds the limit of the service."""


class InvalidRequestError(ServingError):
    """Valid JSON that the service cannot answer."""


class NoLabelTowerError(ServingError):
    """Labels with features, for a release that cannot embed them."""


class UnknownLabelError(ServingError):
    """A label that the current release lacks."""


class NoQueriesError(ServingError):
    """Queries for a label without an index of queries."""


class UnknownReleaseError(ServingError):
    """The request names a release that is not loaded."""


class RefusedReleaseError(ServingError):
    """CURRENT names a release that cannot be served; the previous release stays in service."""


class QueueFullError(ServingError):
    """The queue is full, or the client's share of it."""


class TimedOutError(ServingError):
    """The answer took longer than a client may wait."""


class EngineError(ServingError):
    """The server that holds the index, Milvus, does not answer.

    Args:
        seconds: time until the next request may succeed.
    """

    def __init__(self, message: str, *, seconds: float = 1.0, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.seconds = seconds


class NotReadyError(ServingError):
    """No release is loaded, or the service is shutting down."""


class UnservableReleaseError(ServingError):
    """An intact release that this service cannot serve; only the operator sees this error, never a client."""


class StorageError(ServingError):
    """A client's data could not be stored durably; sending the data again is safe."""


class StateError(ServingError):
    """State, an address or packages with which a service cannot start; only the operator sees this error."""


@contextmanager
def serving_errors(items: str) -> Iterator[None]:
    """Translate a bundle's errors into the service's; `items` is the prefix of their fields."""
    try:
        yield
    except InputError as error:
        raise InvalidRequestError(error.message, field=f"{items}.{error.row}.{error.field}") from error
    except TowerError as error:
        raise UnservableReleaseError(str(error)) from error
