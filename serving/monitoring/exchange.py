"""Figures of replicas that share a database: each tells what it counts, and keeps what the others count beside it.

One worker of a replica tells, every two seconds, the rows of all its workers' rings that have changed, and writes what
other replicas tell into files beside them, `KIND.REPLICA-WORKER.ring`: who adds up the rings of a directory adds up all
replicas. Periods are of the database's time, for the clocks of hosts differ.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from contextvars import copy_context
from dataclasses import asdict
from pathlib import Path
from time import monotonic

import numpy as np

from longtail.bundle.arrays import Array
from longtail.serving.monitoring.release_figures import BY_LABEL
from longtail.serving.monitoring.ring import Layout, Ring, is_of_others, periods_of, read_ring
from longtail.state import FigureRow, ReplicaStore, SoleProcess, StoreError, Told, replica_id

logger = logging.getLogger(__name__)

_SECONDS = 2.0
_TIDY_SECONDS = 60.0
_BY_LABEL_BYTES = 256 << 10
"""A second that a replica tells of counts by label, on average: those of a large catalogue it tells less often."""
_LONGEST_SECONDS, _GONE_SECONDS = 90 * 86_400, 86_400
"""That what was told stands: of periods that do not end, and of what is gone."""
_SLACK_SECONDS = 60
_TOLERANCE_SECONDS = 0.1
_LAST_SECONDS, _PATIENCE_SECONDS = 3.0, 1.0
_LOCK = "exchange.lock"
_NOTHING, _UNKNOWN = -1, -2
"""Instead of a checksum: the counts are gone; whatever was told."""
_IS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_OF_WORKER = re.compile(r"\.(\d+)\.ring$")


class SharedClock:
    """The database's time, as this host can tell it; the host's own until they are compared.

    Args:
        host: the host's time, seconds since 1970.
    """

    def __init__(self, host: Callable[[], float] = time.time) -> None:
        self._host = host
        self._ahead = 0.0

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._host() - self._ahead

    def compare(self, database: Callable[[], float]) -> None:
        """Go by the database's time from now on; raises as `database`, which tells it."""
        asked = self._host()
        theirs = database()
        answered = self._host()
        ahead = (asked + answered) / 2 - theirs
        if abs(ahead - self._ahead) > max(_TOLERANCE_SECONDS, answered - asked):
            self._ahead = ahead


