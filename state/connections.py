"""Connections to PostgreSQL that wait for no answer for good."""

from __future__ import annotations

from typing import Any

import psycopg

_ANSWER_SECONDS = 10.0
"""Twice what a statement may take by the server's own clock: then it hangs, or is gone."""


class ImpatientConnection(psycopg.Connection[Any]):
    """A connection that ends when the server says nothing any more, though its machine may acknowledge packets."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """The generator's result; raises psycopg.OperationalError where there is none in time."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, _ANSWER_SECONDS)
        except psycopg.errors._WaitTimeout as error:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"no answer within {_ANSWER_SECONDS:g} s") from error
