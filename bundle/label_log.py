"""Labels that were added, hidden or brought back since a bundle was trained: an append-only log of changes.

    longtail-labels 1 3f0c…               format version, and a name that every rewriting changes
    9d1f2a04 1 {"op":"upsert","id":"a",…}  crc32 of all after it, records of the batch still to come, the record
    7b00c3de 0 {"op":"hide","id":"b",…}    … 0: the batch is whole

`append` returns when its batch is on disk. A batch that is not whole was never acknowledged: readers do not see it
and the next writer cuts it off. Any other line whose checksum fails is damage, and said so.

Writers and readers of any number of processes share a log; a lock file beside it keeps them apart.
"""

from __future__ import annotations

import fcntl
import glob
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import uuid4

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
)

from longtail.bundle.errors import LabelLogCorruptError, LabelLogError, LabelLogVersionError
from longtail.bundle.store import remove_stale, replace_file

VERSION = 1
_MAGIC = "longtail-labels"


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    at: AwareDatetime
    """When it was asked for, UTC; later than what it follows, whatever the clock said (`LabelLog.append`)."""


class Upsert(_Change):
    """A label is added, or a known one embedded again; it is no longer hidden."""

    op: Literal["upsert"] = "upsert"
    features: dict[str, JsonValue]
    """By name, as the label tower takes them."""
    display: dict[str, JsonValue] = {}
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Its numbers, by the release's priors; of those left out, what `Priors.of_added` says."""

    @model_serializer(mode="wrap")
    def _legible_to_older_versions(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """They refuse a record with a name that they do not know: without priors, there is none."""
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value or name != "priors"}


class Hide(_Change):
    """An added label is deleted, any other hidden, in this release and in those to come."""

    op: Literal["hide"] = "hide"


class Restore(_Change):
    """A hidden label is no longer hidden."""

    op: Literal["restore"] = "restore"


LabelRecord = Upsert | Hide | Restore
_RECORD: TypeAdapter[LabelRecord] = TypeAdapter(Annotated[LabelRecord, Field(discriminator="op")])


@dataclass(frozen=True)
class LabelChanges:
    """What a sequence of records amounts to; of several about one label the last counts.

    Attributes:
        upserts: added and changed labels by id; none of them is hidden.
        hidden: hidden labels by id.
    """

    upserts: dict[str, Upsert] = field(default_factory=dict)
    hidden: dict[str, Hide] = field(default_factory=dict)

    def after(self, records: Iterable[LabelRecord]) -> LabelChanges:
        """These changes and then some more."""
        upserts, hidden = self.upserts.copy(), self.hidden.copy()
        for record in records:
            hidden.pop(record.id, None)
            if isinstance(record, Upsert):
                upserts[record.id] = record
            elif isinstance(record, Hide):
                upserts.pop(record.id, None)
                hidden[record.id] = record
        return LabelChanges(upserts, hidden)

    def records(self) -> list[Upsert | Hide]:
        """The shortest sequence that amounts to this."""
        return [*self.upserts.values(), *self.hidden.values()]


def replay(records: Iterable[LabelRecord]) -> LabelChanges:
    """What all the records of a log amount to."""
    return LabelChanges().after(records)


class LogPosition(NamedTuple):
    """Where a reader stands in a log: the byte and line up to which it has read, and of which rewriting of the log."""

    generation: str
    offset: int
    line: int


class LogRead(NamedTuple):
    """Records read from a log since a position, and the position to go on from.

    Attributes:
        records: those after the position; all of them when `restarted`.
        position: where to read on; None as long as there is no log.
        restarted: the log was rewritten: forget what was read before.
    """

    records: list[LabelRecord]
    position: LogPosition | None
    restarted: bool


class _Seen(NamedTuple):
    """What a writer knows of a log: the date of none of the records up to a position is later than `newest`."""

    position: LogPosition
    newest: datetime


_EVER = datetime.min.replace(tzinfo=UTC)
_STEP = timedelta(microseconds=1)


