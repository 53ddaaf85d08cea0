"""Label changes in one total order, kept in SQLite or PostgreSQL.

`append` returns when its batch is on disk. Writers and readers of any number of processes, and of hosts where it is
PostgreSQL, share a store: numbers rise in the order of commits, and a reader goes on after the last that it read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import Connection, delete, func, insert, select

from longtail.bundle import LabelChanges, LabelRecord, needed, read_record, record_json, replay
from longtail.state.engines import reading, store_errors, writing
from longtail.state.errors import StoreError
from longtail.state.label_file import LABELS_FILE, LabelFile
from longtail.state.label_server import LabelServer
from longtail.state.place import Place, Postgres, read_place
from longtail.state.tables import VERSION, label_changes, label_store

_CHANGES = select(label_changes.c.number, label_changes.c.record).order_by(label_changes.c.number)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STEP = timedelta(microseconds=1)
_DELETED_AT_ONCE, _WRITTEN_AT_ONCE = 500, 1000
_READ_AT_ONCE = 10_000
_PATIENCE_SECONDS = 5


class LabelPosition(NamedTuple):
    """Where a reader stands: the number of the last change it has read, and in which store."""

    generation: str
    number: int


class LabelRead(NamedTuple):
    """Changes read since a position, and the position to go on from.

    Attributes:
        records: those after the position; all of them when `restarted`.
        position: where to read on; None as long as there is no store.
        restarted: it is another store, or one that was set back: forget what was read before.
    """

    records: list[LabelRecord]
    position: LabelPosition | None
    restarted: bool


class LabelStore:
    """The label changes of one service, of any number of replicas. Safe to use from several threads and processes."""

    def __init__(self, place: Place) -> None:
        self._backend = LabelServer(place) if isinstance(place, Postgres) else LabelFile(place / LABELS_FILE)
        self._place = str(place if isinstance(place, Postgres) else place / LABELS_FILE)
        self._lock = threading.Lock()
        self._position: LabelPosition | None = None

    def append(self, records: Sequence[LabelRecord], *, after: datetime | None = None) -> None:
        """Write a batch; when this returns it is on disk, and until then no reader sees any of it.

        Args:
            after: up to when the bundles know their labels that the change is made under (`Manifest.data_until`). With
                it, a record that the clock dates no later than that, or than a record before it, is dated a microsecond
                later than both. So the order of dates is that of the store and of releases, also where the clocks of
                trainers and services disagree. None: records are dated as they are.

        Raises:
            StoreError: the disk is full or not writable, or the database does not answer. Nothing of the batch is kept,
                but where the connection broke while the database wrote: then all of it or nothing.
            StoreError: the store cannot be continued; it stays as it is.
        """
        if not records:
            return
        rows = _rows_of(records)
        with self._lock, self._told(f"expected to write {len(records)} label changes, earlier ones are intact; found"):
            engine = self._backend.engine(make=True)
            assert engine is not None
            with writing(engine, "labels") as connection:
                self._check(connection)
                if after is not None:
                    newest = connection.scalar(select(func.max(label_changes.c.at)))
                    after = after if newest is None else max(after, _EPOCH + newest * _STEP)
                    if min(record.at for record in records) <= after:
                        rows = _rows_of(_dated_after(after, records))
                for start in range(0, len(rows), _WRITTEN_AT_ONCE):  # PostgreSQL is waited for only so long
                    connection.execute(insert(label_changes), rows[start : start + _WRITTEN_AT_ONCE])
                self._backend.wrote(connection)
            self._position = None  # what was written is read without waiting to hear of it

    def read_from(self, position: LabelPosition | None = None) -> LabelRead:
        """Read the changes after a position of an earlier read, or all; next to no work when there are none.

        Raises StoreError where the store is damaged, cannot be reached, or is of another version.
        """
        with self._lock, self._told("expected label changes, found"):
            engine = self._backend.engine(make=False)
            if engine is None:
                return LabelRead([], None, position is not None)
            changed = self._backend.changed()
            if not changed and position is not None and position == self._position:
                return LabelRead([], position, False)
            self._position = None  # should the reading fail, it is tried again whether or not somebody writes
            with reading(engine) as connection:
                generation = self._check(connection)
                last = connection.scalar(select(func.max(label_changes.c.number))) or 0
                before = position
                if before is not None and (before.generation != generation or before.number > last):
                    before = None
                rows = list(_pages(connection, before.number if before else 0))
            records = [self._record(*row) for row in rows]
            self._position = LabelPosition(generation, last)
            return LabelRead(records, self._position, before != position)

    def compact(self) -> None:
        """Forget changes that later ones of the same label have overtaken; readers go on where they are.

        Changes that the newest release has taken in stay: an older one may be published again.
        """
        with self._lock, self._told("expected to shorten it, found"):
            engine = self._backend.engine(make=False)
            if engine is None:
                return
            with reading(engine) as connection:
                self._check(connection)
                rows = list(_pages(connection, 0))
            kept = set(needed([self._record(number, record) for number, record in rows]))
            overtaken = [number for place, (number, _) in enumerate(rows) if place not in kept]
            with writing(engine, "labels") as connection:
                for start in range(0, len(overtaken), _DELETED_AT_ONCE):
                    part = overtaken[start : start + _DELETED_AT_ONCE]
                    connection.execute(delete(label_changes).where(label_changes.c.number.in_(part)))

    def close(self) -> None:
        """Close the connections, but of a use that hangs; another use opens them again."""
        if self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._backend.close()
            self._lock.release()

    def _check(self, connection: Connection) -> str:
        """The store's generation."""
        found = connection.execute(select(label_store.c.version, label_store.c.generation)).one_or_none()
        if found is None:
            raise StoreError(f"{self._place}: expected label changes, found tables without a name of their own")
        if found.version != VERSION:
            raise StoreError(
                f"{self._place}: expected version {VERSION}, found {found.version}: use the Longtail that made it, or "
                "another place"
            )
        return str(found.generation)

    def _record(self, number: int, content: str) -> LabelRecord:
        try:
            return read_record(content)
        except ValidationError as error:
            raise StoreError(
                f"{self._place}, change {number}: expected an upsert, patch, hide or restore, found {error}"
            ) from error

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            with store_errors(f"{self._place}: {what}"):
                yield
        except OSError as error:
            raise StoreError(f"{self._place}: {what}: {error.strerror}") from error


