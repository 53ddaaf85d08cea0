"""Store events in a folder: segments of JSON lines become Parquet files.

`append` completes when its lines are on disk: one write and one fsync serve all waiting events. A segment ends by size,
by age and when the process stops. A second thread then converts the segment to Parquet, and also segments of killed
processes, which it recognises by their free lock. A truncated last line was never acknowledged, and is skipped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from queue import Empty, SimpleQueue
from uuid import uuid4

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from longtail.bundle.store import fsync_path, replace_file
from longtail.serving.errors import StorageError
from longtail.serving.events import CountDropped
from longtail.serving.events.schema import SCHEMA

logger = logging.getLogger(__name__)

SEGMENT, FINISHED, DAMAGED = ".jsonl", ".parquet", ".damaged"
_SEGMENT_BYTES = 16 << 20
_SEGMENT_SECONDS = 600.0
_DELETED = ".deleted"
"""File whose modification time is when the newest deleted event became Parquet."""
_MOST_BYTES = 64 << 20
"""Most bytes of events that wait for the disk."""
_PATIENCE_SECONDS = 10.0
_TICK_SECONDS = 1.0
_LONGEST_SILENCE = 86_400.0
"""Seconds without events after which the clock may have jumped ahead."""
_TRUSTED_AFTER = 43_200.0
"""Seconds with events after a silence from which the silence ages the files before it."""
_Waiting = tuple[bytes, int, Future[None] | None]
"""Lines, their number, and the future of the caller that waits for them."""


class FolderEvents:
    """Events of one worker in a folder that workers and hosts may share. Thread-safe.

    The constructor starts threads, so create it after a fork.

    Args:
        folder: created if missing, accessible to its owner alone.
        days: age at which Parquet files are deleted. The latest silence of more than a day does not count before half a
            day after the next event.
        most_bytes: largest size of all Parquet files together; the oldest are deleted first.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        days: float,
        most_bytes: int,
        count_dropped: CountDropped = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Private, because events hold what users chose.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.newest = _newest(folder)
        self._folder = folder
        self._days = days
        self._most_bytes = most_bytes
        self._count_dropped = count_dropped
        self._clock = clock
        self._queue: SimpleQueue[_Waiting] = SimpleQueue()
        self._bytes, self._counting = 0, threading.Lock()
        self._segment: Segment | None = None
        self._trouble: str | None = None
        self._closing, self._ended, self._all_written = threading.Event(), threading.Event(), threading.Event()
        # Two threads: converting a segment takes seconds, which no acknowledgement should wait for.
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._write_all, "events"), (self._tidy_all, "events-tidy"))
        ]
        for thread in self._threads:
            thread.start()

    def append(self, lines: Sequence[bytes]) -> Future[None]:
        """Accept events; the future completes when they are on disk."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a running future cannot be cancelled when its client hangs up
        if not self._put(lines, future):
            future.set_exception(StorageError("too many events wait for the disk; send these events again later"))
        return future

    def offer(self, lines: Sequence[bytes]) -> int:
        """Accept events without an acknowledgement; returns how many were dropped."""
        return 0 if self._put(lines, None) else len(lines)

    def close(self) -> None:
        """Write the waiting events, and end the segment."""
        self._closing.set()
        self._queue.put((b"", 0, None))  # wakes the thread, which waits for the queue
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def _put(self, lines: Sequence[bytes], future: Future[None] | None) -> bool:
        content = b"".join([line + b"\n" for line in lines])
        with self._counting:
            if self._bytes + len(content) > _MOST_BYTES:
                return False
            self._bytes += len(content)
        self._queue.put((content, len(lines), future))
        return True

    def _write_all(self) -> None:
        while not self._closing.is_set() or not self._queue.empty():
            if waiting := self._next():
                self._write(waiting)
            if self._segment is not None and self._segment.full(self._clock()):
                self._end_segment()
        self._end_segment()
        self._all_written.set()
        self._ended.set()

    def _next(self) -> list[_Waiting]:
        waiting: list[_Waiting] = []
        # All events that wait are written together, with one fsync.
        with suppress(Empty):
            waiting.append(self._queue.get(timeout=_TICK_SECONDS))
            while True:
                waiting.append(self._queue.get_nowait())
        with self._counting:
            self._bytes -= sum(len(content) for content, _, _ in waiting)
        return waiting

    def _write(self, waiting: Sequence[_Waiting]) -> None:
        error = None
        content = b"".join([content for content, _, _ in waiting])
        try:
            if content:
                self._segment = self._segment or Segment(self._folder, self._clock())
                self._segment.write(content, sync=any(future for _, _, future in waiting))
            self._trouble = None
        except Exception as cause:  # the thread must survive any error, as later events may succeed
            if str(cause) != self._trouble:
                unexpected = not isinstance(cause, OSError)
                logger.error("events cannot be written to %s: %s", self._folder, cause, exc_info=unexpected)
            self._trouble = str(cause)
            error = StorageError("the events could not be written to the disk; send them again later")
            self._segment = None
        for _, count, future in waiting:
            if future is None:
                self._count_dropped(count if error else 0)
            elif error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _end_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            self._ended.set()

    def _tidy_all(self) -> None:
        while True:
            # Not `_closing`: the writer may still hold the last segment then.
            is_last = self._all_written.is_set()
            self._tidy()
            if is_last:
                return
            self._ended.wait(_SEGMENT_SECONDS)
            self._ended.clear()

    def _tidy(self) -> None:
        tasks: list[tuple[Callable[[Path], None], Path]] = [(self._delete_old, self._folder)]
        tasks += [(finish_segment, path) for path in sorted(self._folder.glob(f"*{SEGMENT}"))]
        for task, path in tasks:
            try:
                task(path)
            except Exception as error:  # one damaged file must not keep the others from being tidied up
                logger.error("%s cannot be tidied up: %s: %s", path, type(error).__name__, error)

    def _delete_old(self, folder: Path) -> None:
        total_bytes, age, later, doubted = 0, 0.0, self._clock(), False
        files = list[tuple[float, int, Path]]()
        for path in folder.glob(f"*{FINISHED}"):
            with suppress(FileNotFoundError):  # another worker deleted it first
                files.append(((status := path.stat()).st_mtime, status.st_size, path))
        for written, size, path in sorted(files, reverse=True):
            silence, later = max(later - written, 0.0), min(later, written)  # not by files that are ahead of the clock
            # A clock that jumps ahead looks like the latest silence, and what is deleted is lost.
            if silence > _LONGEST_SILENCE and age < _TRUSTED_AFTER and not doubted:
                doubted = True
            else:
                age += silence
            total_bytes += size
            if age > 86_400 * self._days or total_bytes > self._most_bytes:
                with suppress(FileNotFoundError):
                    path.unlink()
                    logger.info("%s was deleted: older than events are kept, or more than are", path)
                    deleted = max(written, kept_since(folder))
                    (folder / _DELETED).touch()
                    os.utime(folder / _DELETED, (deleted, deleted))


def _newest(folder: Path) -> float:
    times = [0.0]
    for path in [*folder.glob(f"*{FINISHED}"), *folder.glob(f"*{SEGMENT}")]:
        with suppress(FileNotFoundError):  # converted or deleted meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def kept_since(folder: Path) -> float:
    """Return the time since which all events are kept."""
    try:
        return (folder / _DELETED).stat().st_mtime
    except FileNotFoundError:
        return 0.0


class Segment:
    """A locked file of JSON lines for one process."""

    def __init__(self, folder: Path, now: float) -> None:
        self._began = now
        self._path = folder / f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S}-{uuid4().hex[:12]}{SEGMENT}"
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file).st_nlink:
                break
            os.close(self._file)  # before the lock, another process took it for an abandoned segment and deleted it
        self._size = 0
        # The file's name must be on disk before an event in it is acknowledged.
        fsync_path(folder)

    def write(self, lines: bytes, *, sync: bool) -> None:
        """Append lines, all or none; `sync`: fsync."""
        try:
            written = 0
            while written < len(lines):
                # A disk that is nearly full may take only a part.
                written += os.write(self._file, memoryview(lines)[written:])
            if sync:
                os.fsync(self._file)
        except OSError:
            # After a failed fsync the kernel may drop the lines silently, so the file is cut to the acknowledged ones.
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
                if not self._size:  # otherwise every request would leave an empty file on a full disk
                    self._path.unlink()
            self.close()
            raise
        self._size += len(lines)

    def full(self, now: float) -> bool:
        """Return whether the segment is large or old enough."""
        return self._size >= _SEGMENT_BYTES or now - self._began >= _SEGMENT_SECONDS

    def close(self) -> None:
        """Close the file, which releases its lock."""
        with suppress(OSError):  # acknowledged events are on disk already
            os.close(self._file)


def finish_segment(path: Path) -> None:
    """Replace a segment by a Parquet file, unless it is in use."""
    with suppress(FileNotFoundError), path.open("r+b") as file:  # NFS locks only files opened for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if not path.exists():  # another process converted it before this one got the lock
            return
        content = file.read()
        # A killed process leaves half a line at most, which was never acknowledged.
        table, damaged = read_lines(content[: content.rfind(b"\n") + 1])
        if damaged:
            aside = path.with_suffix(DAMAGED)
            logger.error("%s: %d lines are no events; they are kept in %s", path, damaged.count(b"\n"), aside.name)
            replace_file(aside, damaged, mode=0o600)
        if table.num_rows:
            working = path.with_name(f".{path.stem}.tmp")
            try:
                pq.write_table(table, working, compression="zstd")
                working.chmod(0o600)  # as a segment: events hold what users chose
                fsync_path(working)
                working.replace(path.with_suffix(FINISHED))
            finally:
                working.unlink(missing_ok=True)
            fsync_path(path.parent)
        # Only now that the Parquet file and its name are on disk may the segment go.
        path.unlink()


def read_lines(lines: bytes) -> tuple[pa.Table, bytes]:
    """Parse JSON lines into a table and the lines without events."""
    if not lines:
        return SCHEMA.empty_table(), b""
    try:
        return _parse(lines), b""
    except (pa.ArrowException, UnicodeDecodeError):
        good, damaged = list[bytes](), list[bytes]()
        for line in lines.splitlines(keepends=True):
            (good if _is_event(line) else damaged).append(line)
        return (_parse(b"".join(good)) if good else SCHEMA.empty_table()), b"".join(damaged)


def _parse(lines: bytes) -> pa.Table:
    lines.decode()  # raises for invalid UTF-8, which Arrow accepts but readers of Parquet do not
    options = pa.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore")
    # One block, because Arrow refuses an event that is longer than a block.
    read = pa.json.ReadOptions(use_threads=False, block_size=max(1 << 20, len(lines)))
    return pa.json.read_json(BytesIO(lines), read, options).select(SCHEMA.names)


def _is_event(line: bytes) -> bool:
    try:
        return bool(_parse(line)["kind"][0].as_py())
    except (pa.ArrowException, UnicodeDecodeError, IndexError):
        return False
