"""Looks up the answers that pending feedback is about: by the answer's own id, or by its request's.

An answer's id is its own, so feedback that names it finds that answer or none. A request's id is what a client or a
gateway made of it, and several requests may have the same. Feedback that names one is joined if all answers known of
it, query by query, are one and the same answer, as those of a retried request are; of different ones nobody knows which
is meant, so none is blamed: it is left, and counted as ambiguous.

Everything is looked up before the file is locked for writing, and by key, of which many labels chosen may share one:
nobody waits for feedback whose answers are not there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from longtail.serving.monitoring.arm_counts import add_positives
from longtail.serving.monitoring.database import transaction
from longtail.serving.monitoring.feedback_counts import AMBIGUOUS, FEEDBACK, UNMATCHED, add_recall, add_to_total
from longtail.serving.monitoring.records import fingerprints

_AT_ONCE = 5000
"""Labels chosen that are joined in one transaction, or those of one key."""
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
_KEYS = "SELECT DISTINCT key, answer_id IS NULL FROM feedback INDEXED BY pending WHERE state = 0 AND at >= ?"
_LABELS = """
SELECT f.id, f.label, f.bucket,
    EXISTS (SELECT 1 FROM feedback g WHERE g.key = f.key AND g.label = f.label AND g.id < f.id), f.key
FROM feedback f WHERE f.key = ? AND f.state = 0 AND (f.answer_id IS NULL) = ?
"""
_ANSWERS = """
SELECT release, labels, buckets, propensities, bias_removal, popularity, features, request_id, arm, cluster
FROM answers INDEXED BY {index} WHERE generation IN ({generations}) AND {column} = ?
"""
_JOINED = """
UPDATE feedback SET state = 1, release = ?, position = ?, propensity = ?, bias_removal = ?, popularity = ?,
    features = ?, arm = ?, request_id = ifnull(?, request_id)
WHERE id = ? AND state = 0
"""


class _Label(NamedTuple):
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
    arm: int | None
    cluster: int | None

    @property
    def said(self) -> tuple[object, ...]:
        """What two answers have in common that are one and the same."""
        return self[:7]


_Found = tuple[_Label, _Answer | None]
"""A label chosen and its answer; None: it is one of several."""


def join(connection: sqlite3.Connection, now: float, since: float) -> None:
    """Join the feedback that is pending and whose answers are known, and count it in the minute of `now`.

    Args:
        connection: to the database, in no transaction.
        now: seconds since 1970.
        since: feedback from before then is left out.
    """
    generations = ", ".join(str(row[0]) for row in connection.execute(_GENERATIONS_HELD))
    if not generations:
        return
    found: list[_Found] = []
    for of_key in _lookups(connection, generations, since):
        found += of_key
        if len(found) >= _AT_ONCE:
            _settle(connection, found, now)
            found = []
    if found:
        _settle(connection, found, now)


def give_up(connection: sqlite3.Connection, before: float) -> None:
    """Stop looking for the answers of feedback from before then.

    Args:
        connection: to the database, in no transaction.
        before: seconds since 1970.
    """
    too_old = "SELECT EXISTS (SELECT 1 FROM feedback WHERE state = 0 AND at < ?)"
    if not connection.execute(too_old, (before,)).fetchone()[0]:
        return
    with transaction(connection):
        (requests,) = connection.execute(
            "SELECT count(DISTINCT key) FROM feedback WHERE state = 0 AND at < ?", (before,)
        ).fetchone()
        if requests:
            connection.execute("UPDATE feedback SET state = 2 WHERE state = 0 AND at < ?", (before,))
            add_to_total(connection, UNMATCHED, requests)


def _lookups(connection: sqlite3.Connection, generations: str, since: float) -> Iterator[list[_Found]]:
    """Pending labels, key by key, whose answers are known."""
    # The index is said, for SQLite would rather make itself one of all answers, anew each time.
    by_answer, by_request = (
        _ANSWERS.format(generations=generations, index=index, column=column)
        for index, column in (("answers_by_key", "key"), ("answers_by_request", "request_key"))
    )
    either = f"SELECT * FROM ({by_answer}) UNION ALL SELECT * FROM ({by_request}) LIMIT {_MOST_ALIKE + 1}"
    for key, names_request in connection.execute(_KEYS, (since,)).fetchall():
        rows = connection.execute(either, (key, key)) if names_request else connection.execute(by_answer, (key,))
        if answers := [_Answer(*row) for row in rows]:
            alike = len({answer.said for answer in answers}) == 1 and len(answers) <= _MOST_ALIKE
            answer = answers[-1] if alike or not names_request else None
            labels = connection.execute(_LABELS, (key, names_request))
            yield [(_Label(*row), answer) for row in labels]


def _settle(connection: sqlite3.Connection, found: list[_Found], now: float) -> None:
    """Mark labels as joined or ambiguous, and count those that no other worker has."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    of_arms: list[tuple[int, int, int, bool]] = []
    ambiguous: set[int] = set()
    positions = [None if answer is None else _position(label, answer) for label, answer in found]
    with transaction(connection):
        for (label, answer), position in zip(found, positions, strict=True):
            if answer is None:
                left = connection.execute("UPDATE feedback SET state = 2 WHERE id = ? AND state = 0", (label.id,))
                ambiguous |= {label.key} if left.rowcount else set()
                continue
            propensity = 1.0
            if position is not None and answer.propensities is not None:
                propensity = float(np.frombuffer(answer.propensities, "<f4")[position])
            of_query = answer.bias_removal, answer.popularity, answer.features, answer.arm, answer.request_id
            joined = connection.execute(_JOINED, (answer.release, position, propensity, *of_query, label.id))
            of = label.bucket if position is None else answer.buckets[position]
            # A purchase after a click is one label found, not two.
            if joined.rowcount and of >= 0 and not label.again:
                positives, hits = counts.get((answer.release, of), (0, 0))
                counts[answer.release, of] = positives + 1, hits + (position is not None)
                if answer.arm is not None and answer.cluster is not None:
                    of_arms.append((answer.arm, answer.cluster, of, position is not None))
        if ambiguous:
            add_to_total(connection, AMBIGUOUS, len(ambiguous))
        add_recall(connection, FEEDBACK, now, [(*of, *pair) for of, pair in counts.items()])
        add_positives(connection, of_arms)


def _position(label: _Label, answer: _Answer) -> int | None:
    """Place of a label in an answer."""
    places = np.flatnonzero(np.frombuffer(answer.labels, "<u4") == fingerprints([label.label]))
    return int(places[0]) if len(places) else None
