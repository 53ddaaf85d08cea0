"""What replicas tell each other through their database: figures, which release serves since when, staged counts.

A replica tells rows of numbers, and tells a row again when it has changed, under a version that only its own rows
share: one that knows the version of each other replica reads what came after it, and nobody waits for another.
"""

from __future__ import annotations

import fcntl
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, insert, select, update

from longtail.bundle import replace_file
from longtail.state.engines import (
    has_table,
    insert_new,
    looking,
    make_of_version,
    postgres_engine,
    put,
    reading,
    told,
    writing,
)
from longtail.state.place import Postgres
from longtail.state.replica_tables import (
    VERSION,
    figure_rows,
    metadata,
    replica_store,
    replicas,
    served,
    staged_counts,
)

_INTERVALS = 100
_THERE_SECONDS, _FRESH_SECONDS, _SEEN_SECONDS = 180, 600, 7 * 86_400
_ID, _IS_ID = "replica.id", re.compile(r"[0-9a-f]{16}")
_STAGED_SECONDS = 30 * 86_400
_NOW = select(func.extract("epoch", func.clock_timestamp()))
_ROWS_AT_ONCE = 100
"""Of figures: a row of counts by label may have some megabytes."""


class FigureRow(NamedTuple):
    """One row of a replica's figures, as the table has it."""

    worker: int
    release: str
    kind: str
    period: int
    layout: str
    content: bytes
    checksum: int
    expires_at: float


Told = dict[tuple[int, str, str], dict[int, int]]
"""Checksums of what was told, by worker, release and kind, and by period."""


class Interval(NamedTuple):
    """A time that a release served, in seconds since 1970, and what its traffic is compared with, JSON; `until` is None
    of the last.
    """

    release: str
    since: float
    until: float | None = None
    baseline: str | None = None


