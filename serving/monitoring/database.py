"""Where answers and feedback are kept: a database of replicas, or an SQLite file, which is brought to this version."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine, MetaData

from longtail.serving.monitoring.tables import VERSION, feedback_version, metadata
from longtail.state import Place, Postgres
from longtail.state.engines import looking, make_of_version, postgres_engine, sqlite_engine, writing

logger = logging.getLogger(__name__)

FEEDBACK_FILE = "feedback.sqlite"
"""In the state directory."""
_BUSY_SECONDS = 10
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)

_FEEDBACK = """
-- One label interacted with, once for each type of event. bucket: −1 unknown; state: 0 pending, 1 joined, 2 its answer
-- was never found, or was one of several, 3 organic, without an answer and with a key of chance, 4 said before, by
-- another name of its answer. key: hash of the id
-- that names the answer and of the query's place; answer_id: that id; null: request_id is. From the answer, when
-- joined: release, position (null: not in the answer), propensity, λ, μ, features, arm (as in `answers`), and the
-- request_id that it has.
CREATE TABLE feedback (
    id INTEGER PRIMARY KEY, key INTEGER NOT NULL, label TEXT NOT NULL, bucket INTEGER NOT NULL, at REAL NOT NULL,
    state INTEGER NOT NULL, event TEXT NOT NULL DEFAULT 'click', weight REAL NOT NULL DEFAULT 1,
    request_id TEXT, query INTEGER, release TEXT, position INTEGER, propensity REAL, bias_removal REAL, popularity REAL,
    features BLOB, answer_id TEXT, arm INTEGER, UNIQUE (key, label, event)
);
"""
_SINCE_VERSION_3 = """
CREATE INDEX answers_by_request ON answers (generation, request_key) WHERE request_key IS NOT NULL;

-- Organic choices that came under an idempotency key, of which this is a hash.
CREATE TABLE organic (id INTEGER PRIMARY KEY, key INTEGER NOT NULL UNIQUE, at REAL NOT NULL);
"""
_ANSWERS_SINCE_VERSION_3 = """
ALTER TABLE answers ADD COLUMN request_key INTEGER;
ALTER TABLE answers ADD COLUMN request_id TEXT;
"""
_SINCE_VERSION_4 = """
-- Arms of experiments. run: of one set of arms, shares and settings. The counts are of what the arm answered; units:
-- different ones, those of `arm_units` and answers without one. own_settings, named, unavailable: answers left out.
CREATE TABLE arms (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, arm TEXT NOT NULL, since REAL NOT NULL,
    answers INTEGER NOT NULL DEFAULT 0,
    units INTEGER NOT NULL DEFAULT 0, own_settings INTEGER NOT NULL DEFAULT 0, named INTEGER NOT NULL DEFAULT 0,
    unavailable INTEGER NOT NULL DEFAULT 0, head INTEGER NOT NULL DEFAULT 0, torso INTEGER NOT NULL DEFAULT 0,
    tail INTEGER NOT NULL DEFAULT 0, new INTEGER NOT NULL DEFAULT 0, UNIQUE (run, arm)
);
-- Units of an arm: 64 bits of a hash each, at most as many as answers are kept.
CREATE TABLE arm_units (arm INTEGER NOT NULL, unit INTEGER NOT NULL, PRIMARY KEY (arm, unit)) WITHOUT ROWID;
-- An arm's units by their hash, of which 1,024 clusters are kept instead of each: answers, and labels chosen and those
-- of them that were answered, of head, torso, tail and new.
CREATE TABLE arm_clusters (
    arm INTEGER NOT NULL, cluster INTEGER NOT NULL, answers INTEGER NOT NULL DEFAULT 0,
    p0 INTEGER NOT NULL DEFAULT 0, p1 INTEGER NOT NULL DEFAULT 0, p2 INTEGER NOT NULL DEFAULT 0,
    p3 INTEGER NOT NULL DEFAULT 0, h0 INTEGER NOT NULL DEFAULT 0, h1 INTEGER NOT NULL DEFAULT 0,
    h2 INTEGER NOT NULL DEFAULT 0, h3 INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (arm, cluster)
) WITHOUT ROWID;
"""
_ANSWERS_SINCE_VERSION_4 = """
ALTER TABLE answers ADD COLUMN arm INTEGER;
ALTER TABLE answers ADD COLUMN cluster INTEGER;
"""
_FEEDBACK_SINCE_VERSION_5 = "ALTER TABLE feedback ADD COLUMN arm INTEGER;"
_FROM_VERSION_1 = f"""
BEGIN;
ALTER TABLE answers ADD COLUMN propensities BLOB;
ALTER TABLE answers ADD COLUMN bias_removal REAL;
ALTER TABLE answers ADD COLUMN popularity REAL;
ALTER TABLE answers ADD COLUMN features BLOB;
ALTER TABLE answers ADD COLUMN at REAL;
DROP INDEX pending;
ALTER TABLE feedback RENAME TO feedback_1;
{_FEEDBACK}
INSERT INTO feedback (id, key, label, bucket, at, state) SELECT id, key, label, bucket, at, state FROM feedback_1;
DROP TABLE feedback_1;
CREATE INDEX pending ON feedback (at) WHERE state = 0;
{_ANSWERS_SINCE_VERSION_3}
{_SINCE_VERSION_3}
{_ANSWERS_SINCE_VERSION_4}
{_SINCE_VERSION_4}
PRAGMA user_version = {VERSION};
COMMIT;
"""
_FROM_VERSION_2 = f"""
BEGIN;
ALTER TABLE feedback ADD COLUMN answer_id TEXT;
{_FEEDBACK_SINCE_VERSION_5}
{_ANSWERS_SINCE_VERSION_3}
{_SINCE_VERSION_3}
{_ANSWERS_SINCE_VERSION_4}
{_SINCE_VERSION_4}
PRAGMA user_version = {VERSION};
COMMIT;
"""
_FROM_VERSION_3 = f"""
BEGIN;
{_FEEDBACK_SINCE_VERSION_5}
{_ANSWERS_SINCE_VERSION_4}
{_SINCE_VERSION_4}
PRAGMA user_version = {VERSION};
COMMIT;
"""
_FROM_VERSION_4 = f"""
BEGIN;
{_FEEDBACK_SINCE_VERSION_5}
PRAGMA user_version = {VERSION};
COMMIT;
"""
_MIGRATIONS = {1: _FROM_VERSION_1, 2: _FROM_VERSION_2, 3: _FROM_VERSION_3, 4: _FROM_VERSION_4}


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

    A file of an earlier version is brought to this one. One of another, or not of SQLite, is put aside as `NAME.aside`
    with a warning, and another is started empty.

    Args:
        place: a state directory or a database.

    Raises:
        StoreVersionError: a database of another version, which stays as it is.
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
        if isinstance(found, int) and found in _MIGRATIONS:
            with closing(_connect(path)) as connection:
                connection.executescript(_MIGRATIONS[found])
            logger.info("%s: brought from version %d to %d", path, found, VERSION)
            return
        if found is not None:
            _put_aside(path, found)
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


def _put_aside(path: Path, found: int | str) -> None:
    aside = path.with_name(f"{path.name}.aside")
    logger.warning("%s: expected version %d, found %s; put aside as %s", path, VERSION, found, aside.name)
    for suffix in ("-wal", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}-shm")
