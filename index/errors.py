"""What can go wrong in this room. Every message says what was expected, what was received, and where."""


class IndexRoomError(Exception):
    """Base of everything this package raises itself."""


class SpecError(IndexRoomError):
    """An index that cannot be built: unknown kind, a factory string FAISS refuses, too few labels."""


class DeviceError(IndexRoomError):
    """The device asked for is not there; nothing falls back to another."""


class RecallFloorError(IndexRoomError):
    """No tried setting reaches the spec's recall floor; nothing was written.

    Args:
        message: λ, measured recall, floor and what to do.
        bias_removal: the λ with the lowest recall under the best setting.
        recall: that recall.
        floor: the spec's floor.
    """

    def __init__(self, message: str, *, bias_removal: float, recall: float, floor: float) -> None:
        super().__init__(message)
        self.bias_removal = bias_removal
        self.recall = recall
        self.floor = floor


class QueryError(IndexRoomError, ValueError):
    """A search with a wrong shape, a k below 1, a row or bucket that does not exist, or NaN."""


class ReleaseNameError(IndexRoomError):
    """A release name that could leave the releases directory or hide in it."""


class ReleaseNotFoundError(IndexRoomError):
    """No such release, nothing published, or nothing published before."""


class ReleaseCorruptError(IndexRoomError):
    """A file of the release is missing, unreadable, or not the one that was written."""


class ReleaseVersionError(IndexRoomError):
    """The release was written by a newer Longtail."""


class ReleaseMismatchError(IndexRoomError):
    """The index was built from another bundle than the one beside it."""


class PromiseError(IndexRoomError):
    """A bucket promise that cannot be read: promise.toml or an option with a wrong key or value."""


class PromiseBrokenError(IndexRoomError):
    """A release that gives a bucket less than was promised; CURRENT is as it was.

    Args:
        message: every bucket, what was expected at least and what was found.
        broken: the same, one sentence for each bucket.
    """

    def __init__(self, message: str, *, broken: list[str]) -> None:
        super().__init__(message)
        self.broken = broken