class ReplicaStore:
    """Thread-safe. Every method raises StoreError if the database cannot be read or written.

    Args:
        place: the schema that the replicas share; the first makes the tables.
    """

    def __init__(self, place: Postgres) -> None:
        self._place = place
        self._engine: Engine | None = None
        self._is_made = False
        self._lock, self._making = threading.Lock(), threading.Lock()

    def now(self) -> float:
        """The database's time, in seconds since 1970."""
        with self._reading() as connection:
            return float(connection.execute(_NOW).scalar_one())

    def told(self, replica: str) -> tuple[Told, int]:
        """What a replica has told, and the version of the last."""
        checksums: Told = {}
        of = figure_rows.c
        with self._reading() as connection:
            version = connection.scalar(select(replicas.c.version).where(replicas.c.replica == replica)) or 0
            found = select(of.worker, of.release, of.kind, of.period, of.checksum).where(of.replica == replica)
            for worker, release, kind, period, checksum in connection.execute(found):
                checksums.setdefault((worker, release, kind), {})[period] = checksum
        return checksums, version

    def tell(self, replica: str, rows: Sequence[FigureRow], now: float) -> tuple[int, int]:
        """Tell rows, in the place of what was told of the same periods.

        Args:
            replica: who tells; one of its processes at a time.
            rows: at most one of a worker, release, kind and period.
            now: the database's time.

        Returns:
            The version that it had before, and the one that the rows have. If the former is not the latter of the last
            call, the database has been set back in between.
        """
        before, version = [], 0
        for start in range(0, max(len(rows), 1), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            with self._writing() as connection:
                before.append(_taken(connection, replica, now)[0])
                # By the clock, so that a database that was set back gives no number again.
                version = max(before[-1] + 1, int(1000 * now)) if part else before[-1]
                of_replica = update(replicas).where(replicas.c.replica == replica)
                connection.execute(of_replica.values(version=version, seen_at=now))
                put(connection, figure_rows, [row._asdict() | {"replica": replica, "version": version} for row in part])
        return before[0], version

    def news(self, heard: dict[str, int], replica: str) -> Generator[tuple[str, FigureRow], None, None]:
        """What other replicas have told since: their names and rows, those of a ring together, periods ascending.

        Args:
            heard: the version of each replica up to which its rows are known; brought up to date when the last row of
                it has been taken.
            replica: who asks.
        """
        of = figure_rows.c
        with self._reading() as connection:
            others = select(replicas.c.replica, replicas.c.version).where(replicas.c.replica != replica)
            versions = {row.replica: row.version for row in connection.execute(others)}
            for gone in heard.keys() - versions.keys():
                del heard[gone]
            for other, version in versions.items():
                known = heard.get(other, 0)
                if version != known:
                    # Less than what is known where the database was set back.
                    yield from _rows(connection, of.replica == other, of.version > (known if known < version else 0))
                    heard[other] = version

    def all_of(self, release: str, kind: str, replica: str) -> Generator[tuple[str, FigureRow], None, None]:
        """Every row of a release whose kind begins so, of other replicas than who asks; as `news`."""
        of = figure_rows.c
        which = of.release == release, of.kind.startswith(kind, autoescape=True), of.replica != replica
        with self._reading() as connection:
            yield from _rows(connection, *which)

    def forget(self, now: float) -> None:
        """Delete figures that nobody wants any more, and replicas of which there are none and nothing was seen for a
        week.

        Args:
            now: the database's time.
        """
        of = replicas.c
        with self._writing() as connection:
            connection.execute(delete(figure_rows).where(figure_rows.c.expires_at < now))
            told = select(figure_rows.c.replica).where(figure_rows.c.replica == of.replica).exists()
            connection.execute(delete(replicas).where(of.seen_at < now - _SEEN_SECONDS, ~told))

    def begin(self, replica: str, begun: Interval, by_label: str, earlier: Callable[[], Sequence[Interval]]) -> bool:
        """A release serves on a replica from now on. The first replica to go over to it says since when; one that
        comes later finds it in the order of releases after where it was itself, or where another still is, and changes
        nothing.

        Args:
            replica: which.
            begun: the release, and the database's time.
            by_label: how the kinds of figures begin that are of its time in service alone: those told before go.
            earlier: tells what served before; asked where nobody has begun a release yet.

        Returns:
            Whether the replica served another before, or the same at another time.
        """
        of = served.c
        with self._writing("served") as connection:
            _, was = _taken(connection, replica, begun.since)
            if connection.scalar(select(func.count()).select_from(served)) == 0 and (before := earlier()):
                connection.execute(insert(served), [_row_of(one) for one in before])
            at = _place_of(connection, replica, begun, was)
            if at is None:
                at = connection.execute(insert(served).values(_row_of(begun)).returning(of.id)).scalar_one()
                oldest = select(of.id).order_by(of.id.desc()).offset(_INTERVALS - 1).limit(1).scalar_subquery()
                connection.execute(delete(served).where(of.id < oldest))
                told = figure_rows.c.release == begun.release, figure_rows.c.kind.startswith(by_label, autoescape=True)
                connection.execute(delete(figure_rows).where(*told))
            here = update(replicas).where(replicas.c.replica == replica)
            connection.execute(here.values(served=at, seen_at=begun.since))
            return at != was

    def leave(self, replica: str, now: float) -> None:
        """A replica serves nothing for now."""
        with self._writing() as connection:
            gone = update(replicas).where(replicas.c.replica == replica).values(seen_at=now - _THERE_SECONDS)
            connection.execute(gone)

    def intervals(self) -> list[Interval]:
        """Which release served when, oldest first."""
        of = served.c
        with self._reading() as connection:
            found = connection.execute(select(of.release, of.since, of.baseline).order_by(of.id)).all()
        return [
            Interval(row.release, row.since, None if after is None else after.since, row.baseline)
            for row, after in zip_longest(found, found[1:])
        ]

    def write_staged(self, writer: str, counts: str) -> None:
        """Replace a writer's counts of a staged release, JSON; anybody's of 30 days ago are deleted."""
        with self._writing() as connection:
            now = float(connection.execute(_NOW).scalar_one())
            put(connection, staged_counts, [{"writer": writer, "counts": counts, "changed_at": now}])
            connection.execute(delete(staged_counts).where(staged_counts.c.changed_at < now - _STAGED_SECONDS))

    def read_staged(self) -> list[str]:
        """Every writer's counts of a staged release, JSON; none where no replica has served yet."""
        with self._told("to read what replicas tell"), looking(self._opened()) as connection:
            if not has_table(connection, self._place, replica_store):
                return []
        with self._reading() as connection:
            return list(connection.scalars(select(staged_counts.c.counts).order_by(staged_counts.c.writer)))

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()
                self._engine = None

    def _opened(self) -> Engine:
        with self._lock:
            self._engine = self._engine or postgres_engine(self._place)
            return self._engine

    def _made(self) -> Engine:
        engine = self._opened()
        with self._making:
            if not self._is_made:
                make_of_version(engine, self._place, metadata, replica_store, VERSION, "what replicas tell each other")
                self._is_made = True
        return engine

    def _told(self, what: str) -> AbstractContextManager[None]:
        return told(f"{self._place}: expected {what}, found")

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._told("to read what replicas tell"), reading(self._made()) as connection:
            yield connection

    @contextmanager
    def _writing(self, turns: str | None = None) -> Iterator[Connection]:
        with self._told("to tell other replicas"), writing(self._made(), turns) as connection:
            yield connection


def _taken(connection: Connection, replica: str, now: float) -> tuple[int, int | None]:
    """A replica's version and place among the releases; nobody else changes them before the transaction ends."""
    insert_new(connection, replicas, [{"replica": replica, "version": 0, "seen_at": now}])
    of = replicas.c
    version, place = connection.execute(
        select(of.version, of.served).where(of.replica == replica).with_for_update()
    ).one()
    return version, place


def _place_of(connection: Connection, replica: str, begun: Interval, was: int | None) -> int | None:
    """Where in the order of releases one is that a replica goes over to from another place; None: at its end, anew."""
    of, now = served.c, begun.since
    places: list[int] = [*connection.scalars(select(of.id).where(of.release == begun.release).order_by(of.id))]
    if not places:
        return None
    if places[-1] == connection.scalar(select(func.max(of.id))):
        return places[-1]
    if was is not None and places[-1] >= was:
        return next(place for place in places if place >= was)
    there = replicas.c.replica != replica, replicas.c.served.is_not(None)
    others = connection.execute(select(replicas.c.served, replicas.c.seen_at).where(*there)).all()
    stayed = [place for place, seen_at in others if place in places and seen_at > now - _THERE_SECONDS]
    if not stayed:
        return None
    at: int = max(stayed)
    if max(place for place, _ in others) == at:
        # What came after was here alone: it is no more, unless it was for long.
        if connection.execute(select(func.min(of.since)).where(of.id > at)).scalar_one() < now - _FRESH_SECONDS:
            return None
        connection.execute(delete(served).where(of.id > at))
    return at


def _row_of(begun: Interval) -> dict[str, Any]:
    return {"release": begun.release, "since": begun.since, "baseline": begun.baseline}


def _rows(connection: Connection, *which: ColumnElement[bool]) -> Generator[tuple[str, FigureRow], None, None]:
    of = figure_rows.c
    found = select(of.replica, *(of[name] for name in FigureRow._fields)).where(*which)
    ordered = found.order_by(of.replica, of.worker, of.release, of.kind, of.period)
    with connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(ordered) as rows:
        for replica, *row in rows:
            yield replica, FigureRow(*row)


def replica_id(directory: Path) -> str:
    """What names a replica, 16 hexadecimal digits: made once, and kept in a directory that no other replica uses.

    Raises:
        OSError: the directory cannot be read or written.
    """
    path = directory / _ID
    with (directory / f"{_ID}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if _IS_ID.fullmatch(kept := path.read_text("utf-8", "replace")):
                return kept
        made = uuid4().hex[:16]
        replace_file(path, made.encode())
        return made
