"""Looks up the answers that pending feedback is about: by the answer's own id, or by its request's.

An answer's id is its own, so feedback that names it finds that answer or none. A request's id is what a client or a
gateway made of it, and several requests may have the same. Feedback that names one is joined if all answers known of
it, query by query, are one and the same answer, as those of a retried request are; of different ones nobody knows which
is meant, so none is blamed: it is left, and counted as ambiguous. What was said of an answer by one of its names
counts once if it is said by the other, too.

Everything is looked up before other writers have to wait, and by key, of which many labels chosen may share one:
nobody waits for feedback whose answers are not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, Engine, TextClause, text

from longtail.bundle.id_rows import fingerprints
from longtail.serving.monitoring.feedback_counts import AMBIGUOUS, FEEDBACK, UNMATCHED, add_recall, add_to_total
from longtail.state.engines import looking, writing

_AT_ONCE = 500
"""Labels chosen that are joined in one transaction, or those of one key: others have their turn."""
_MOST_ALIKE = 8
"""Answers of one request id that are compared; more are taken as different."""
_GENERATIONS_HELD = text("""
WITH RECURSIVE held (generation) AS (
    SELECT min(generation) FROM answers
    UNION ALL
    SELECT (SELECT min(generation) FROM answers WHERE generation > held.generation) FROM held
    WHERE generation IS NOT NULL
)
SELECT generation FROM held WHERE generation IS NOT NULL
""")
"""The distinct generations, by one step in the index each."""
_KEYS = "SELECT DISTINCT key, answer_id IS NULL FROM feedback {pending} WHERE state = 0 AND at >= :since"
_LABELS = text(
    "SELECT id, label, bucket, event, key FROM feedback WHERE key = :key AND state + 0 = 0 "
    "AND (answer_id IS NULL) = :names_request"
)
"""By the key: the sum keeps PostgreSQL from looking through all that is pending instead."""
_SAID = "SELECT event FROM feedback WHERE key IN ({keys}) AND label = :label AND state = 1"
"""What was said of a label under any name of its answer."""
_ANSWERS = """
SELECT key, request_key, release, labels, buckets, propensities, bias_removal, popularity, features, request_id, run,
    arm, unit
FROM answers {index} WHERE generation IN ({generations}) AND {column} = :key
"""
_JOINED = text("""
UPDATE feedback SET state = 1, release = :release, position = :position, propensity = :propensity,
    bias_removal = :bias_removal, popularity = :popularity, features = :features, run = :run,
    arm = :arm, unit = :unit, bucket = :bucket, request_id = coalesce(:request_id, request_id)
WHERE id = :id AND state = 0
""")
_SETTLED = text("UPDATE feedback SET state = :state WHERE id = :id AND state = 0")
_TOO_OLD = text("SELECT count(DISTINCT key) FROM feedback WHERE state = 0 AND at < :before")
_GIVEN_UP = text("UPDATE feedback SET state = 2 WHERE state = 0 AND at < :before")
_TAKEN = ("release", "bias_removal", "popularity", "features", "run", "arm", "unit", "request_id")
"""From the answer, as they are."""
_TURNS = "feedback"
"""Of those who settle: what one says of an answer's names the next must see."""


Choices = Counter[tuple[str, str, int]]
"""Labels found by run, arm and bucket of experiments."""


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
    run: str | None
    arm: str | None
    unit: int | None

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


def join(engine: Engine, now: float, since: float) -> Choices:
    """Join the feedback that is pending and whose answers are known, and count it in the minute of `now`.

    Args:
        engine: on the database.
        now: seconds since 1970.
        since: feedback from before then is left out.

    Returns:
        Labels found by run, arm and bucket of experiments.
    """
    choices = Choices()
    with looking(engine) as connection:
        generations = ", ".join(str(row[0]) for row in connection.execute(_GENERATIONS_HELD))
        if not generations:
            return choices
        found: list[_Found] = []
        for of_key in _lookups(connection, generations, since):
            found += of_key
            if len(found) >= _AT_ONCE:
                choices += _settle(engine, found, now)
                found = []
    if found:
        choices += _settle(engine, found, now)
    return choices


