"""Figures of replicas that share a database: each tells what it counts, and keeps what the others count beside it.

Every worker tells the rows of its rings that have changed, every two seconds. One worker of a replica writes what the
others tell into files beside its own, `KIND.REPLICA-WORKER.ring`: who adds up the rings of a directory adds up all
replicas. Periods are of the database's time, for the clocks of hosts differ.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import copy_context
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from time import monotonic

import numpy as np

from longtail.bundle.arrays import Array
from longtail.serving.monitoring.release_figures import ARMS, BY_LABEL
from longtail.serving.monitoring.ring import Layout, Ring, is_of_others, periods_of, read_ring
from longtail.state import FigureRow, ReplicaStore, StoreError, replica_id

logger = logging.getLogger(__name__)

_SECONDS = 2.0
_TIDY_SECONDS = 60.0
_BY_LABEL_BYTES = 256 << 10
"""A second that a worker tells of counts by label, on average: those of a large catalogue it tells less often."""
_KEPT_SECONDS, _ARMS_KEPT_SECONDS = 48 * 3600, 90 * 86_400
_TOLERANCE_SECONDS = 0.1
_LAST_SECONDS = 10.0
_LOCK = "exchange.lock"
_NOTHING = -1
"""Instead of a checksum: the counts are gone."""
_IS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
    """One worker's part in the exchange. A thread of its own does it; no other failure than a log line comes of it.

    Args:
        store: what the replicas share; closed by `stop`.
        state: the replica's own directory; its rings are in `live/RELEASE`.
        worker: number of this process among those of the replica.
        clock: the database's time; a `SharedClock` is kept to it.
        held: names of the releases that are counted now.
    """

    def __init__(
        self,
        store: ReplicaStore,
        state: Path,
        worker: int,
        clock: Callable[[], float],
        held: Callable[[], Collection[str]],
    ) -> None:
        self.replica = replica_id(state)
        self._store = store
        self._state, self._root = state, state / "live"
        self._worker = worker
        self._writer = f"{self.replica}-{worker}"
        self._clock = clock
        self._held = held
        self._told: dict[tuple[str, str], dict[int, int | None]] | None = None
        """By release and kind: periods, and the checksum of what was told of them, None where it is not known."""
        self._told_at, self._told_by_label_at = 0.0, 0.0
        self._by_label_due = 0.0
        self._before: set[str] | None = None
        self._heard: dict[str, int] = {}
        self._whole: set[str] = set()
        """Releases whose counts by label are read whole."""
        self._tidied_at = monotonic()
        self._lock: TextIOWrapper | None = None
        self._connected = False
        self._trouble: str | None = None
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name="figure-exchange", daemon=True
        )

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the last, unless the database is away, and close the store."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_SECONDS)
        if not self._thread.is_alive() and self._trouble is None:
            self.exchange(listen=False)
        if self._lock is not None:
            self._lock.close()
        self._store.close()

    def compare_clocks(self) -> None:
        """Go by the database's time; raises StoreError if it does not tell."""
        if isinstance(self._clock, SharedClock):
            if not self._connected:
                self._store.now()  # which takes long, once
                self._connected = True
            self._clock.compare(self._store.now)

    def exchange(self, *, listen: bool = True) -> None:
        """Do now what the thread does every two seconds; what goes wrong is logged, once."""
        with self._turn:
            try:
                self.compare_clocks()
                self._tell(self._clock())
                if listen and self._alone():
                    self._listen(self._clock())
            except (StoreError, OSError) as error:
                if str(error) != self._trouble:
                    logger.warning("figures are this replica's own until others can be told: %s", error)
                self._trouble = str(error)
            else:
                self._trouble = None

    def _work(self) -> None:
        while not self._stopping.wait(_SECONDS):
            try:
                self.exchange()
            # Whatever it is, the next may go well.
            except Exception:
                logger.exception("figures could not be exchanged")

    def _tell(self, now: float) -> None:
        if self._told is None:
            periods, self._told_at = self._store.told(self._writer)
            self._told = {key: dict.fromkeys(of) for key, of in periods.items()}
            self._told_by_label_at = self._told_at
        by_label = monotonic() >= self._by_label_due
        held = set(self._held())
        if self._before is None:
            self._before = {directory.name for directory in self._root.iterdir()}
        rows: list[FigureRow] = []
        checks: list[tuple[dict[int, int | None], int, int]] = []
        spent = 0
        for release in sorted(held | self._before):
            for path in sorted((self._root / release).glob(f"*.{self._worker}.ring")):
                found = read_ring(path)
                if found is None:
                    continue
                layout, array = found
                is_by_label = layout.kind.startswith(BY_LABEL)
                if is_by_label and not (by_label and release in held):
                    continue
                told = self._told.setdefault((release, layout.kind), {})
                since = self._told_by_label_at if is_by_label else self._told_at
                for period, row, check in _changed(array, layout, told, since, now):
                    content = b"" if row is None else zlib.compress(row.tobytes(), 1)
                    rows.append(FigureRow(release, layout.kind, period, _described(layout), content))
                    checks.append((told, period, check))
                    spent += len(content) if is_by_label else 0
        self._store.tell(self._writer, rows, now)
        for told, period, checksum in checks:
            told[period] = checksum
        self._before, self._told_at = held, now
        if by_label:
            self._told_by_label_at, self._by_label_due = now, monotonic() + spent / _BY_LABEL_BYTES

    def _listen(self, now: float) -> None:
        held = set(self._held())
        if self._heard:  # else all is read anyway
            for release in held - self._whole:
                for kind in BY_LABEL:
                    self._write(self._store.all_of(release, kind, self.replica), held, now)
        self._write(self._store.news(self._heard, self.replica), held, now)
        self._whole = held
        if monotonic() - self._tidied_at >= _TIDY_SECONDS:
            self._tidied_at = monotonic()
            self._store.forget(now - _KEPT_SECONDS, but=ARMS)
            self._store.forget(now - _ARMS_KEPT_SECONDS)
            self._forget(held, now)

    def _write(self, told: Iterable[tuple[str, FigureRow]], held: Collection[str], now: float) -> None:
        """Write what others tell beside this replica's own."""
        ring: Ring | None = None
        for writer, row in told:
            if row.kind.startswith(BY_LABEL) and row.release not in held:
                continue
            try:
                layout = _layout_of(writer, row)
                counts = _unpacked(row.content, layout)
            except (ValueError, TypeError) as error:
                logger.warning("figures of %s, %s of %s: %s", writer, row.kind, row.release, error)
                continue
            directory = self._root / row.release
            if ring is None or ring.path != directory / layout.file(writer):
                directory.mkdir(exist_ok=True)
                os.utime(directory, (now, now))  # it is in use
                ring = Ring(directory, layout, writer)
            newest = layout.period(now)
            if newest - layout.rows < row.period <= newest + 1:
                ring.put(row.period, counts)

    def _forget(self, held: Collection[str], now: float) -> None:
        """Delete others' rings that hold nothing any more, and those by label of releases that are not counted."""
        for path in self._root.glob("*/*.ring"):
            if is_of_others(path):
                counted = path.parent.name in held or not path.name.startswith(BY_LABEL)
                found = read_ring(path) if counted else None
                if found is None or not _holds_any(*found, now):
                    path.unlink(missing_ok=True)

    def _alone(self) -> bool:
        """Whether this process is the one that listens for its replica; it stays it until it ends."""
        if self._lock is None:
            lock = (self._state / _LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True


def _holds_any(layout: Layout, array: Array, now: float) -> bool:
    return bool(periods_of(array).max() > layout.period(now) - layout.rows)


def _changed(
    array: Array, layout: Layout, told: dict[int, int | None], since: float, now: float
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


def _described(layout: Layout) -> str:
    return json.dumps({name: value for name, value in asdict(layout).items() if name != "kind"})


def _layout_of(writer: str, row: FigureRow) -> Layout:
    """What a row is of; raises ValueError or TypeError if nothing that is known."""
    layout = Layout(kind=row.kind, **json.loads(row.layout))
    if not all(map(_IS_NAME.fullmatch, (writer, row.release, row.kind))) or layout.dtype not in ("float64", "uint32"):
        raise ValueError(f"expected a ring, found {row.layout[:100]!r}")
    return layout


def _unpacked(content: bytes, layout: Layout) -> Array | None:
    """The counts of a row; None if they are all 0. Raises ValueError where they are not of the layout."""
    if not content:
        return None
    size = layout.columns * np.dtype(layout.dtype).itemsize
    try:
        numbers = zlib.decompressobj().decompress(content, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(numbers) != size:
        raise ValueError(f"expected {size} bytes, found {len(numbers)}")
    counts: Array = np.frombuffer(numbers, layout.dtype)
    return counts
