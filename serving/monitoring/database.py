"""Where answers and feedback are kept: a database of replicas, or an SQLite file."""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine, MetaData

from longtail.serving.monitoring.tables import VERSION, feedback_version, metadata
from longtail.state import Place, Postgres, StoreVersionError
from longtail.state.engines import looking, make_of_version, postgres_engine, sqlite_engine, writing

FEEDBACK_FILE = "feedback.sqlite"
"""In the state directory."""
_BUSY_SECONDS = 10
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


def open_engine(place: Place, synchronous: Literal["FULL", "NORMAL"]) -> Engine:
    """An engine on what `prepare` has made.

    Args:
        place: a state directory or a database.
        synchronous: as of `longtail.state`'s engines.

    Raises:
        StoreError: the extra `postgres` is not installed.
    """
    if isinstance(place, Postgres):
        return postgres_engine(place, synchronous)
    return sqlite_engine(place / FEEDBACK_FILE, synchronous)


def prepare(place: Place) -> None:
    """Make the tables, or check that they are of this version; those who start together take turns.

    Args:
        place: a state directory or a database.

    Raises:
        StoreVersionError: it is of another version or damaged, and stays as it is.
        StoreError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError: it cannot be read or made.
    """
    if isinstance(place, Postgres):
        _prepare_server(place)
    else:
        _prepare_file(place / FEEDBACK_FILE)


def _prepare_server(place: Postgres) -> None:
    engine = postgres_engine(place)
    try:
        tables = MetaData()
        for table in (feedback_version, *metadata.sorted_tables):
            table.to_metadata(tables)
        make_of_version(engine, place, tables, feedback_version, VERSION, "answers and feedback")
    finally:
        engine.dispose()


def _prepare_file(path: Path) -> None:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _version_of(path)
        if found == VERSION:
            return
        if found is not None:
            what = f"is of version {found}, made before 0.1" if isinstance(found, int) else f"is damaged ({found})"
            raise StoreVersionError(f"{path} {what}: move it away, and the service makes another")
        engine = sqlite_engine(path)
        try:
            with looking(engine) as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            with writing(engine) as connection:
                metadata.create_all(connection)
                connection.exec_driver_sql(f"PRAGMA user_version = {VERSION}")
        finally:
            engine.dispose()


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)


def _version_of(path: Path) -> int | str | None:
    """What version a file is of; None if it has no tables or is not there; in words, what is wrong if it is damaged."""
    try:
        with closing(_connect(path)) as connection:
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (check,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if check != "ok":
                return str(check)
            return int(version) if tables or version else None
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in _DAMAGED:
            return str(error)
        raise
    except UnicodeDecodeError as error:  # of SQLite's own message, which quotes what is damaged
        return str(error)
