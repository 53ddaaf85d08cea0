"""Label changes in PostgreSQL: heard of at once, intact through kill -9 and outages, and one order for all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy

from longtail.state import (
    LabelStore,
    Postgres,
    StoreError,
    parse_location,
)
from longtail.state.connections import ImpatientConnection
from longtail.state.engines import postgres_engine, writing
from tests.postgres import PostgresServer, postgres
from tests.serving.process import free_port
from tests.state.changes import hide, ids

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A database server of the test's own, to be killed."""
    with postgres() as started:
        yield started


def parse_postgres(server: PostgresServer) -> Postgres:
    state_location = parse_location(server.url())
    assert isinstance(state_location, Postgres)
    return state_location


def until_read(store: LabelStore, position: object, seconds: float = 10) -> tuple[list[str], float]:
    """Return the ids of new changes and the seconds until they arrived."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        read = store.read_from(position)  # type: ignore[arg-type]
        if read.records:
            return [record.id for record in read.records], time.monotonic() - began
        time.sleep(0.002)
    raise TimeoutError("expected a change to be read")


def test_notifications_precede_polling(database_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    state_location = parse_postgres(database_server)
    writer, reader = LabelStore(state_location), LabelStore(state_location)
    writer.append([hide("first")])
    position = reader.read_from().position
    waited = []
    for count in range(5):
        reader.read_from(position)
        writer.append([hide(str(count))])
        result, seconds = until_read(reader, position)
        position = reader.read_from(position).position
        assert result == [str(count)]
        waited.append(seconds)
    connect = ImpatientConnection.connect
    monkeypatch.setattr(ImpatientConnection, "connect", lambda *_, **__: pytest.fail("connected anew"))
    for _ in range(20):
        assert reader.read_from(position).records == []
    monkeypatch.setattr(ImpatientConnection, "connect", connect)
    assert sorted(waited)[2] < 0.25, "half of the half second after which it would look"


def test_killed_database_loses_no_acknowledged_change(server: PostgresServer) -> None:
    state_location = parse_postgres(server)
    writer, reader = LabelStore(state_location), LabelStore(state_location)
    writer.append([hide("a")])
    position = reader.read_from().position
    for round_ in range(3):
        server.kill()
        time.sleep(0.6)
        with pytest.raises(
            StoreError, match=r"postgresql://longtail@127\.0\.0\.1:.*: expected to write 1 label changes"
        ):
            writer.append([hide("lost")])
        with pytest.raises(StoreError, match="expected label changes, found"):
            reader.read_from(position)
        with pytest.raises(StoreError, match="expected"):
            LabelStore(state_location).read_from()
        server.start()
        writer.append([hide(f"later-{round_}")])
        result, _ = until_read(reader, position)
        assert result == [f"later-{round_}"]
        position = reader.read_from(position).position
    assert ids(state_location) == ["a", "later-0", "later-1", "later-2"]


def test_hanging_database_is_an_error_within_seconds(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.state.connections._ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("longtail.state.engines._SERVER_SECONDS", 1)
    state_location = parse_postgres(server)
    store = LabelStore(state_location)
    store.append([hide("a")])
    position = store.read_from().position
    server.pause()
    try:
        time.sleep(0.6)
        with pytest.raises(StoreError, match=r"no answer within 1 s|timeout"):
            store.read_from(position)
        with pytest.raises(StoreError):
            store.append([hide("lost")])
    finally:
        server.go_on()
    store.append([hide("b")])
    assert ids(state_location) in (["a", "b"], ["a", "lost", "b"])


def test_suspended_writer_does_not_block_others_forever(
    database_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_location = parse_postgres(database_server)
    store = LabelStore(state_location)
    store.append([hide("a")])
    monkeypatch.setattr("longtail.state.engines._SERVER_SECONDS", 2)
    stopped = writing(postgres_engine(state_location), "labels")
    stopped.__enter__()
    assert ids(state_location) == ["a"], "readers never wait"
    monkeypatch.setattr("longtail.state.engines._SERVER_SECONDS", 5)
    patient = LabelStore(state_location)
    patient.append([hide("b")])
    with pytest.raises(sqlalchemy.exc.SQLAlchemyError):
        stopped.__exit__(None, None, None)
    assert ids(state_location) == ["a", "b"]


def test_dropped_tables_are_not_recreated(database_server: PostgresServer) -> None:
    state_location = parse_postgres(database_server)
    store = LabelStore(state_location)
    store.append([hide("a")])
    position = store.read_from().position
    with psycopg.connect(database_server.url(schema=None), autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {state_location.schema}.label_changes RENAME TO away")
        time.sleep(0.6)
        for use in (lambda: store.read_from(position), lambda: store.append([hide("b")])):
            with pytest.raises(StoreError, match="label_changes"):
                use()
        connection.execute(f"ALTER TABLE {state_location.schema}.away RENAME TO label_changes")
        assert store.read_from(position).records == []
        connection.execute(f"DELETE FROM {state_location.schema}.label_store")
    with pytest.raises(StoreError, match="found tables without a name"):
        store.append([hide("b")])


def test_restored_database_restarts_readers(database_server: PostgresServer) -> None:
    state_location = parse_postgres(database_server)
    store = LabelStore(state_location)
    store.append([hide("a")])
    store.append([hide("b")])
    position = store.read_from().position
    with psycopg.connect(database_server.url(schema=None), autocommit=True) as connection:
        connection.execute(f"DELETE FROM {state_location.schema}.label_changes WHERE number = 2")
    time.sleep(0.6)
    read = store.read_from(position)
    assert ([record.id for record in read.records], read.restarted) == (["a"], True)


def test_existing_schema_needs_no_create_right(database_server: PostgresServer) -> None:
    state_location = parse_postgres(database_server)
    with psycopg.connect(database_server.url(schema=None), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {state_location.schema} LOGIN")
        connection.execute(f"CREATE SCHEMA {state_location.schema} AUTHORIZATION {state_location.schema}")
    custom = Postgres(state_location.url.set(username=state_location.schema), state_location.schema)
    LabelStore(custom).append([hide("a")])
    assert ids(custom) == ["a"]


def test_synchronous_commit_is_enabled(database_server: PostgresServer) -> None:
    state_location = parse_postgres(database_server)
    with psycopg.connect(database_server.url(schema=None), autocommit=True) as connection:
        connection.execute("ALTER ROLE longtail SET synchronous_commit = off")
        try:
            engine = postgres_engine(state_location)
            with engine.connect() as checked:
                assert checked.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
            engine.dispose()
        finally:
            connection.execute("ALTER ROLE longtail RESET synchronous_commit")


def test_pooler_without_the_schema_is_refused(database_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    state_location = parse_postgres(database_server)
    engine = postgres_engine(state_location)

    connect = ImpatientConnection.connect

    def losing(*arguments: Any, options: str, **parameters: Any) -> Any:
        assert f"search_path={state_location.schema}" in options
        return connect(*arguments, **parameters)

    monkeypatch.setattr(ImpatientConnection, "connect", losing)
    with pytest.raises(StoreError, match="expected a connection with that schema, found one with"):
        engine.connect()


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("postgresql://u:secret@h:port/d", "what is no URL"),
        ("postgresql://u:secret@h/d?schema=Shop", "schema of at most 48 of a-z"),
        ("postgresql://u:secret@h/d?schema=a&schema=b", "received a list of 2"),
        ("postgresql://u@h/d?password=secret", "expected a password before the host or in PGPASSFILE"),
        ("postgresql+psycopg://u:secret@h/d", 'received "postgresql.psycopg"://'),
        ("mysql://u:secret@h/d", 'received "mysql"://'),
    ],
)
def test_invalid_urls_are_refused_without_password(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong) as refused:
        parse_location(url)
    assert "secret" not in str(refused.value)


def test_unreachable_database_is_not_an_empty_store() -> None:
    state_location = parse_location(f"postgresql://longtail@127.0.0.1:{free_port()}/postgres")
    with closing(LabelStore(state_location)) as store:
        for _ in range(3):
            with pytest.raises(StoreError):
                store.read_from()
