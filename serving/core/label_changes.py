"""Add, change, hide and restore labels while the service runs: first on disk, then in every answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated

from pydantic import Field, JsonValue

from longtail.bundle import Hide, LabelChanges, LabelRecord, Patch, Restore, Upsert
from longtail.bundle.errors import describe
from longtail.bundle.label_changes import replay
from longtail.serving.core.queries import LabelId, RequestModel
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import UnknownLabelError, UnservableReleaseError
from longtail.state import LabelPosition, LabelRead, LabelStore, Postgres, StateLocation, StoreError

logger = logging.getLogger(__name__)

_LONG_LOG = 10_000
_HANGING_SECONDS = 2.0
"""Time after which a read that has neither succeeded nor failed counts as failed."""
_MOST_NAMED = 10
"""Most unknown ids that an error names."""


class LabelToAdd(RequestModel):
    """A label to add, or to embed again."""

    id: LabelId
    features: dict[str, JsonValue] = Field(
        description="By name, as the label tower takes them; null or absent means missing."
    )
    display: dict[str, JsonValue] = Field(default={}, description="Columns shown with the label: title, …")
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default={},
        description="Values r of the release's priors for this label, by name. Omitted priors keep their "
        "values if the release has the label; a new label gets the release's values for labels "
        "without one.",
    )


class LabelPatch(RequestModel):
    """Columns of a label to change."""

    display: dict[str, JsonValue] = Field(
        min_length=1, description="New values by column; the others stay. Filters go by them at once."
    )


class LabelPatchById(LabelPatch):
    """Columns to change of one of several labels."""

    id: LabelId


class LabelFollower:
    """Reads and writes label changes. Not thread-safe: the service holds a lock.

    Args:
        location: state directory or database with the changes of all workers and replicas.

    Attributes:
        unreadable: whether the last read failed; the caller sets it.
    """

    def __init__(self, location: StateLocation) -> None:
        self._store = LabelStore(location)
        self._position: LabelPosition | None = None
        self._shared = isinstance(location, Postgres)
        self._reading_since: float | None = None
        self.unreadable = False
        self._so_far = LabelChanges()

    @property
    def behind(self) -> bool:
        """Whether this replica may lack label changes of other replicas."""
        since = self._reading_since
        hangs = since is not None and monotonic() - since > _HANGING_SECONDS
        return self._shared and (self.unreadable or hangs)

    def apply_changes(self, retriever: Retriever) -> Retriever:
        """Apply all changes read so far to a newly loaded release."""
        return retriever.with_changes(self._so_far.records())

    def append(self, records: Sequence[LabelRecord], retrievers: Iterable[Retriever]) -> None:
        """Write changes durably, dated later than the releases' training data."""
        # A clock that runs behind must not make a new change look older than the data of a release.
        self._store.append(records, after=max(retriever.manifest.data_until for retriever in retrievers))

    def read(self, retrievers: Sequence[Retriever], served: Retriever | None) -> dict[Retriever, Retriever]:
        """Apply all workers' changes since the last call.

        Args:
            retrievers: all loaded releases; a release that cannot embed new labels is left out.
            served: the release in service, whose error is raised instead.

        Returns:
            The changed release for each given one.

        Raises:
            StoreError: the changes cannot be read; nothing has changed.
            UnservableReleaseError: the release in service cannot embed a new label.
        """
        self._reading_since = monotonic()
        try:
            read = self._store.read_from(self._position)
        finally:
            self._reading_since = None
        # At the start alone, when nothing waits for the log.
        if self._position is None and read.position is not None and len(read.records) > _LONG_LOG:
            self._shorten(read)
        # The log was replaced, so that earlier changes may not be in it: apply it to the release as built.
        if read.restarted:
            so_far = LabelChanges().apply(read.records)
            changed = _change_each(retrievers, served, lambda retriever: retriever.rebuilt(so_far.records()))
        else:
            so_far = self._so_far.apply(read.records) if read.records else self._so_far
            changed = _change_each(retrievers, served, lambda retriever: retriever.with_changes(read.records, so_far))
        self._position, self._so_far = read.position, so_far
        return changed

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    def _shorten(self, log: LabelRead) -> None:
        """Compact a log of mostly superseded changes."""
        try:
            if len(log.records) > 2 * len(replay(log.records).records()):
                self._store.compact()
        except StoreError as error:
            logger.warning("%s", error)


def _change_each(
    retrievers: Sequence[Retriever], served: Retriever | None, change: Callable[[Retriever], Retriever]
) -> dict[Retriever, Retriever]:
    changed = {}
    for retriever in retrievers:
        try:
            changed[retriever] = change(retriever)
        except UnservableReleaseError as error:
            if retriever is served:
                raise
            logger.warning("release %s is dropped: %s", retriever.name, error)
    return changed


def create_upserts(labels: Sequence[LabelToAdd], retriever: Retriever) -> list[Upsert]:
    """Create the records of a POST /v1/labels; raises a ServingError that names the label.

    Columns and priors that a label is sent without stay as earlier changes made them.
    """
    at = datetime.now(UTC)
    records = [
        Upsert(id=str(label.id), at=at, features=label.features, display=label.display, priors=label.priors)
        for label in labels
    ]
    records = list(map(retriever.overlay.complete, records))
    retriever.overlay.check(records)
    return records


def create_patches(labels: Sequence[LabelPatchById], retriever: Retriever) -> list[Patch]:
    """Create the records of a PATCH; raises a ServingError that names the label."""
    at = datetime.now(UTC)
    for i, label in enumerate(labels):
        retriever.catalogue.row(label.id, field=f"labels.{i}.id")
    records = [Patch(id=str(label.id), at=at, display=label.display) for label in labels]
    retriever.overlay.check_patches(records)
    return records


def create_hides(ids: Sequence[LabelId], retriever: Retriever) -> list[Hide]:
    """Create one record per label, so that retries succeed."""
    _refuse_unknown(ids, retriever.knows)
    at = datetime.now(UTC)
    return [Hide(id=id_, at=at) for id_ in dict.fromkeys(map(str, ids))]


def create_restores(ids: Sequence[LabelId], retriever: Retriever) -> list[Restore]:
    """Create one record per label."""
    _refuse_unknown(ids, lambda id_: id_ in retriever.catalogue.row_of or retriever.overlay.find_row(id_) is not None)
    at = datetime.now(UTC)
    return [Restore(id=id_, at=at) for id_ in dict.fromkeys(map(str, ids))]


def _refuse_unknown(ids: Sequence[LabelId], knows: Callable[[str], bool]) -> None:
    unknown = {str(id_): i for i, id_ in reversed(list(enumerate(ids))) if not knows(str(id_))}
    if unknown:
        first = sorted(unknown.items(), key=lambda item: item[1])[:_MOST_NAMED]
        named = ", ".join(f"{describe(id_)} (ids.{i})" for id_, i in first)
        raise UnknownLabelError(
            f"expected ids of labels of this release, received {len(unknown)} that it does not have: {named}"
            + (", …" if len(unknown) > _MOST_NAMED else "")
            + "; none was changed",
            field=f"ids.{first[0][1]}",
        )