def give_up(engine: Engine, before: float) -> None:
    """Stop looking for the answers of feedback from before then.

    Args:
        engine: on the database.
        before: seconds since 1970.
    """
    with looking(engine) as connection:
        if not connection.scalar(_TOO_OLD, {"before": before}):
            return
    with writing(engine, _TURNS) as connection:
        requests = connection.scalar(_TOO_OLD, {"before": before})
        if requests:
            connection.execute(_GIVEN_UP, {"before": before})
            add_to_total(connection, UNMATCHED, requests)


def _lookups(connection: Connection, generations: str, since: float) -> Iterator[list[_Found]]:
    """Pending labels, key by key, whose answers are known."""

    def by(index: str) -> str:
        # SQLite is told, for it would rather make itself an index of all answers, anew each time.
        return f"INDEXED BY {index}" if connection.dialect.name == "sqlite" else ""

    by_answer, by_request = (
        _ANSWERS.format(generations=generations, index=by(index), column=column)
        for index, column in (("answers_by_key", "key"), ("answers_by_request", "request_key"))
    )
    only = text(by_answer)
    either = text(
        f"SELECT * FROM ({by_answer}) AS named UNION ALL SELECT * FROM ({by_request}) AS asked LIMIT {_MOST_ALIKE + 1}"
    )
    for key, names_request in connection.execute(text(_KEYS.format(pending=by("pending"))), {"since": since}).all():
        rows = connection.execute(either if names_request else only, {"key": key})
        answers = [_Answer(*row) for row in rows]
        if not answers:
            continue
        answer: _Answer | None = answers[-1]
        keys, request_key = {key}, answers[-1].request_key
        if names_request:
            answer = answer if _alike(answers) else None
            keys |= {each.key for each in answers}
        elif request_key is not None:
            namesakes = connection.execute(either, {"key": request_key})
            keys |= {request_key} if _alike([_Answer(*row) for row in namesakes]) else set()
        labels = connection.execute(_LABELS, {"key": key, "names_request": names_request})
        yield [_Found(_Label(*row), answer, frozenset(keys)) for row in labels]


def _alike(answers: Sequence[_Answer]) -> bool:
    """Whether the answers that a name was given are one and the same."""
    return len({answer.said for answer in answers}) == 1 and len(answers) <= _MOST_ALIKE


def _settle(engine: Engine, found: list[_Found], now: float) -> Choices:
    """Mark labels as joined or ambiguous, and count those that no other worker has."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    choices = Choices()
    ambiguous: set[int] = set()
    said_under: dict[frozenset[int], TextClause] = {}
    positions = [None if answer is None else _position(label, answer) for label, answer, _ in found]
    with writing(engine, _TURNS) as connection:
        for (label, answer, keys), position in zip(found, positions, strict=True):
            if answer is None:
                left = connection.execute(_SETTLED, {"id": label.id, "state": 2})
                ambiguous |= {label.key} if left.rowcount else set()
                continue
            so_far = said_under.setdefault(keys, text(_SAID.format(keys=", ".join(map(str, keys)))))
            said = set(connection.scalars(so_far, {"label": label.label}))
            if label.event in said:
                connection.execute(_SETTLED, {"id": label.id, "state": 4})
                continue
            propensity = 1.0
            if position is not None and answer.propensities is not None:
                propensity = float(np.frombuffer(answer.propensities, "<f4")[position])
            of_answer = {"id": label.id, "position": position, "propensity": propensity}
            of_answer |= {name: getattr(answer, name) for name in _TAKEN}
            # A purchase after a click is one label found, not two.
            of = -1 if said else label.bucket if position is None else answer.buckets[position]
            joined = connection.execute(_JOINED, of_answer | {"bucket": of})
            if joined.rowcount and of >= 0:
                positives, hits = counts.get((answer.release, of), (0, 0))
                counts[answer.release, of] = positives + 1, hits + (position is not None)
                if answer.run is not None and answer.arm is not None and position is not None:
                    choices[answer.run, answer.arm, of] += 1
        if ambiguous:
            add_to_total(connection, AMBIGUOUS, len(ambiguous))
        add_recall(connection, FEEDBACK, now, [(*of, *pair) for of, pair in counts.items()])
    return choices


def _position(label: _Label, answer: _Answer) -> int | None:
    """Place of a label in an answer."""
    places = np.flatnonzero(np.frombuffer(answer.labels, "<u4") == fingerprints([label.label]))
    return int(places[0]) if len(places) else None