class FigureExchange:
    """The exchange of one replica; each of its workers has one, and one of them does it for all, in a thread of its
    own. No other failure than a log line comes of it.

    Args:
        store: what the replicas share; closed by `stop`.
        state: the replica's own directory; its rings are in `live/RELEASE`.
        clock: the database's time; a `SharedClock` is kept to it.
        held: names of the releases that are counted now.
    """

    def __init__(
        self, store: ReplicaStore, state: Path, clock: Callable[[], float], held: Callable[[], Collection[str]]
    ) -> None:
        self.replica = replica_id(state)
        self._store = store
        self._root = state / "live"
        self._clock = clock
        self._held = held
        self._told: Told | None = None
        self._version = 0
        self._told_at, self._told_by_label_at = 0.0, 0.0
        self._by_label_due = 0.0
        self._before: set[str] | None = None
        self._heard: dict[str, int] = {}
        self._whole: set[str] = set()
        """Releases whose counts by label are known of all."""
        self._refused: set[tuple[str, str]] = set()
        self._tidied_at = monotonic()
        self._sole = SoleProcess(state / _LOCK)
        self._compared = False
        self._trouble: str | None = None
        self._anew: set[str] = set()
        self._turn, self._anew_lock = threading.Lock(), threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="figure-exchange", daemon=True
        )

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Have the last told, unless the database is away, and close the store; takes some seconds at most."""
        self._stopping.set()
        self._thread.join(_LAST_SECONDS)
        if not self._thread.is_alive():  # else a database holds it up, and it ends with the process
            self._store.close()

    def is_there(self) -> bool:
        """Whether the database answers, as far as is known without waiting for long; the clock goes by it then."""
        if self._compared or self._trouble is not None:
            return self._trouble is None
        with self._turn:
            return self._tried(self._compare_clocks)

    def _compare_clocks(self) -> None:
        if isinstance(self._clock, SharedClock):
            if not self._compared:
                self._store.now()  # connects, which takes long
            self._clock.compare(self._store.now)
        self._compared = True

    def read_again(self, release: str) -> None:
        """What is counted by label of a release is told and read anew: it has gone into service."""
        with self._anew_lock:
            self._anew.add(release)

    def exchange(self, *, listen: bool = True) -> None:
        """Do now what the thread does every two seconds; what goes wrong is logged, once."""

        def work() -> None:
            self._compare_clocks()
            if self._sole.claim():
                self._begin_anew()
                self._tell(self._clock())
                if listen:
                    self._listen(self._clock())

        with self._turn:
            self._tried(work)

    def _tried(self, work: Callable[[], None]) -> bool:
        """Whether some work with the database was done; what went wrong else is logged, once."""
        try:
            work()
        except (StoreError, OSError) as error:
            if str(error) != self._trouble:
                logger.warning("figures are not exchanged with other replicas: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = None
        return True

    def _work(self) -> None:
        while not self._stopping.wait(_SECONDS):
            try:
                self.exchange()
            # Whatever it is, the next may go well.
            except Exception:
                logger.exception("figures could not be exchanged")
        try:
            self._tell_last()
        finally:
            self._sole.let_go()

    def _tell_last(self) -> None:
        deadline = monotonic() + _PATIENCE_SECONDS
        while not self._sole.claim() and monotonic() < deadline:
            time.sleep(_PATIENCE_SECONDS / 10)  # for another worker that ends, and has not seen this one's last counts
        if self._sole.is_this and self._trouble is None:
            self.exchange(listen=False)
            if self._trouble is None:
                self._tried(lambda: self._store.leave(self.replica, self._clock()))

    def _begin_anew(self) -> None:
        with self._anew_lock:
            anew, self._anew = self._anew, set()
        self._whole = self._whole - anew
        for (_, release, kind), told in (self._told or {}).items():
            if release in anew and kind.startswith(BY_LABEL):
                told.update(dict.fromkeys(told, _UNKNOWN))
                self._told_by_label_at = 0.0

    def _tell(self, now: float) -> None:
        if self._told is None:
            self._told, self._version = self._store.told(self.replica)
            self._told_at = self._told_by_label_at = 0.0
        by_label = monotonic() >= self._by_label_due
        held = set(self._held())
        if self._before is None:
            self._before = {directory.name for directory in self._root.iterdir()}
        releases = held | self._before
        self._told = {key: of for key, of in self._told.items() if key[1] in releases}
        rows = [
            *self._changed_rows(releases, False, self._told_at, now),
            *(self._changed_rows(held, True, self._told_by_label_at, now) if by_label else ()),
        ]
        before, version = self._store.tell(self.replica, rows, now)
        for row in rows:
            self._told.setdefault((row.worker, row.release, row.kind), {})[row.period] = row.checksum
        self._before, self._told_at = held, now
        if by_label:
            spent = sum(len(row.content) for row in rows if row.kind.startswith(BY_LABEL))
            self._told_by_label_at, self._by_label_due = now, monotonic() + spent / _BY_LABEL_BYTES
        if before != self._version:
            self._told = None  # the database does not have all that it was told
        self._version = version

    def _changed_rows(self, releases: Iterable[str], by_label: bool, since: float, now: float) -> Iterator[FigureRow]:
        """Rows of this replica's rings that differ from what was told of them: those by label, or all others."""
        assert self._told is not None
        missing = {key for key in self._told if by_label and key[1] in releases and key[2].startswith(BY_LABEL)}
        for release in sorted(releases):
            for path in sorted((self._root / release).glob("*.ring")):
                worker = _OF_WORKER.search(path.name)
                if worker is None or path.name.startswith(BY_LABEL) != by_label or (found := read_ring(path)) is None:
                    continue
                layout, array = found
                key = int(worker[1]), release, layout.kind
                missing.discard(key)
                for period, counts, checksum in _changed(array, layout, self._told.get(key, {}), since, now):
                    expires_at = now + _GONE_SECONDS
                    if counts is not None:
                        end = (period + layout.rows) * layout.seconds + _SLACK_SECONDS
                        expires_at = min(end, now + _LONGEST_SECONDS)
                    content = b"" if counts is None else zlib.compress(counts.tobytes(), 1)
                    yield FigureRow(*key, period, _described(layout), content, checksum, expires_at)
        for key in missing:
            for period, checksum in self._told[key].items():
                if checksum != _NOTHING:
                    yield FigureRow(*key, period, "{}", b"", _NOTHING, now + _GONE_SECONDS)

    def _listen(self, now: float) -> None:
        held = set(self._held())
        for release in held - self._whole:
            for path in (self._root / release).glob("*.ring"):
                if is_of_others(path) and path.name.startswith(BY_LABEL):
                    path.unlink(missing_ok=True)
            if self._heard:  # else all is read anyway
                for kind in BY_LABEL:
                    with closing(self._store.all_of(release, kind, self.replica)) as told:
                        self._write(told, held, now)
            self._whole = self._whole | {release}
        with closing(self._store.news(self._heard, self.replica)) as told:
            self._write(told, held, now)
        self._whole = self._whole & held
        if monotonic() - self._tidied_at >= _TIDY_SECONDS:
            self._tidied_at = monotonic()
            self._store.forget(now)
            self._forget(held, now)

    def _write(self, told: Iterable[tuple[str, FigureRow]], held: Collection[str], now: float) -> None:
        """Write what others tell beside this replica's own."""
        ring: Ring | None = None
        for replica, row in told:
            if row.kind.startswith(BY_LABEL) and row.release not in held:
                continue
            directory, writer = self._root / row.release, f"{replica}-{row.worker}"
            try:
                _check_names(replica, row)
                if not row.content:
                    ring = None
                    _clear(directory / f"{row.kind}.{writer}.ring", row.period)
                    continue
                layout = _layout_of(row)
                newest = layout.period(now)
                if not newest - layout.rows < row.period <= newest + 1:
                    continue
                counts = _unpacked(row.content, layout)
            except (ValueError, TypeError) as error:
                if (replica, row.kind) not in self._refused:
                    logger.warning("figures of %s, %s of %s: %s", replica, row.kind, row.release, error)
                self._refused.add((replica, row.kind))
                continue
            if ring is None or (ring.path, ring.layout) != (directory / layout.file(writer), layout):
                directory.mkdir(exist_ok=True)
                os.utime(directory, (now, now))  # it is in use
                ring = Ring(directory, layout, writer)
                if not ring.is_kept:
                    raise OSError(f"{ring.path}: expected room for it, found none")
            ring.put(row.period, counts, newest + 1)

    def _forget(self, held: Collection[str], now: float) -> None:
        """Delete others' rings that hold nothing any more, and those by label of releases that are not counted."""
        for path in self._root.glob("*/*.ring"):
            if is_of_others(path):
                counted = path.parent.name in held or not path.name.startswith(BY_LABEL)
                found = read_ring(path) if counted else None
                if found is None or not _holds_any(*found, now):
                    path.unlink(missing_ok=True)


