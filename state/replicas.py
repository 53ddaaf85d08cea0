"""What replicas tell each other through their database: figures, which release serves since when, staged counts.

A writer is one process of one replica. It tells rows of numbers, and tells a row again when it has changed, under a
version that only its own rows share: a reader that knows the version of each writer reads what came after it, and
writers never wait for each other. What was told is on the database's disk.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
)

from longtail.state.engines import add_up, has_table, looking, make_tables, postgres_engine, put, reading, told, writing
from longtail.state.errors import StoreVersionError
from longtail.state.place import Postgres

_VERSION = 1
_INTERVALS = 100
_ID, _IS_ID = "replica.id", re.compile(r"[0-9a-f]{16}")
_STAGED_SECONDS = 30 * 86_400
_NOW = select(func.extract("epoch", func.clock_timestamp()))
_ROWS_AT_ONCE = 100
"""Of figures: a row of counts by label may have some megabytes."""

_metadata = MetaData()
_store = Table("replica_store", _metadata, Column("version", Integer, nullable=False))
# A row of a writer's figures of one kind and release: the numbers of a period of time. layout: JSON, says what numbers
# they are; content: packed, empty where they are all zero; changed_at: seconds since 1970.
_figures = Table(
    "figure_rows",
    _metadata,
    Column("writer", Text, primary_key=True),
    Column("release", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("period", BigInteger, primary_key=True),
    Column("layout", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("changed_at", Double, nullable=False),
    Index("figure_rows_by_version", "writer", "version"),
    Index("figure_rows_by_time", "changed_at"),
)
_writers = Table(
    "figure_writers", _metadata, Column("writer", Text, primary_key=True), Column("version", BigInteger, nullable=False)
)
# Which release replicas went over to, in their order, with what its traffic is compared with, JSON; and where in that
# order each replica is.
_served = Table(
    "served",
    _metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("release", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("baseline", Text),
)
_serving = Table(
    "serving", _metadata, Column("replica", Text, primary_key=True), Column("served", BigInteger, nullable=False)
)
_staged = Table(
    "staged_counts",
    _metadata,
    Column("writer", Text, primary_key=True),
    Column("counts", Text, nullable=False),
    Column("changed_at", Double, nullable=False),
)


class FigureRow(NamedTuple):
    """One row of a writer's figures, as the table has it."""

    release: str
    kind: str
    period: int
    layout: str
    content: bytes


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

    def told(self, writer: str) -> tuple[dict[tuple[str, str], set[int]], float]:
        """The periods that a writer has told of, by release and kind, and when it told the last."""
        periods: dict[tuple[str, str], set[int]] = {}
        last, of = 0.0, _figures.c
        with self._reading() as connection:
            found = select(of.release, of.kind, of.period, of.changed_at).where(of.writer == writer)
            for release, kind, period, changed_at in connection.execute(found):
                periods.setdefault((release, kind), set()).add(period)
                last = max(last, changed_at)
        return periods, last

    def tell(self, writer: str, rows: Sequence[FigureRow], now: float) -> None:
        """Tell rows, in the place of what was told of the same periods.

        Args:
            writer: who tells; nobody else under that name at the same time.
            rows: at most one of a release, kind and period.
            now: the database's time.
        """
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            with self._writing() as connection:
                add_up(connection, _writers, [{"writer": writer, "version": 1}], "version")
                version = connection.scalar(select(_writers.c.version).where(_writers.c.writer == writer))
                part = rows[start : start + _ROWS_AT_ONCE]
                more = {"writer": writer, "version": version, "changed_at": now}
                put(connection, _figures, [row._asdict() | more for row in part])

    def news(self, heard: dict[str, int], replica: str) -> Iterator[tuple[str, FigureRow]]:
        """What other replicas have told since: writers and rows, those of a kind together, periods ascending.

        Args:
            heard: the version of each writer up to which its rows are known; brought up to date when the last row of a
                writer has been taken.
            replica: whose own writers, `REPLICA-…`, are left out.
        """
        with self._reading() as connection:
            versions = connection.execute(
                select(_writers.c.writer, _writers.c.version).where(~_writers.c.writer.startswith(f"{replica}-"))
            ).all()
            for writer, version in versions:
                known = heard.get(writer, 0)
                if version > known:
                    yield from _rows(connection, _figures.c.writer == writer, _figures.c.version > known)
                    heard[writer] = version

    def all_of(self, release: str, kind: str, replica: str) -> Iterator[tuple[str, FigureRow]]:
        """Every row of a release whose kind begins so, of other replicas' writers; as `news`."""
        of = _figures.c
        others = ~of.writer.startswith(f"{replica}-")
        with self._reading() as connection:
            yield from _rows(connection, of.release == release, of.kind.startswith(kind, autoescape=True), others)

    def forget(self, before: float, *, but: str | None = None) -> None:
        """Delete figures that have not changed since a time, in seconds since 1970.

        Args:
            before: that time.
            but: kinds that begin so are kept.
        """
        kept = [] if but is None else [~_figures.c.kind.startswith(but, autoescape=True)]
        with self._writing() as connection:
            connection.execute(delete(_figures).where(_figures.c.changed_at < before, *kept))

    def begin(self, replica: str, begun: Interval, earlier: Sequence[Interval] = ()) -> bool:
        """A release serves on a replica from now on. The first replica to go over to it says since when; one that
        comes later finds it in the order of releases after where it was itself, and changes nothing.

        Args:
            replica: which.
            begun: the release, and the database's time.
            earlier: what served before, where nobody has said so yet.

        Returns:
            Whether the replica served another before, or the same at another time.
        """
        with self._writing("served") as connection:
            last = select(_served.c.id, _served.c.release).order_by(_served.c.id.desc()).limit(1)
            newest = connection.execute(last).first()
            if newest is None and earlier:
                connection.execute(insert(_served), [_row_of(one) for one in earlier])
                newest = connection.execute(last).first()
            at = connection.scalar(select(_serving.c.served).where(_serving.c.replica == replica))
            if at is not None:
                if connection.scalar(select(_served.c.release).where(_served.c.id == at)) == begun.release:
                    return False
                later = select(func.min(_served.c.id)).where(_served.c.id > at, _served.c.release == begun.release)
                at = connection.scalar(later)
            if at is None and newest is not None and newest.release == begun.release:
                at = newest.id
            if at is None:
                at = connection.execute(insert(_served).values(_row_of(begun)).returning(_served.c.id)).scalar_one()
                connection.execute(delete(_served).where(_served.c.id <= at - _INTERVALS))
            put(connection, _serving, [{"replica": replica, "served": at}])
            return True

    def intervals(self) -> list[Interval]:
        """Which release served when, oldest first."""
        of = _served.c
        with self._reading() as connection:
            found = connection.execute(select(of.release, of.since, of.baseline).order_by(of.id)).all()
        ends = [*(row.since for row in found[1:]), None]
        return [Interval(row.release, row.since, until, row.baseline) for row, until in zip(found, ends, strict=True)]

    def write_staged(self, writer: str, counts: str) -> None:
        """Replace a writer's counts of a staged release, JSON; anybody's of 30 days ago are deleted."""
        with self._writing() as connection:
            now = float(connection.execute(_NOW).scalar_one())
            put(connection, _staged, [{"writer": writer, "counts": counts, "changed_at": now}])
            connection.execute(delete(_staged).where(_staged.c.changed_at < now - _STAGED_SECONDS))

    def read_staged(self) -> list[str]:
        """Every writer's counts of a staged release, JSON; none where no replica has served yet."""
        with self._told("to read what replicas tell"), looking(self._opened()) as connection:
            if not has_table(connection, self._place, _store):
                return []
        with self._reading() as connection:
            return list(connection.scalars(select(_staged.c.counts).order_by(_staged.c.writer)))

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
                make_tables(engine, self._place, _metadata, _store, {"version": _VERSION})
                with looking(engine) as connection:
                    found = connection.scalar(select(_store.c.version))
                if found != _VERSION:
                    raise StoreVersionError(
                        f"{self._place}: expected what replicas tell each other of version {_VERSION}, found {found}: "
                        "use this schema with the Longtail that made it, or another schema"
                    )
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


def _row_of(begun: Interval) -> dict[str, Any]:
    return {"release": begun.release, "since": begun.since, "baseline": begun.baseline}


def _rows(connection: Connection, *which: ColumnElement[bool]) -> Iterator[tuple[str, FigureRow]]:
    of = _figures.c
    found = select(of.writer, *(of[name] for name in FigureRow._fields)).where(*which)
    ordered = found.order_by(of.writer, of.release, of.kind, of.period)
    for writer, *row in connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(ordered):
        yield writer, FigureRow(*row)


def replica_id(directory: Path) -> str:
    """What names a replica, 16 hexadecimal digits: made once, and kept in a directory that no other replica uses.

    Raises:
        OSError: the directory cannot be read or written.
    """
    path = directory / _ID
    with suppress(FileNotFoundError):
        if _IS_ID.fullmatch(kept := path.read_text("utf-8", "replace")):
            return kept
        path.unlink(missing_ok=True)
    working = directory / f".{_ID}.{os.getpid()}.tmp"
    working.write_text(uuid4().hex[:16])
    with suppress(FileExistsError):  # another worker came first
        os.link(working, path)
    working.unlink()
    return path.read_text()
