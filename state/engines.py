"""Create SQLAlchemy engines and their transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    text,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from longtail.extras import pip_install
from longtail.state.errors import StoreError
from longtail.state.location import Postgres

_BUSY_SECONDS = 10
_LONGEST_WAL_BYTES = 64 << 20
_SERVER_SECONDS = 5
"""Time without an answer after which a database counts as gone."""
_TURN = text("SELECT pg_advisory_xact_lock(hashtextextended(current_schema() || '.' || :turns, 0))")


def sqlite_engine(path: Path) -> Engine:
    """Create an engine on an SQLite file in WAL mode.

    A commit is on disk when it returns.
    """
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # `_begin` begins transactions explicitly
        connection.execute("PRAGMA synchronous = FULL")  # in WAL mode NORMAL would not fsync at a commit
        connection.execute(f"PRAGMA journal_size_limit = {_LONGEST_WAL_BYTES}")

    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes") else "BEGIN")


def postgres_engine(location: Postgres) -> Engine:
    """Create an engine for a schema that may not exist yet; lost connections are reopened."""
    milliseconds = 1000 * _SERVER_SECONDS
    options = {
        "search_path": location.schema,
        "statement_timeout": milliseconds,
        "lock_timeout": milliseconds,
        "idle_in_transaction_session_timeout": milliseconds,  # frees the locks of a replica suspended during a write
    }
    try:
        engine = create_engine(
            location.url,
            pool_pre_ping=True,
            connect_args={
                "client_encoding": "utf8",
                "prepare_threshold": None,  # connection poolers do not support prepared statements
                "connect_timeout": _SERVER_SECONDS,
                "tcp_user_timeout": milliseconds,
                "keepalives_idle": _SERVER_SECONDS,
                "application_name": "longtail",
                "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
            },
        )
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{location}: expected the extra 'remote', found no module {error.name!r}: {pip_install('remote')}"
        ) from error

    @event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: list[Any], parameters: dict[str, Any]) -> Any:
        from longtail.state.connections import ImpatientConnection  # psycopg comes with the extra

        return ImpatientConnection.connect(*arguments, **parameters)

    @event.listens_for(engine, "connect")
    def check(connection: Any, _: object) -> None:
        search_path, commits = connection.execute(
            "SELECT current_setting('search_path'), current_setting('synchronous_commit')"
        ).fetchone()
        if search_path != location.schema:
            connection.close()
            raise StoreError(
                f"{location}: expected a connection with that schema, found one with {search_path}: a pooler must let "
                "the startup parameter `options` through"
            )
        if commits == "off":
            connection.execute("SET synchronous_commit = on")
        connection.commit()

    return engine


@contextmanager
def writing(engine: Engine, turns: str | None = None) -> Iterator[Connection]:
    """Open a transaction that is on disk at the end of the block.

    Args:
        turns: name of a lock for which writers of the schema wait, so that numbers rise in the order of commits;
            readers never wait. None: only writers of the same row wait. In SQLite all writers take turns anyway.
    """
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        if turns is not None and engine.dialect.name == "postgresql":
            connection.execute(_TURN, {"turns": turns})
        yield connection


def autocommit(engine: Engine) -> Connection:
    """Open a connection for which no other one waits; the caller closes it."""
    return engine.execution_options(isolation_level="AUTOCOMMIT").connect()


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction in which all reads see the same snapshot."""
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert errors of SQLAlchemy, SQLite and files to StoreError."""
    try:
        yield
    except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: SQLite's message quotes damaged text
        raise StoreError(f"{what}: {error}") from error
    except DBAPIError as error:
        raise StoreError(f"{what}: {str(error.orig).strip()}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"{what}: {error}") from error
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror}") from error
