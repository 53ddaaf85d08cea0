"""Errors of the service; http.responses maps them to HTTP statuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from longtail.bundle import InputError, TowerError


class ServingError(Exception):
    """Base of everything this package raises. Every message is fit for the client to read.

    Args:
        message: what was expected and what was received.
        field: dotted path of the part of the request that is wrong, such as `queries.0.k`.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def renumbered(self, items: str, places: Sequence[int]) -> Self:
        """Return the same error about the list `items` of the request, in which its entries stand at `places`."""
        _, *path = (self.field or items).split(".")
        if path:
            path[0] = str(places[int(path[0])])
        return type(self)(self.message, field=".".join([items, *path]))


class UnauthenticatedError(ServingError):
    """No key, or none that this service knows."""


class ForbiddenError(ServingError):
    """A key that may ask, for something that only an admin key may do."""


class MalformedBodyError(ServingError):
    """The request body is not JSON in UTF-8."""


class SlowBodyError(ServingError):
    """The request body did not arrive in time."""


class ContentTypeError(ServingError):
    """The request says that its body is something other than JSON."""


class BodyTooLargeError(ServingError):
    """The request body is longer than the service reads."""


class InvalidRequestError(ServingError):
    """JSON that the service or the current release cannot answer."""


class NoLabelTowerError(ServingError):
    """Labels with features, for a release that cannot embed them."""


class UnknownLabelError(ServingError):
    """The request is about a label that the current release does not have."""


class UnknownReleaseError(ServingError):
    """The request names a release that is not loaded."""


class RefusedReleaseError(ServingError):
    """CURRENT names a release that cannot be served; the one before goes on."""


class QueueFullError(ServingError):
    """More queries are waiting than the service lets wait."""


class TimedOutError(ServingError):
    """The answer took longer than the service lets a client wait."""


class EngineError(ServingError):
    """The server that holds the index, Milvus, does not answer.

    Args:
        seconds: until it may be asked again.
    """

    def __init__(self, message: str, *, seconds: float = 1.0, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.seconds = seconds


class NotReadyError(ServingError):
    """No release is loaded, or the service is shutting down."""


class UnservableReleaseError(ServingError):
    """An intact release that this service cannot answer from; seen by the operator, never by a client."""


class StorageError(ServingError):
    """What a client wants recorded cannot be put on disk; nothing of it was, or what was may be sent again."""


class StateError(ServingError):
    """State, an address or packages that a service cannot start with; seen by the operator."""


@contextmanager
def serving_errors(items: str) -> Iterator[None]:
    """Raise a bundle's errors as the service's; `items` leads their fields, as in `queries.0.features.NAME`."""
    try:
        yield
    except InputError as error:
        raise InvalidRequestError(error.message, field=f"{items}.{error.row}.{error.field}") from error
    except TowerError as error:
        raise UnservableReleaseError(str(error)) from error
