"""What the service can refuse, in its own terms; edge.py maps each of these to HTTP, and nothing else does."""


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


class MalformedBodyError(ServingError):
    """The request body is not JSON in UTF-8."""


class ContentTypeError(ServingError):
    """The request says that its body is something other than JSON."""


class BodyTooLargeError(ServingError):
    """The request body is longer than the service reads."""


class InvalidRequestError(ServingError):
    """JSON that the service or the current release cannot answer."""


class UnknownLabelError(ServingError):
    """The request is about a label that the current release does not have."""


class NotReadyError(ServingError):
    """No release is loaded, or the service is shutting down."""


class UnservableReleaseError(ServingError):
    """An intact release that this service cannot answer from; seen by the operator, never by a client."""
