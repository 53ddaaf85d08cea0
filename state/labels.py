"""Store label changes in one total order, in SQLite or PostgreSQL.

`append` returns when its batch is on disk. Any number of processes, and with PostgreSQL of hosts, may write to and read
from a store: numbers rise in the order of commits, and a reader continues after the last number that it has read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, delete, func, insert, select

from longtail.bundle import LabelChanges, LabelRecord
from longtail.bundle.label_changes import needed_positions, read_record, record_json, replay
from longtail.state.engines import reading, store_errors, writing
from longtail.state.errors import StoreError
from longtail.state.label_file import LABELS_FILE, LabelFile
from longtail.state.label_server import LabelServer
from longtail.state.location import Postgres, StateLocation, parse_location
from longtail.state.tables import VERSION, label_changes, label_store

_CHANGES = select(label_changes.c.number, label_changes.c.record).order_by(label_changes.c.number)
_STORE = select(
    label_store.c.version,
    label_store.c.generation,
    select(func.max(label_changes.c.number)).scalar_subquery().label("last"),
    select(func.max(label_changes.c.at)).scalar_subquery().label("newest"),
)
"""The store with the number of its last change, and the date of its newest, in one statement."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP = timedelta(microseconds=1)
_DELETED_AT_ONCE, _WRITTEN_AT_ONCE = 500, 1000
_READ_AT_ONCE = 10_000
_PATIENCE_SECONDS = 5


class LabelPosition(NamedTuple):
    """Position of a reader: the store, and the number of the last change read."""

    generation: str
    number: int


class LabelRead(NamedTuple):
    """Changes after a position, and the position to continue from.

    Attributes:
        records: changes after the position; all changes if `restarted`.
        position: position for the next read; None while there is no store.
        restarted: whether this is another store, or one restored from a backup, so that earlier reads are void.
    """

    records: list[LabelRecord]
    position: LabelPosition | None
    restarted: bool


class LabelStore:
    """The label changes of one service with any number of replicas. Thread-safe, also across processes."""

    def __init__(self, location: StateLocation) -> None:
        self._backend = LabelServer(location) if isinstance(location, Postgres) else LabelFile(location / LABELS_FILE)
        self._location = str(location if isinstance(location, Postgres) else location / LABELS_FILE)
        self._lock = threading.Lock()
        self._position: LabelPosition | None = None

    def append(self, records: Sequence[LabelRecord], *, after: datetime | None = None) -> None:
        """Write a batch durably; readers see all of the batch or nothing.

        Args:
            after: newest time of the training data of the loaded bundles (`Manifest.data_until`). A record that is not
                dated later than this time and than the record before gets a date a microsecond later than both. So
                dates follow the order of the store and of releases, even if the clocks of trainers and services
                disagree. None: records keep their dates.

        Raises:
            StoreError: the disk is full or not writable, the database does not answer, or the store is damaged. Nothing
                is written, except if the connection broke during the commit: then all of the batch, or nothing.
        """
        if not records:
            return
        rows = _to_rows(records)
        with (
            self._lock,
            self._store_errors(f"expected to write {len(records)} label changes, earlier ones are intact; found"),
        ):
            engine = self._backend.engine(make=True)
            assert engine is not None
            with writing(engine, "labels") as connection:
                store = self._check(connection)
                if after is not None:
                    after = after if store.newest is None else max(after, _EPOCH + store.newest * _STEP)
                    if min(record.at for record in records) <= after:
                        rows = _to_rows(_date_after(after, records))
                for start in range(0, len(rows), _WRITTEN_AT_ONCE):  # keeps each statement below the timeout
                    connection.execute(insert(label_changes), rows[start : start + _WRITTEN_AT_ONCE])
                self._backend.wrote(connection)
            self._position = None  # makes the next read see these changes without waiting for a notification

    def read_from(self, position: LabelPosition | None = None) -> LabelRead:
        """Read the changes after a position, or all; cheap if there are none.

        Raises StoreError if the store is damaged, cannot be reached, or has another version.
        """
        with self._lock, self._store_errors("expected label changes, found"):
            engine = self._backend.engine(make=False)
            if engine is None:
                return LabelRead([], None, position is not None)
            changed = self._backend.changed()
            if not changed and position is not None and position == self._position:
                return LabelRead([], position, False)
            self._position = None  # after a failure the next call reads again, even without new changes
            with reading(engine) as connection:
                store = self._check(connection)
                last, before = store.last or 0, position
                if before is not None and (before.generation != store.generation or before.number > last):
                    before = None
                rows = list(_pages(connection, before.number if before else 0))
            records = [self._record(*row) for row in rows]
            self._position = LabelPosition(str(store.generation), last)
            return LabelRead(records, self._position, before != position)

    def compact(self) -> None:
        """Delete changes that later changes of the same label supersede; readers keep their positions.

        Changes that the newest release already contains stay, because an older release may be published again.
        """
        with self._lock, self._store_errors("expected to shorten it, found"):
            engine = self._backend.engine(make=False)
            if engine is None:
                return
            with reading(engine) as connection:
                self._check(connection)
                rows = list(_pages(connection, 0))
            needed_rows = set(needed_positions([self._record(number, record) for number, record in rows]))
            superseded = [number for i, (number, _) in enumerate(rows) if i not in needed_rows]
            with writing(engine, "labels") as connection:
                for start in range(0, len(superseded), _DELETED_AT_ONCE):
                    numbers = superseded[start : start + _DELETED_AT_ONCE]
                    connection.execute(delete(label_changes).where(label_changes.c.number.in_(numbers)))

    def close(self) -> None:
        """Close the connections, except one that hangs; later use reopens them."""
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._backend.close()
            self._lock.release()

    def _check(self, connection: Connection) -> Any:
        """Check the version of the store, and return its row; raises StoreError."""
        store = connection.execute(_STORE).one_or_none()
        if store is None:
            raise StoreError(f"{self._location}: expected label changes, found tables without a name of their own")
        if store.version != VERSION:
            raise StoreError(
                f"{self._location}: expected version {VERSION}, found {store.version}: use the Longtail that made it, "
                "or another location"
            )
        return store

    def _record(self, number: int, content: str) -> LabelRecord:
        try:
            return read_record(content)
        except ValidationError as error:
            raise StoreError(
                f"{self._location}, change {number}: expected an upsert, patch, hide or restore, found {error}"
            ) from error

    def _store_errors(self, what: str) -> AbstractContextManager[None]:
        return store_errors(f"{self._location}: {what}")


