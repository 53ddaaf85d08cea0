"""Errors of the index package. Every message says what was expected, what was received, and where."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.bundle.validation import did_you_mean


class LongtailIndexError(Exception):
    """Base of everything this package raises itself."""


class SpecError(LongtailIndexError):
    """An index that cannot be built: unknown kind, a factory string FAISS refuses, too few labels."""


class DeviceError(LongtailIndexError):
    """The device asked for is not there; nothing falls back to another."""


class RecallFloorError(LongtailIndexError):
    """No tried setting reaches the spec's recall floor; nothing was written."""


class EngineUnavailableError(LongtailIndexError):
    """The Milvus server does not answer, or lacks the collection that a release names."""

    def __init__(self, message: str, *, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class QueryError(LongtailIndexError, ValueError):
    """A search with a wrong shape, a k below 1, a row or bucket that does not exist, or NaN."""


class ReleaseNameError(LongtailIndexError):
    """A release name that could leave the releases directory or hide in it."""


class ReleaseNotFoundError(LongtailIndexError):
    """No such release, nothing published, or nothing published before."""

    @classmethod
    def of(cls, name: str, known: Sequence[str], where: str) -> ReleaseNotFoundError:
        """Create the error of a name that no release has."""
        hint = did_you_mean(name, known)
        return cls(f"{where}: expected one of its releases {known}, received {name!r}{hint}")


class ReleaseCorruptError(LongtailIndexError):
    """A file of the release is missing, unreadable, or not the one that was written."""


class ReleaseVersionError(LongtailIndexError):
    """The release has another schema version than this installation reads."""


class ReleaseMismatchError(LongtailIndexError):
    """The index was built from another bundle than the release has."""


class NotPublishableError(LongtailIndexError):
    """A release that gives buckets, shadow traffic or clients less than promised; CURRENT is as it was."""

    def __init__(self, message: str, *, unmet: list[str]) -> None:
        super().__init__(message)
        self.unmet = unmet


class PublishedMeanwhileError(LongtailIndexError):
    """Somebody else has changed what is published at an object store meanwhile; nothing was changed."""


class VectorsError(LongtailIndexError):
    """A table of labels, vectors, counts or queries that no bundle can be made of."""


class PriorsError(LongtailIndexError):
    """A table of priors, their limits, or a release whose priors cannot be refreshed with them."""