def _rows_of(records: Sequence[LabelRecord]) -> list[dict[str, Any]]:
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


def _dated_after(latest: datetime, records: Sequence[LabelRecord]) -> list[LabelRecord]:
    """Return the records, those dated no later than `latest` dated a microsecond after it."""
    later = min(latest, datetime.max.replace(tzinfo=UTC) - _STEP) + _STEP
    return [record if record.at > latest else record.model_copy(update={"at": later}) for record in records]


def _pages(connection: Connection, number: int) -> Iterator[tuple[int, str]]:
    """Numbers and records after a number; a page at a time, for PostgreSQL is waited for only so long."""
    while page := connection.execute(_CHANGES.where(label_changes.c.number > number).limit(_READ_AT_ONCE)).all():
        yield from ((row.number, row.record) for row in page)
        number = page[-1].number


def read_label_changes(source: str | Place) -> LabelChanges:
    """Get what all changes of a service amount to; raises FileNotFoundError where there are none, or StoreError."""
    place = read_place(source)
    if isinstance(place, Path) and not (place / LABELS_FILE).is_file():
        raise FileNotFoundError(f"{source}: expected label changes of a service, found none")
    store = LabelStore(place)
    try:
        read = store.read_from()
    finally:
        store.close()
    if read.position is None:
        raise FileNotFoundError(f"{place}: expected label changes of a service, found none")
    return replay(read.records)


def copy_label_changes(source: str | Place, target: Place) -> int:
    """Take label changes over into a place that has none; how many."""
    records = read_label_changes(source).records()
    store = LabelStore(target)
    try:
        if found := len(store.read_from().records):
            raise StoreError(f"{target}: expected no label changes, found {found}; nothing was copied")
        store.append(records)
    finally:
        store.close()
    return len(records)
