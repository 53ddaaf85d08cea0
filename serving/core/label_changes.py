"""Labels that are added, hidden and brought back while the service runs: on disk first, then in every answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated

from pydantic import Field, JsonValue

from longtail.bundle import Hide, LabelChanges, LabelRecord, Patch, Restore, Upsert, replay
from longtail.bundle.errors import describe
from longtail.serving.core.queries import LabelId, RequestModel
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import UnknownLabelError, UnservableReleaseError
from longtail.state import LabelPosition, LabelRead, LabelStore, Place, Postgres, StoreError

logger = logging.getLogger(__name__)

_LONG_LOG = 10_000
_HANGING_SECONDS = 2.0
"""After which a reading that has not failed yet is no good."""
_MOST_NAMED = 10
"""Unknown ids that an error names, at most."""


class NewLabel(RequestModel):
    """A label to add, or to embed again."""

    id: LabelId
    features: dict[str, JsonValue] = Field(
        description="By name, as the label tower takes them; null or absent means missing."
    )
    display: dict[str, JsonValue] = Field(default={}, description="Columns shown with the label: title, …")
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default={},
        description="Values r of the release's priors for this label, by name. Of those left out one of the release "
        "keeps its own, and another gets what the release gives labels without one.",
    )


class LabelPatch(RequestModel):
    """Say which columns of a label change."""

    display: dict[str, JsonValue] = Field(
        min_length=1, description="New values by column; the others stay. Filters go by them at once."
    )


class LabelPatchById(LabelPatch):
    """Say which columns of one of many labels change."""

    id: LabelId


class LabelFollower:
    """The label changes, read as far as this process has. Not thread-safe: the service holds a lock.

    Args:
        place: where they are kept; all workers, and all replicas, write and read them.

    Attributes:
        unreadable: whether the last reading failed, as its caller says.
    """

    def __init__(self, place: Place) -> None:
        self._store = LabelStore(place)
        self._position: LabelPosition | None = None
        self._shared = isinstance(place, Postgres)
        self._reading_since: float | None = None
        self.unreadable = False
        self._so_far = LabelChanges()

    @property
    def behind(self) -> bool:
        """Whether other replicas may have changed labels without this one knowing."""
        since = self._reading_since
        hangs = since is not None and monotonic() - since > _HANGING_SECONDS
        return self._shared and (self.unreadable or hangs)

    def apply_to(self, retriever: Retriever) -> Retriever:
        """A release just loaded, with every change read so far."""
        return retriever.with_changes(self._so_far.records())

    def append(self, records: Sequence[LabelRecord], retrievers: Iterable[Retriever]) -> None:
        """Write changes to disk, later than the releases' data whatever the clock says."""
        self._store.append(records, after=max(retriever.manifest.data_until for retriever in retrievers))

    def read(self, retrievers: Sequence[Retriever], served: Retriever | None) -> dict[Retriever, Retriever]:
        """Get each release after what any worker has written since the last call.

        Args:
            retrievers: all loaded releases; one that cannot be changed is left out, unless it is `served`.

        Raises:
            StoreError: nothing has changed.
            UnservableReleaseError: the release being served cannot embed what was written.
        """
        self._reading_since = monotonic()
        try:
            read = self._store.read_from(self._position)
        finally:
            self._reading_since = None
        if self._position is None and read.position is not None and len(read.records) > _LONG_LOG:
            self._shorten(read)
        if read.restarted:
            so_far = LabelChanges().after(read.records)
            changed = _change_each(retrievers, served, lambda retriever: retriever.rebuilt(so_far.records()))
        else:
            so_far = self._so_far.after(read.records) if read.records else self._so_far
            changed = _change_each(retrievers, served, lambda retriever: retriever.with_changes(read.records))
        self._position, self._so_far = read.position, so_far
        return changed

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    def _shorten(self, found: LabelRead) -> None:
        """Forget most of changes that say the same labels over and over."""
        try:
            if len(found.records) > 2 * len(replay(found.records).records()):
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


def records_to_add(labels: Sequence[NewLabel], retriever: Retriever) -> list[Upsert]:
    """Make the records of a POST /v1/labels; raises ServingError that names the label."""
    at = datetime.now(UTC)
    records = [
        Upsert(id=str(label.id), at=at, features=label.features, display=label.display, priors=label.priors)
        for label in labels
    ]
    retriever.overlay.check(records)
    return records


def records_to_patch(labels: Sequence[LabelPatchById], retriever: Retriever) -> list[Patch]:
    """Make the records of a PATCH; raises ServingError that names the label."""
    at = datetime.now(UTC)
    for place, label in enumerate(labels):
        retriever.catalogue.row(label.id, field=f"labels.{place}.id")
    records = [Patch(id=str(label.id), at=at, display=label.display) for label in labels]
    retriever.overlay.check_patches(records)
    return records


def records_to_hide(ids: Sequence[LabelId], retriever: Retriever) -> list[Hide]:
    """Make a record for each distinct label, also for those gone already, as retries do."""
    _refuse_unknown(ids, retriever.knows)
    at = datetime.now(UTC)
    return [Hide(id=id_, at=at) for id_ in dict.fromkeys(map(str, ids))]


def records_to_restore(ids: Sequence[LabelId], retriever: Retriever) -> list[Restore]:
    """Make a record for each distinct label, also for those never hidden."""
    _refuse_unknown(ids, lambda id_: id_ in retriever.catalogue.row_of or id_ in retriever.overlay.row_of)
    at = datetime.now(UTC)
    return [Restore(id=id_, at=at) for id_ in dict.fromkeys(map(str, ids))]


def _refuse_unknown(ids: Sequence[LabelId], knows: Callable[[str], bool]) -> None:
    unknown = {str(id_): place for place, id_ in reversed(list(enumerate(ids))) if not knows(str(id_))}
    if unknown:
        first = sorted(unknown.items(), key=lambda found: found[1])[:_MOST_NAMED]
        named = ", ".join(f"{describe(id_)} (ids.{place})" for id_, place in first)
        raise UnknownLabelError(
            f"expected ids of labels of this release, received {len(unknown)} that it does not have: {named}"
            + (", …" if len(unknown) > _MOST_NAMED else "")
            + "; none was changed",
            field=f"ids.{first[0][1]}",
        )