def _to_rows(records: Sequence[LabelRecord]) -> list[dict[str, Any]]:
    rows = []
    for record in records:
        try:
            content = record_json(record)
        except ValueError as error:
            raise StoreError(
                f"change of label {record.id[:100]!r}: expected values that JSON can hold, found others: {error}"
            ) from error
        rows.append({"at": (record.at - _EPOCH) // _STEP, "record": content})
    return rows


def _date_after(latest: datetime, records: Sequence[LabelRecord]) -> list[LabelRecord]:
    """Date records later than the previous one and than `latest`."""
    later = min(latest, datetime.max.replace(tzinfo=UTC) - _STEP) + _STEP
    return [record if record.at > latest else record.model_copy(update={"at": later}) for record in records]


def _pages(connection: Connection, number: int) -> Iterator[tuple[int, str]]:
    """Yield numbers and records after a number, in pages."""
    page: Sequence[Any] = [None] * _READ_AT_ONCE
    while len(page) == _READ_AT_ONCE:
        page = connection.execute(_CHANGES.where(label_changes.c.number > number).limit(_READ_AT_ONCE)).all()
        yield from ((row.number, row.record) for row in page)
        number = page[-1].number if page else number


def read_label_changes(source: str | StateLocation) -> LabelChanges:
    """Read the effect of all changes of a service; raises FileNotFoundError without any, or StoreError."""
    location = parse_location(source)
    if isinstance(location, Path) and not (location / LABELS_FILE).is_file():
        raise FileNotFoundError(f"{source}: expected label changes of a service, found none")
    store = LabelStore(location)
    try:
        read = store.read_from()
    finally:
        store.close()
    if read.position is None:
        raise FileNotFoundError(f"{location}: expected label changes of a service, found none")
    return replay(read.records)


def copy_label_changes(source: str | StateLocation, target: StateLocation) -> int:
    """Copy label changes to a location without any; returns their number."""
    records = read_label_changes(source).records()
    store = LabelStore(target)
    try:
        if existing := len(store.read_from().records):
            raise StoreError(f"{target}: expected no label changes, found {existing}; nothing was copied")
        store.append(records)
    finally:
        store.close()
    return len(records)
