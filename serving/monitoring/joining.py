"""Looks up the answers that pending feedback is about: by the answer's own id, or by its request's.

An answer's id is its own, so feedback that names it finds that answer or none. A request's id is what a client or a
gateway made of it, and several requests may have the same. Feedback that names one is joined if all answers known of
it, query by query, are one and the same answer, as those of a retried request are; of different ones nobody knows which
is meant, so none is blamed: it is left, and counted as ambiguous. What was said of an answer by one of its names
counts once if it is said by the other, too.

Everything is looked up before the file is locked for writing, and by key, of which many labels chosen may share one:
nobody waits for feedback whose answers are not there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longtail.bundle.lookup import fingerprints
from longtail.serving.monitoring.arm_counts import add_positives
from longtail.serving.monitoring.database import transaction
from longtail.serving.monitoring.feedback_counts import AMBIGUOUS, FEEDBACK, UNMATCHED, add_recall, add_to_total

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
SELECT id, label, bucket, event, key FROM feedback WHERE key = ? AND state = 0 AND (answer_id IS NULL) = ?
"""
_SAID = "SELECT event FROM feedback WHERE key IN ({keys}) AND label = ? AND state = 1"
"""What was said of a label under any name of its answer."""
_ANSWERS = """
SELECT key, request_key, release, labels, buckets, propensities, bias_removal, popularity, features, request_id, arm,
    cluster
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
    event: str
    key: int


class _Answer(NamedTuple):
    key: int
    request_key: int | None
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
        return self[2:9]


class _Found(NamedTuple):
    """A label chosen, its answer, and the keys of all names that feedback may give that answer; None: it is one of
    several.
    """

    label: _Label
    answer: _Answer | None
    keys: frozenset[int]


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
        answers = [_Answer(*row) for row in rows]
        if not answers:
            continue
        answer: _Answer | None = answers[-1]
        keys, request_key = {key}, answers[-1].request_key
        if names_request:
            answer = answer if _alike(answers) else None
            keys |= {each.key for each in answers}
        elif request_key is not None:
            namesakes = connection.execute(either, (request_key, request_key))
            keys |= {request_key} if _alike([_Answer(*row) for row in namesakes]) else set()
        labels = connection.execute(_LABELS, (key, names_request))
        yield [_Found(_Label(*row), answer, frozenset(keys)) for row in labels]


def _alike(answers: Sequence[_Answer]) -> bool:
    """Whether the answers that a name was given are one and the same."""
    return len({answer.said for answer in answers}) == 1 and len(answers) <= _MOST_ALIKE


def _settle(connection: sqlite3.Connection, found: list[_Found], now: float) -> None:
    """Mark labels as joined or ambiguous, and count those that no other worker has."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    of_arms: list[tuple[int, int, int, bool]] = []
    ambiguous: set[int] = set()
    positions = [None if answer is None else _position(label, answer) for label, answer, _ in found]
    with transaction(connection):
        for (label, answer, keys), position in zip(found, positions, strict=True):
            if answer is None:
                left = connection.execute("UPDATE feedback SET state = 2 WHERE id = ? AND state = 0", (label.id,))
                ambiguous |= {label.key} if left.rowcount else set()
                continue
            so_far = connection.execute(_SAID.format(keys=", ".join(map(str, keys))), (label.label,))
            said = {event for (event,) in so_far}
            if label.event in said:
                connection.execute("UPDATE feedback SET state = 4 WHERE id = ? AND state = 0", (label.id,))
                continue
            propensity = 1.0
            if position is not None and answer.propensities is not None:
                propensity = float(np.frombuffer(answer.propensities, "<f4")[position])
            of_query = answer.bias_removal, answer.popularity, answer.features, answer.arm, answer.request_id
            joined = connection.execute(_JOINED, (answer.release, position, propensity, *of_query, label.id))
            of = label.bucket if position is None else answer.buckets[position]
            # A purchase after a click is one label found, not two.
            if joined.rowcount and of >= 0 and not said:
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
