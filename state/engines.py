"""SQLAlchemy's engines of both kinds of place, and the two transactions that state needs of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from longtail.state.errors import StoreError
from longtail.state.place import Postgres

_BUSY_SECONDS = 10
_LONGEST_WAL_BYTES = 64 << 20
_SERVER_SECONDS = 5
"""A database that answers nothing for so long is as good as gone."""


def sqlite_engine(path: Path, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> Engine:
    """An engine on an SQLite file in WAL mode; other processes' writes are waited for, up to 10 s.

    Args:
        path: the file; made by the first transaction.
        synchronous: whether a commit is on disk when it returns (FULL), or after the next checkpoint.
    """
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin where `_begin` says
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA journal_size_limit = {_LONGEST_WAL_BYTES}")

    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes") else "BEGIN")


def postgres_engine(place: Postgres) -> Engine:
    """An engine on a schema, which need not be there yet; connections that were lost are made anew.

    Raises:
        StoreError: the extra `postgres` is not installed.
    """
    milliseconds = 1000 * _SERVER_SECONDS
    options = {
        "search_path": place.schema,
        "statement_timeout": milliseconds,
        "lock_timeout": milliseconds,
        "idle_in_transaction_session_timeout": milliseconds,  # of a replica that was stopped amid a write
        "timezone": "UTC",
    }
    try:
        return create_engine(
            place.url,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _SERVER_SECONDS,
                "tcp_user_timeout": milliseconds,
                "keepalives_idle": _SERVER_SECONDS,
                "application_name": "longtail",
                "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
            },
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise StoreError(
            f"{place}: expected the extra 'postgres', found no module {error.name!r}: pip install 'longtail[postgres]'"
            if isinstance(error, ModuleNotFoundError)
            else f"{place}: {error}"
        ) from error


@contextmanager
def writing(engine: Engine, table: str | None = None) -> Iterator[Connection]:
    """All of the block's writes or none, and on disk at its end; one writer at a time.

    Args:
        engine: of either kind.
        table: whose writers take turns in PostgreSQL, so that its numbers are in the order of commits; readers never
            wait. SQLite has one writer whatever the table.
    """
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        if table is not None and engine.dialect.name == "postgresql":
            connection.execute(text(f"LOCK TABLE {table} IN EXCLUSIVE MODE"))
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Everything in the block is read as of one moment."""
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what SQLAlchemy finds wrong in the block as StoreError, after `what`."""
    try:
        yield
    except DBAPIError as error:
        raise StoreError(f"{what}: {str(error.orig).strip()}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"{what}: {error}") from error
