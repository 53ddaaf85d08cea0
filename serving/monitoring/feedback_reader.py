"""Feedback as it is kept, read beside the service that writes it or after it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from longtail.serving.monitoring.arm_counts import ArmCounts, read_arms
from longtail.serving.monitoring.database import FEEDBACK_FILE, VERSION

_PENDING, _ORGANIC, _AGAIN = 0, 3, 4


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


_COLUMNS = ", ".join(f"feedback.{name}" for name in FeedbackRow._fields if name not in ("experiment_run", "arm"))


class FeedbackReader:
    """Labels chosen as they were at one moment; no writer waits for a reader.

    Args:
        connection: to the database, in a transaction of its own.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, since: float, until: float) -> Iterator[FeedbackRow]:
        """Those from one time on and before another, in seconds since 1970, in the order they came; what was said by
        two names of an answer, once.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        found = self._connection.execute(
            f"SELECT {_COLUMNS}, arms.run, arms.arm FROM feedback LEFT JOIN arms ON arms.id = feedback.arm "
            "WHERE at >= ? AND at < ? AND state != ? ORDER BY feedback.id",
            (since, until, _AGAIN),
        )
        return map(FeedbackRow._make, found)

    def arms(self, run: str) -> dict[str, ArmCounts]:
        """What is known of the arms of an experiment's run; raises sqlite3.Error."""
        return read_arms(self._connection, run)


@contextmanager
def feedback_of(state: Path) -> Iterator[FeedbackReader]:
    """The feedback of a service that runs or ran.

    Args:
        state: its state directory.

    Raises:
        sqlite3.Error: there is none, it cannot be read, or is of another version.
    """
    path = (state / FEEDBACK_FILE).resolve()
    if not path.is_file():
        raise sqlite3.OperationalError(f"no {FEEDBACK_FILE} in it")
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise sqlite3.DatabaseError(
                f"version {version} of {FEEDBACK_FILE} where {VERSION} is expected; a service that is started on it "
                "brings earlier ones there"
            )
        yield FeedbackReader(connection)
