"""Feedback as it is kept, read beside the service that writes it or after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, select

from longtail.serving.monitoring.database import FEEDBACK_FILE
from longtail.serving.monitoring.feedback_counts import FEEDBACK_FORGOTTEN
from longtail.serving.monitoring.tables import VERSION, answers, feedback, feedback_version, totals
from longtail.state import Place, Postgres, StoreError
from longtail.state.engines import postgres_engine, reading, sqlite_engine, told

_PENDING, _JOINED, _ORGANIC, _AGAIN = 0, 1, 3, 4
_ROWS_AT_ONCE = 1000


class FeedbackRow(NamedTuple):
    """One label chosen; what its answer says of it is None where there is no answer, or none known any more.

    `features` is JSON; `at` is in seconds since 1970. `run`, `arm` and
    `unit` are of an experiment whose arms are compared by its answer.
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
    run: str | None
    arm: str | None
    unit: int | None

    @property
    def pending(self) -> bool:
        """Whether its answer is still looked for."""
        return self.state == _PENDING

    @property
    def source(self) -> str:
        """`answer`, or `organic` for a choice without one."""
        return "organic" if self.state == _ORGANIC else "answer"


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
        found = self._connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(
            select(*(feedback.c[name] for name in FeedbackRow._fields))
            .where(feedback.c.at >= since, feedback.c.at < until, feedback.c.state != _AGAIN)
            .order_by(feedback.c.id)
        )
        return (FeedbackRow._make(row) for row in found)

    def arm_answers(self, run: str, since: float, until: float) -> Iterator[tuple[str, int, bytes]]:
        """Get arm, unit and a byte for each label's bucket of the answers that arms are compared by."""
        of = answers.c
        return self._of_run(select(of.arm, of.unit, of.buckets).where(of.run == run, of.at >= since, of.at < until))

    def arm_choices(self, run: str, since: float, until: float) -> Iterator[tuple[str, int, int, int | None]]:
        """Get arm, unit, bucket and position (None: not in the answer) of labels chosen, each label once."""
        of = feedback.c
        return self._of_run(
            select(of.arm, of.unit, of.bucket, of.position).where(
                of.run == run, of.state == _JOINED, of.bucket >= 0, of.at >= since, of.at < until
            )
        )

    def kept_since(self) -> float:
        """Get the time from which on all answers and feedback are kept, in seconds since 1970."""
        oldest = self._connection.execute(select(answers.c.id, answers.c.at).order_by(answers.c.id).limit(1)).first()
        kept = 0.0 if oldest is None or oldest.id == 1 else float(oldest.at)
        forgotten = self._connection.scalar(select(totals.c.value).where(totals.c.name == FEEDBACK_FORGOTTEN))
        return max(kept, float(forgotten or 0))

    def _of_run(self, query: Select[Any]) -> Iterator[Any]:
        return iter(self._connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(query))


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
