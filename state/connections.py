"""Connect to PostgreSQL with a limit on the wait for every answer."""

from __future__ import annotations

from typing import Any

import psycopg

_ANSWER_SECONDS = 10.0
"""Twice the server's own limit for a statement: a server that takes longer hangs or is gone."""


class ImpatientConnection(psycopg.Connection[Any]):
    """A connection that ends if the server stays silent."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Return the generator's result; raises psycopg.OperationalError if it takes too long."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, _ANSWER_SECONDS)
        except psycopg.errors._WaitTimeout as error:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {_ANSWER_SECONDS:g} s") from error