class LabelLog:
    """One log file. Safe to use from several threads and processes at once.

    Args:
        path: the log; made by the first `append`, in a directory that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread_lock = threading.Lock()
        self._seen: _Seen | None = None
        self._unchanged: tuple[tuple[int, int, int], LogPosition] | None = None

    def append(self, records: Sequence[LabelRecord], *, after: datetime | None = None) -> None:
        """Write a batch; when this returns it is on disk, and until then no reader sees any of it.

        Args:
            records: in their order.
            after: up to when the bundles know their labels that the change is made under (`Manifest.data_until`). With
                it, a record that the clock dates no later than that, or than a record before it in the log, is dated a
                microsecond later than both. So the order of dates is that of the log and of releases, also where the
                clocks of trainers and services disagree. None: records are dated as they are.

        Raises:
            LabelLogError: the disk is full or not writable; nothing of the batch is kept.
            LabelLogCorruptError, LabelLogVersionError: the log cannot be continued; it stays as it is.
        """
        if not records:
            return
        batch = _lines(records)
        try:
            with self._locked(fcntl.LOCK_EX):
                if not self.path.exists():
                    self._rewrite([])
                with self.path.open("r+b", buffering=0) as file:
                    end, newest = self._see(file.fileno())
                    if after is not None and min(record.at for record in records) <= max(after, newest):
                        records = _dated_after(max(after, newest), records)
                        batch = _lines(records)
                    _write_at(file.fileno(), end.offset, batch)
                    end = LogPosition(end.generation, end.offset + len(batch), end.line + len(records))
                    self._seen = _Seen(end, max(newest, *(record.at for record in records)))
        except OSError as error:
            raise LabelLogError(
                f"{self.path}: expected to append {len(batch)} bytes: {error.strerror}; none of the "
                f"{len(records)} changes is kept, the earlier ones are intact"
            ) from error

    def read_from(self, position: LogPosition | None = None) -> LogRead:
        """The records after a position; one look at the file's size and time when there are none.

        Args:
            position: `LogRead.position` of an earlier read; None for the beginning.

        Raises:
            LabelLogCorruptError, LabelLogVersionError: the log is damaged, or written by a newer Longtail.
            OSError: it cannot be read.
        """
        try:
            stamp = _stamp(os.stat(self.path))
            if position is not None and self._unchanged == (stamp, position):
                return LogRead([], position, False)
            with self._locked(fcntl.LOCK_SH), self.path.open("rb", buffering=0) as file:
                stamp = _stamp(os.fstat(file.fileno()))
                end, records = self._scan(file.fileno(), position)
                self._note(position, end, records)
        except FileNotFoundError:
            return LogRead([], None, position is not None)
        # With half a batch at its end the next one could make the file as long as it is now.
        self._unchanged = (stamp, end) if stamp[1] == end.offset else None
        return LogRead(records, end, position is not None and end.generation != position.generation)

    def compact(self) -> None:
        """Rewrite the log in one step to what it amounts to; readers start over.

        Changes that the newest release has taken in stay: an older one may be published again.

        Raises:
            LabelLogError: the disk is full or not writable; the log stays as it was.
            LabelLogCorruptError, LabelLogVersionError: it cannot be read; it stays as it was.
        """
        try:
            with self._locked(fcntl.LOCK_EX):
                if not self.path.exists():
                    return
                with self.path.open("rb", buffering=0) as file:
                    _, records = self._scan(file.fileno(), None)
                self._rewrite(replay(records).records())
        except OSError as error:
            raise LabelLogError(f"{self.path}: expected to rewrite it: {error.strerror}; it stays as it was") from error

    def _rewrite(self, records: Sequence[Upsert | Hide]) -> None:
        remove_stale(self.path.parent, f".{glob.escape(self.path.name)}.*.tmp")
        replace_file(self.path, f"{_MAGIC} {VERSION} {uuid4().hex}\n".encode() + _lines(records))

    def _see(self, file: int) -> _Seen:
        """What is known of the log, all of it."""
        before = self._seen
        start = None if before is None else before.position
        end, records = self._scan(file, start)
        self._note(start, end, records)
        return self._seen or _Seen(end, _EVER)

    def _note(self, start: LogPosition | None, end: LogPosition, records: Sequence[LabelRecord]) -> None:
        """Know what was read from a position on, if nothing before it is unknown."""
        known = self._seen
        if start is None or start.generation != end.generation:
            known = None
        elif known is None or known.position.generation != end.generation or known.position.offset < start.offset:
            return
        newest = max((record.at for record in records), default=_EVER)
        if known is not None:
            newest = max(newest, known.newest)
        self._seen = _Seen(end, newest)

    def _scan(self, file: int, start: LogPosition | None) -> tuple[LogPosition, list[LabelRecord]]:
        """Read and check whole batches from a position, or from the beginning if the log was rewritten since.

        Returns where the last whole batch ends, and the records.
        """
        size = os.fstat(file).st_size
        head = os.pread(file, 128, 0)
        generation = self._generation(head)
        if start is None or start.generation != generation or start.offset > size:
            start = LogPosition(generation, head.index(b"\n") + 1, 1)
        content = _read(file, start.offset, size - start.offset)
        records: list[LabelRecord] = []
        batch: list[LabelRecord] = []
        end, at, line, expected = start, 0, start.line, None
        while at < len(content):
            newline = content.find(b"\n", at)
            if newline < 0 or (content[at] == 0 and not content[at:].strip(b"\0")):
                break  # what a write that never ended leaves: half a line, or room that was never filled
            line += 1
            record, left = self._record(content[at:newline], line)
            if expected is not None and left != expected:
                raise self._corrupt(line, f"{expected} more records of the batch", f"{left}")
            batch.append(record)
            at, expected = newline + 1, left - 1
            if left == 0:
                records += batch
                batch, expected = [], None
                end = LogPosition(generation, start.offset + at, line)
        return end, records

    def _record(self, content: bytes, line: int) -> tuple[LabelRecord, int]:
        """One line: the record, and how many of its batch follow."""
        crc, _, rest = content.partition(b" ")
        if crc != b"%08x" % zlib.crc32(rest):
            raise self._corrupt(line, f"crc32 {zlib.crc32(rest):08x} of the rest of the line", repr(crc[:20]))
        left, _, record = rest.partition(b" ")
        try:
            return _RECORD.validate_json(record), int(left)
        except (ValidationError, ValueError) as error:
            raise self._corrupt(line, "an upsert, hide or restore", str(error)) from error

    def _generation(self, head: bytes) -> str:
        words = head.partition(b"\n")[0].decode("ascii", "replace").split(" ")
        if b"\n" not in head or words[0] != _MAGIC or len(words) < 2 or not words[1].isdigit():
            raise self._corrupt(1, f"{_MAGIC} {VERSION}", repr(head[:40]))
        if words[1] != str(VERSION):
            raise LabelLogVersionError(
                f"{self.path}: version {words[1]}, this installation reads {VERSION}: upgrade Longtail"
            )
        return words[-1]

    def _corrupt(self, line: int, expected: str, found: str) -> LabelLogCorruptError:
        return LabelLogCorruptError(
            f"{self.path}, line {line}: expected {expected}, found {found}; restore the file, or cut it before this "
            "line and lose what follows"
        )

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Keep other threads and processes out: a lock of its own file, for compaction replaces the log."""
        with self._thread_lock:
            lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, kind)
                yield
            finally:
                os.close(lock)


