"""Define the errors of the index package. Messages say what was expected, what was received, and where."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.bundle.validation import did_you_mean


class LongtailIndexError(Exception):
    """Base class of the errors of this package."""


class SpecError(LongtailIndexError):
    """An index that cannot be built: unknown kind, a factory string FAISS refuses, too few labels."""


class DeviceError(LongtailIndexError):
    """The machine or the FAISS build lacks the requested device; no other device is used instead."""


class RecallFloorError(LongtailIndexError):
    """No measured setting reaches the spec's recall floor; nothing was written."""


class EngineUnavailableError(LongtailIndexError):
    """The Milvus server does not answer, or lacks the collection that a release names."""

    def __init__(self, message: str, *, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class QueryError(LongtailIndexError, ValueError):
    """Report a wrong shape, k < 1, NaN, or an absent row or bucket in a search."""


class ReleaseNameError(LongtailIndexError):
    """A release name that could leave the releases directory or hide in it."""


class ReleaseNotFoundError(LongtailIndexError):
    """A release does not exist, or no release is (or was) published."""

    @classmethod
    def for_name(cls, name: str, names: Sequence[str], releases: str) -> ReleaseNotFoundError:
        """Create the error of a name that no release has."""
        hint = did_you_mean(name, names)
        return cls(f"{releases}: expected one of its releases {names}, received {name!r}{hint}")


class ReleaseCorruptError(LongtailIndexError):
    """A file of the release is missing, unreadable, or not the one written."""


class ReleaseVersionError(LongtailIndexError):
    """A release with a schema version that this installation does not read."""


class ReleaseMismatchError(LongtailIndexError):
    """An index that was built from a different bundle than the one in its release."""


class NotPublishableError(LongtailIndexError):
    """A release that gives buckets, shadow traffic or clients less than promised; CURRENT is unchanged."""

    def __init__(self, message: str, *, unmet: list[str]) -> None:
        super().__init__(message)
        self.unmet = unmet


class PublishedMeanwhileError(LongtailIndexError):
    """Another writer changed CURRENT at the object store in the meantime; this call changed nothing."""


class VectorsError(LongtailIndexError):
    """A table of labels, vectors, counts or queries that cannot become a bundle."""


class QueriesError(LongtailIndexError):
    """A table of known queries, or a bundle, cannot have an index of queries."""


class PriorsError(LongtailIndexError):
    """A table of priors or its limits are wrong, or cannot refresh this release."""


class NothingNewError(PriorsError):
    """A log has only pairs that the release knows already."""