def _holds_any(layout: Layout, array: Array, now: float) -> bool:
    return bool(periods_of(array).max() > layout.period(now) - layout.rows)


def _changed(
    array: Array, layout: Layout, told: dict[int, int], since: float, now: float
) -> Iterator[tuple[int, Array | None, int]]:
    """Periods whose counts differ from what was told of them, the counts, None: gone, and their checksums.

    Args:
        array: a ring, [rows, 1 + columns].
        layout: its layout.
        told: checksums by period; those that the ring has gone beyond are taken out.
        since: when all changes had been told.
        now: the time, as `since` in seconds since 1970.
    """
    newest = layout.period(now)
    oldest, settled = newest - layout.rows + 1, layout.period(since) - 1
    for period in [period for period in told if period < oldest]:
        del told[period]
    stamps = periods_of(array)
    inside = np.flatnonzero((stamps >= oldest) & (stamps <= newest + 1))
    for place, period in zip(inside.tolist(), stamps[inside].tolist(), strict=True):
        if period >= settled or period not in told:
            row = array[place].copy()
            check = zlib.crc32(row[1:])
            if row[0] == period and told.get(period) != check:
                yield period, row[1:], check
    for period in told.keys() - set(stamps.tolist()):
        if told[period] != _NOTHING:
            yield period, None, _NOTHING


def _clear(path: Path, period: int) -> None:
    """Take a period out of a ring, if there is such a ring and it holds the period."""
    found = read_ring(path)
    if found is not None and period in periods_of(found[1]):
        worker = path.name.removeprefix(f"{found[0].kind}.").removesuffix(".ring")
        Ring(path.parent, found[0], worker).array[period % found[0].rows] = 0


def _described(layout: Layout) -> str:
    return json.dumps({name: value for name, value in asdict(layout).items() if name != "kind"})


def _check_names(replica: str, row: FigureRow) -> None:
    if not all(map(_IS_NAME.fullmatch, (replica, row.release, row.kind))):
        raise ValueError("expected names of files")


def _layout_of(row: FigureRow) -> Layout:
    """What a row is of; raises ValueError or TypeError if nothing that is known."""
    layout = Layout(kind=row.kind, **json.loads(row.layout))
    if min(layout.rows, layout.columns, layout.seconds) < 1 or layout.dtype not in ("float64", "uint32"):
        raise ValueError(f"expected a ring, found {row.layout[:100]!r}")
    return layout


def _unpacked(content: bytes, layout: Layout) -> Array:
    """The counts of a row, [columns]; raises ValueError where they are not of the layout."""
    size = layout.columns * np.dtype(layout.dtype).itemsize
    try:
        numbers = zlib.decompressobj().decompress(content, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(numbers) != size:
        raise ValueError(f"expected {size} bytes, found {len(numbers)}")
    counts: Array = np.frombuffer(numbers, layout.dtype)
    return counts
