"""Open the PostgreSQL tables of label changes, and listen for writes."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, func, insert, select, text
from sqlalchemy.schema import CreateSchema

from longtail.state.engines import autocommit, postgres_engine, store_errors
from longtail.state.location import Postgres
from longtail.state.tables import VERSION, label_store, metadata

_POLL_SECONDS = 0.5
"""Interval of reads without a notification."""


class LabelServer:
    """The tables of label changes in a schema. Not thread-safe."""

    def __init__(self, location: Postgres) -> None:
        self.location = location
        self._engine: Engine | None = None
        self._has_tables = False
        self._listening: Any = None
        self._polled_at: float | None = None
        self._channel = f"{location.schema}_labels"

    def engine(self, *, make: bool) -> Engine | None:
        """Get the engine; None if there are no tables yet and `make` is false.

        Tables that vanish later are not created again.
        """
        self._engine = self._engine or postgres_engine(self.location)
        if not self._has_tables:
            with store_errors(f"{self.location}: expected tables of label changes, found"):
                if make:
                    self._create_tables(self._engine)
                    self._has_tables = True
                else:
                    table = func.to_regclass(f"{self.location.schema}.{label_store.name}")
                    with autocommit(self._engine) as connection:
                        self._has_tables = connection.scalar(select(table)) is not None
        return self._engine if self._has_tables else None

    def _create_tables(self, engine: Engine) -> None:
        """Create a missing schema and tables; processes that do so at the same time take turns."""
        schema = self.location.schema
        with engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(schema, 0))))
            if connection.scalar(select(func.to_regnamespace(schema))) is None:
                connection.execute(CreateSchema(schema))
            metadata.create_all(connection)
            if connection.scalar(select(func.count()).select_from(label_store)) == 0:
                connection.execute(insert(label_store), {"version": VERSION, "generation": uuid4().hex})

    def changed(self) -> bool:
        """Return whether any process may have written since the last call; true every half second at least."""
        notified = self._has_notification()
        if not notified and self._polled_at is not None and monotonic() - self._polled_at < _POLL_SECONDS:
            return False
        self._polled_at = monotonic()
        return True

    def _has_notification(self) -> bool:
        """Return whether a notification has arrived; the next call reopens a lost connection."""
        import psycopg  # comes with the extra `remote`

        assert self._engine is not None
        try:
            if self._listening is None:
                pooled = self._engine.raw_connection()
                self._listening = pooled.driver_connection
                pooled.detach()  # listening occupies the connection for good, so it leaves the pool
                self._listening.autocommit = True
                self._listening.execute(f"LISTEN {self._channel}")
                return True
            return bool([*self._listening.notifies(timeout=0)])
        except psycopg.Error:
            self._hang_up()
            return False

    def wrote(self, connection: Connection) -> None:
        """Notify other processes of a transaction's writes when it commits."""
        connection.execute(text("SELECT pg_notify(:channel, '')"), {"channel": self._channel})

    def _hang_up(self) -> None:
        if self._listening is not None:
            with suppress(Exception):
                self._listening.close()
        self._listening = None

    def close(self) -> None:
        """Close the connections."""
        self._hang_up()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
