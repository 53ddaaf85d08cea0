"""Feedback as it is kept, read beside the service that writes it or after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sqlalchemy import Connection, select

from longtail.serving.monitoring.arm_counts import ArmCounts, read_arms
from longtail.serving.monitoring.database import FEEDBACK_FILE
from longtail.serving.monitoring.tables import VERSION, arms, feedback, feedback_version
from longtail.state import Place, Postgres, StoreError
from longtail.state.engines import postgres_engine, reading, sqlite_engine, told

_PENDING, _ORGANIC, _AGAIN = 0, 3, 4
_ROWS_AT_ONCE = 1000


class FeedbackRow(NamedTuple):
    """One label chosen; what its answer says of it is None where there is no answer, or none known any more.

    `features` is JSON; `at` is in seconds since 1970; `experiment_run` and `arm` name the arm whose figures it is in.
    """

    id: int
    label: str
    at: float
    state: int
    event: str
    weight: float
    request_id: str | None
    query: int | None
    release: str | None
    position: int | None
    propensity: float | None
    bias_removal: float | None
    popularity: float | None
    features: bytes | None
    answer_id: str | None
    experiment_run: str | None
    arm: str | None

    @property
    def pending(self) -> bool:
        """Whether its answer is still looked for."""
        return self.state == _PENDING

    @property
    def source(self) -> str:
        """`answer`, or `organic` for a choice without one."""
        return "organic" if self.state == _ORGANIC else "answer"


_COLUMNS = [feedback.c[name] for name in FeedbackRow._fields if name not in ("experiment_run", "arm")]


class FeedbackReader:
    """Labels chosen as they were at one moment; no writer waits for a reader.

    Args:
        connection: to the database, in a transaction of its own.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, since: float, until: float) -> Iterator[FeedbackRow]:
        """Those from one time on and before another, in seconds since 1970, in the order they came; what was said by
        two names of an answer, once.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: they cannot be read; `feedback_of` tells it as StoreError.
        """
        known = feedback.outerjoin(arms, arms.c.id == feedback.c.arm)
        found = self._connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(
            select(*_COLUMNS, arms.c.run, arms.c.arm)
            .select_from(known)
            .where(feedback.c.at >= since, feedback.c.at < until, feedback.c.state != _AGAIN)
            .order_by(feedback.c.id)
        )
        return (FeedbackRow._make(row) for row in found)

    def arms(self, run: str) -> dict[str, ArmCounts]:
        """What is known of the arms of an experiment's run; raises as `rows`."""
        return read_arms(self._connection, run)


@contextmanager
def feedback_of(state: Place) -> Iterator[FeedbackReader]:
    """The feedback of a service that runs or ran.

    Args:
        state: its state directory or database.

    Raises:
        StoreError: there is none, it cannot be read, or is of another version.
    """
    server = isinstance(state, Postgres)
    if isinstance(state, Postgres):
        engine = postgres_engine(state)
    else:
        path = (state / FEEDBACK_FILE).resolve()
        if not path.is_file():
            raise StoreError(f"no {FEEDBACK_FILE} in it")
        engine = sqlite_engine(path, read_only=True)
    try:
        with told("expected feedback of this version, found"), reading(engine) as connection:
            version = select(feedback_version.c.version)
            found = connection.scalar(version) if server else connection.exec_driver_sql("PRAGMA user_version").scalar()
            if found != VERSION:
                raise StoreError(
                    f"version {found} of {FEEDBACK_FILE} where {VERSION} is expected; a service that is started on it "
                    "brings earlier ones there"
                )
            yield FeedbackReader(connection)
    finally:
        engine.dispose()