def _dated_after(latest: datetime, records: Sequence[LabelRecord]) -> list[LabelRecord]:
    """The records, those dated no later than `latest` dated a microsecond after it."""
    later = min(latest, datetime.max.replace(tzinfo=UTC) - _STEP) + _STEP
    return [record if record.at > latest else record.model_copy(update={"at": later}) for record in records]


def _lines(records: Sequence[LabelRecord]) -> bytes:
    lines = []
    for place, record in enumerate(records):
        rest = b"%d %b" % (len(records) - 1 - place, _json(record))
        lines.append(b"%08x %b\n" % (zlib.crc32(rest), rest))
    return b"".join(lines)


def _json(record: LabelRecord) -> bytes:
    """The record as JSON that reads back as the record; a line that did not would make the whole log unreadable."""
    try:
        content = record.model_dump_json().encode()
        if _RECORD.validate_json(content) == record:
            return content
        reason = "it reads back as something else"
    except ValueError as error:
        reason = str(error)
    raise LabelLogError(
        f"change of label {record.id[:100]!r}: expected values that JSON can hold, found others: {reason}"
    )


def _write_at(file: int, offset: int, content: bytes) -> None:
    """Replace all from `offset` on and flush it to disk; after an error the file ends at `offset`."""
    if os.fstat(file).st_size > offset:
        os.ftruncate(file, offset)
    try:
        written = 0
        while written < len(content):
            written += os.pwrite(file, content[written:], offset + written)
        os.fsync(file)
    except BaseException:
        os.ftruncate(file, offset)
        os.fsync(file)
        raise


def _read(file: int, offset: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(file, size, offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
