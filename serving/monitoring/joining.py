"""Looks up the answers that pending feedback is about: by the answer's own id, or by its request's.

An answer's id is its own, so feedback that names it finds that answer or none. A request's id is what a client or a
gateway made of it, and several requests may have the same. Feedback that names one is joined if all answers known of
it, query by query, are one and the same answer, as those of a retried request are; of different ones nobody knows which
is meant, so none is blamed: it is left, and counted as ambiguous.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longtail.serving.monitoring.database import transaction
from longtail.serving.monitoring.feedback_counts import AMBIGUOUS, FEEDBACK, UNMATCHED, add_recall, add_to_total
from longtail.serving.monitoring.records import fingerprints

_MOST_ALIKE = 8
"""Answers of one request id that are compared; more are taken as different."""
_GENERATIONS_HELD = """
WITH RECURSIVE held (generation) AS (
    SELECT min(generation) FROM answers
    UNION ALL
    SELECT (SELECT min(generation) FROM answers WHERE generation > held.generation) FROM held
    WHERE generation IS NOT NULL
)
SELECT generation FROM held WHERE generation IS NOT NULL
"""
"""The distinct generations, by one step in the index each."""
_FEEDBACK = """
SELECT f.id, f.label, f.bucket,
    EXISTS (SELECT 1 FROM feedback g WHERE g.key = f.key AND g.label = f.label AND g.id < f.id), f.key
"""
_ANSWER = "a.release, a.labels, a.buckets, a.propensities, a.bias_removal, a.popularity, a.features, a.request_id"


class _Pending(NamedTuple):
    id: int
    label: str
    bucket: int
    again: int
    key: int


class _Answer(NamedTuple):
    release: str
    labels: bytes
    buckets: bytes
    propensities: bytes | None
    bias_removal: float | None
    popularity: float | None
    features: bytes | None
    request_id: str | None


_Found = tuple[_Pending, _Answer]


def join_some(connection: sqlite3.Connection, now: float, since: float, most: int) -> bool:
    """Join feedback that is pending, and count what it found in the minute of `now`; whether there may be more.

    Args:
        connection: to the database, in no transaction.
        now: seconds since 1970.
        since: feedback from before then is left out.
        most: labels of feedback of each kind.
    """
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    with transaction(connection):
        generations = ", ".join(str(row[0]) for row in connection.execute(_GENERATIONS_HELD))
        if not generations:
            return False
        by_answer = _of_answers(connection, generations, since, most)
        by_request, ambiguous = _of_requests(connection, generations, since, most)
        joined = []
        for pending, answer in (*by_answer, *by_request):
            places = np.flatnonzero(np.frombuffer(answer.labels, "<u4") == fingerprints([pending.label]))
            hit = len(places) > 0
            of = answer.buckets[places[0]] if hit else pending.bucket
            # A purchase after a click is one label found, not two.
            if of >= 0 and not pending.again:
                positives, hits = counts.get((answer.release, of), (0, 0))
                counts[answer.release, of] = positives + 1, hits + hit
            position = int(places[0]) if hit else None
            propensity = 1.0
            if position is not None and answer.propensities is not None:
                propensity = float(np.frombuffer(answer.propensities, "<f4")[position])
            dials_and_features = answer.bias_removal, answer.popularity, answer.features
            joined.append((answer.release, position, propensity, *dials_and_features, answer.request_id, pending.id))
        connection.executemany(
            "UPDATE feedback SET state = 1, release = ?, position = ?, propensity = ?, bias_removal = ?, "
            "popularity = ?, features = ?, request_id = ifnull(?, request_id) WHERE id = ?",
            joined,
        )
        if ambiguous:
            connection.executemany("UPDATE feedback SET state = 2 WHERE id = ?", [(row.id,) for row in ambiguous])
            add_to_total(connection, AMBIGUOUS, len({row.key for row in ambiguous}))
        add_recall(connection, FEEDBACK, now, [(*of, *pair) for of, pair in counts.items()])
    return len(by_answer) == most or len(by_request) + len(ambiguous) == most


def give_up(connection: sqlite3.Connection, before: float) -> None:
    """Stop looking for the answers of feedback from before then.

    Args:
        connection: to the database, in no transaction.
        before: seconds since 1970.
    """
    with transaction(connection):
        (requests,) = connection.execute(
            "SELECT count(DISTINCT key) FROM feedback WHERE state = 0 AND at < ?", (before,)
        ).fetchone()
        if requests:
            connection.execute("UPDATE feedback SET state = 2 WHERE state = 0 AND at < ?", (before,))
            add_to_total(connection, UNMATCHED, requests)


def _of_answers(connection: sqlite3.Connection, generations: str, since: float, most: int) -> list[_Found]:
    """Pending feedback that names an answer, and that answer."""
    found = connection.execute(
        # Said, for SQLite would rather make an index of all answers for itself, anew each time, and nobody writes then.
        f"{_FEEDBACK}, {_ANSWER}, max(a.id) FROM feedback f INDEXED BY pending "
        f"CROSS JOIN answers a INDEXED BY answers_by_key ON a.generation IN ({generations}) AND a.key = f.key "
        "WHERE f.state = 0 AND f.at >= ? AND f.answer_id IS NOT NULL GROUP BY f.id LIMIT ?",
        (since, most),
    )
    width = len(_Pending._fields)
    return [(_Pending(*row[:width]), _Answer(*row[width:-1])) for row in found]


def _of_requests(
    connection: sqlite3.Connection, generations: str, since: float, most: int
) -> tuple[list[_Found], list[_Pending]]:
    """Pending feedback that names a request of which answers are known: with its one answer, and that of several."""
    known = " OR ".join(
        f"EXISTS (SELECT 1 FROM answers a WHERE a.generation IN ({generations}) AND a.{key} = f.key)"
        for key in ("key", "request_key")
    )
    rows = connection.execute(
        f"{_FEEDBACK} FROM feedback f WHERE f.state = 0 AND f.at >= ? AND f.answer_id IS NULL AND ({known}) LIMIT ?",
        (since, most),
    )
    pending = [_Pending(*row) for row in rows]
    answers = {key: _the_one(_candidates(connection, generations, key)) for key in {row.key for row in pending}}
    found = [(row, answer) for row in pending if (answer := answers[row.key]) is not None]
    return found, [row for row in pending if answers[row.key] is None]


def _candidates(connection: sqlite3.Connection, generations: str, key: int) -> list[_Answer]:
    """Answers of a request id and a query, one more than are compared at most."""
    each = [
        f"SELECT {_ANSWER} FROM answers a WHERE a.generation IN ({generations}) AND a.{column} = ?"
        for column in ("key", "request_key")
    ]
    rows: Iterable[Sequence[Any]] = connection.execute(
        f"{' UNION ALL '.join(each)} LIMIT ?", (key, key, _MOST_ALIKE + 1)
    )
    return [_Answer(*row) for row in rows]


def _the_one(answers: Sequence[_Answer]) -> _Answer | None:
    """The answer, if all of some are the same; else None."""
    alike = len({answer[:-1] for answer in answers}) == 1
    return answers[0] if alike and len(answers) <= _MOST_ALIKE else None
