"""Answers, feedback on them, and the online recall per bucket that follows, in one database for all workers.

Recall counts stand in the same database as the events, so an event is marked joined and counted in one transaction: a
kill at any instant leaves both done or neither.

There are two ways of writing. `durable` has every commit on disk: feedback, before it is acknowledged. `lazy` leaves
that to checkpoints, which keeps what `durable` has promised: answers and joins, of which a power cut, or a kill of the
database, may undo the last; a join undone is done again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, insert, select, text, update

from longtail.serving.monitoring.database import open_engine, prepare
from longtail.serving.monitoring.feedback_counts import (
    COUNTERS,
    EVENTS_OF_ANSWERS,
    EVENTS_ORGANIC,
    FEEDBACK_FORGOTTEN,
    SHADOW,
    add_recall,
    add_to_total,
)
from longtail.serving.monitoring.joining import Choices, give_up, join
from longtail.serving.monitoring.records import AnsweredBatch, AnswerFeedback, ArmAnswer, ShadowPair
from longtail.serving.monitoring.tables import answers as answers_table
from longtail.serving.monitoring.tables import feedback, organic, recall, totals
from longtail.state import Place
from longtail.state.engines import in_parts, insert_new, looking, told, writing

_JOIN_FOR_SECONDS = 60
_PATIENCE_SECONDS = 10
_FRESH_SECONDS = 2
_LOOK_BACK_EVERY_SECONDS = 5
KEPT_SECONDS = 48 * 3600
_CHUNK = 5000
_AT_A_TIME = 64
"""Answers made ready before other threads have their turn."""
_FORGOTTEN = "features_forgotten"
"""Among the totals: the last answer whose features are not kept any more."""
_GENERATIONS = 32
_ENDS = text("SELECT coalesce((SELECT min(id) FROM answers), 0), coalesce((SELECT max(id) FROM answers), 0)")
_PENDING = text("SELECT EXISTS (SELECT 1 FROM feedback WHERE state = 0 AND at >= :since)")
_BEYOND = {
    "sqlite": "(SELECT max(id) FROM {table}) - :kept",
    # Numbers have gaps there: a row that is refused has taken one.
    "postgresql": "(SELECT id FROM {table} ORDER BY id DESC LIMIT 1 OFFSET :kept)",
}
"""The newest row of those that are too many."""
_OLD = (
    "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT :most) AND {settled} "
    "AND (at < :before OR id <= {beyond}) RETURNING at"
)
_SETTLED = {"feedback": "state > 0", "organic": "TRUE"}


class StoredAnswer(NamedTuple):
    """The labels that one query was answered.

    Attributes:
        answer_id, query: what feedback names it by.
        release: that answered.
        labels: fingerprints of their ids as bytes, best first; four bytes each, the lowest first.
        buckets: one byte per label.
        bias_removal, popularity: λ and μ.
        propensities: float32 of each label as bytes, the lowest first; None where all are 1.
        features: of the query as JSON; None where they are not recorded.
        request_id: what its client calls the request, as `AnsweredBatch.request_ids`.
        run, arm, unit: of an experiment whose arms are compared by it; None: of none.
    """

    answer_id: str
    query: int
    release: str
    labels: bytes
    buckets: bytes
    bias_removal: float = 0.0
    popularity: float = 0.0
    propensities: bytes | None = None
    features: bytes | None = None
    request_id: str | None = None
    run: str | None = None
    arm: str | None = None
    unit: int | None = None


class RecallRow(NamedTuple):
    """Labels interacted with in one minute since 1970, and those of them that the answers held."""

    release: str
    minute: int
    source: str
    bucket: int
    positives: int
    hits: int


class FeedbackStore:
    """Joins feedback with the answers it is about. Thread-safe.

    Every method raises StoreError if the database cannot be read or written: nothing was recorded then.

    Args:
        place: a state directory, which is there, or a database that replicas share.
        max_answers: answers kept; the oldest go first.
        max_feedback: labels of feedback kept that were settled; the oldest go first. As `max_answers` if not given.
        feedback_seconds: how long they are kept at most, and the features of answers too.
    """

    def __init__(
        self,
        place: Place,
        *,
        max_answers: int,
        max_feedback: int | None = None,
        feedback_seconds: float = KEPT_SECONDS,
    ) -> None:
        self._max_answers = max_answers
        self._max_feedback = max_answers if max_feedback is None else max_feedback
        self._feedback_seconds = feedback_seconds
        self._place, self._prepared = place, False
        self._told = f"{place}: expected answers and feedback, found"
        self._prepare_lock, self._durable_lock, self._lazy_lock = (threading.Lock() for _ in range(3))
        self._looked_back_at = 0.0
        self.durable, self.lazy = open_engine(place, "FULL"), open_engine(place, "NORMAL")
        if isinstance(place, Path):  # of a database, which may come later, whoever uses it is told
            with self._known():
                pass

    def record_feedback(self, events: Sequence[AnswerFeedback], now: float) -> None:
        """Record feedback durably. What was recorded before, label by label, counts once.

        Args:
            events: feedback on answers.
            now: seconds since 1970.
        """
        rows = [
            [
                {
                    "key": _key(event.named, event.query),
                    "label": label,
                    "bucket": bucket,
                    "at": now,
                    "event": event.event,
                    "weight": event.weight,
                    "answer_id": event.answer_id,
                    "request_id": event.request_id,
                    "query": event.query,
                    "state": 0,
                }
                for label, bucket in zip(event.labels, event.buckets, strict=True)
            ]
            for event in events
        ]
        with self._recording() as connection:
            # In one order: two replicas that each had a row the other wants would wait for good.
            rows.sort(key=_key_of)
            if all(len(labels) == 1 for labels in rows):  # then each row is an event
                fresh = insert_new(connection, feedback, [labels[0] for labels in rows])
            else:
                fresh = sum(insert_new(connection, feedback, labels) > 0 for labels in rows)
            add_to_total(connection, EVENTS_OF_ANSWERS, fresh)

    def record_shadow(
        self, release: str, events: Sequence[ShadowPair], pairs: Sequence[Sequence[tuple[int, int]]], now: float
    ) -> None:
        """Count organic interactions durably, and keep those that have features. What was recorded under an
        idempotency key is left out when it comes again.

        Args:
            release: that the shadow retrievals were made with.
            events: the interactions.
            pairs: positives and hits of every bucket, of each event.
            now: seconds since 1970.
        """
        with self._recording() as connection:
            fresh = [place for place, event in enumerate(events) if _is_new(connection, event.idempotency_key, now)]
            insert_new(connection, feedback, [row for place in fresh for row in _organic(events[place], release, now)])
            add_to_total(connection, EVENTS_ORGANIC, len(fresh))
            counts = [(release, bucket, *pair) for place in fresh for bucket, pair in enumerate(pairs[place])]
            add_recall(connection, SHADOW, now, counts)

    def keep_answers(self, answers: Iterable[StoredAnswer], now: float) -> None:
        """Keep answers for events to be joined with, and let the oldest go.

        Args:
            answers: one for each query.
            now: seconds since 1970.
        """
        keep: list[dict[str, Any]] = []
        for answer in answers:
            row = answer._asdict()
            row["key"] = _key(row.pop("answer_id"), answer.query)
            row["request_key"] = None if answer.request_id is None else _key(answer.request_id, answer.query)
            del row["query"]
            keep.append(row)
            if len(keep) % _AT_A_TIME == 0:
                # Lets other threads have the interpreter.
                time.sleep(0)
        size = max(self._max_answers // _GENERATIONS, 1)
        with self._lazy_lock, self._known(), writing(self.lazy, "answers") as connection:
            oldest, newest = connection.execute(_ENDS).one()
            for id_, row in enumerate(keep, newest + 1):
                row |= {"id": id_, "generation": id_ // size, "at": now}
            for part in in_parts(keep):
                connection.execute(insert(answers_table), part)
            upto = min(newest + len(keep) - self._max_answers, oldest + len(keep) + _CHUNK)
            connection.execute(delete(answers_table).where(answers_table.c.id <= upto))

    def join(self, now: float) -> Choices:
        """Count what pending feedback found: each event once, by one worker, in the minute of `now`.

        Fresh events are looked up at every call, older ones every five seconds: an answer may still be on its way
        from another worker. After a minute an event is left, and its request is counted as unmatched.

        Returns:
            Labels found by run, arm and bucket of experiments.
        """
        choices = Choices()
        with self._lazy_lock, self._known():
            looking_back = abs(now - self._looked_back_at) >= _LOOK_BACK_EVERY_SECONDS
            since = 0.0 if looking_back else now - _FRESH_SECONDS
            with looking(self.lazy) as connection:
                pending = connection.scalar(_PENDING, {"since": since})
            if pending:
                choices = join(self.lazy, now, since)
                if looking_back:
                    give_up(self.lazy, now - _JOIN_FOR_SECONDS)
            if looking_back:
                self._looked_back_at = now
        return choices

    def tidy(self, now: float) -> bool:
        """Delete what is too old, or more than is kept: settled feedback, idempotency keys and features of answers,
        some thousands of each at most, and recall counts.

        Returns:
            Whether there is more to delete; other writers have their turn first.
        """
        bounds = {"most": _CHUNK, "before": now - self._feedback_seconds, "kept": self._max_feedback}
        with self._lazy_lock, self._known(), writing(self.lazy, "answers") as connection:
            beyond = _BEYOND[connection.dialect.name]
            deleted = []
            for table, settled in _SETTLED.items():
                old = text(_OLD.format(table=table, settled=settled, beyond=beyond.format(table=table)))
                gone = connection.scalars(old, bounds).all()
                deleted.append(len(gone))
                if table == "feedback" and gone:
                    insert_new(connection, totals, [{"name": FEEDBACK_FORGOTTEN, "value": 0}])
                    since = update(totals).where(totals.c.name == FEEDBACK_FORGOTTEN)
                    connection.execute(since.values(value=int(max(gone)) + 1))
            connection.execute(delete(recall).where(recall.c.minute < int((now - KEPT_SECONDS) // 60)))
        # Apart, so that nothing else holds up what is promised of features.
        with self._lazy_lock, self._known(), writing(self.lazy, "answers") as connection:
            forgotten = _forget_features(connection, now - self._feedback_seconds)
        return _CHUNK in (*deleted, forgotten)

    def recall(self, now: float) -> list[RecallRow]:
        """Counts of the last 24 hours, of all releases."""
        newest = int(now // 60)
        columns = (recall.c[name] for name in RecallRow._fields)
        query = select(*columns).where(recall.c.minute > newest - 1440, recall.c.minute <= newest)
        with self._reading() as connection:
            return [RecallRow(*row) for row in connection.execute(query)]

    def totals(self) -> dict[str, int]:
        """Counters since the database was made, by COUNTERS."""
        with self._reading() as connection:
            found = {row.name: row.value for row in connection.execute(select(totals.c.name, totals.c.value))}
        return {name: found.get(name, 0) for name in COUNTERS}

    def close(self) -> None:
        """Close the connections; waits some seconds for writes under way."""
        for lock, engine in ((self._durable_lock, self.durable), (self._lazy_lock, self.lazy)):
            if lock.acquire(timeout=_PATIENCE_SECONDS):
                engine.dispose()
                lock.release()

    @contextmanager
    def _recording(self) -> Iterator[Connection]:
        with self._durable_lock, self._known(), writing(self.durable) as connection:
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._known(), looking(self.lazy) as connection:
            yield connection

    @contextmanager
    def _known(self) -> Iterator[None]:
        """The tables are there, and what goes wrong with them is a StoreError."""
        with told(self._told):
            with self._prepare_lock:
                if not self._prepared:
                    prepare(self._place)
                    self._prepared = True
            yield


def _key_of(labels: Sequence[Mapping[str, Any]]) -> int:
    return int(labels[0]["key"]) if labels else 0


def _is_new(connection: Connection, idempotency_key: str | None, now: float) -> bool:
    """Whether nothing was recorded under this key; from now on something is."""
    return idempotency_key is None or insert_new(connection, organic, [{"key": _hash(idempotency_key), "at": now}]) == 1


def _forget_features(connection: Connection, before: float) -> int:
    """Take the features from the oldest answers that have some, where they are from before a time; how many."""
    forgotten = connection.scalar(select(totals.c.value).where(totals.c.name == _FORGOTTEN)) or 0
    oldest, _ = connection.execute(_ENDS).one()
    last = max(forgotten, oldest - 1)
    of = answers_table.c
    rows = connection.execute(select(of.id, of.at).where(of.id > last).order_by(of.id).limit(_CHUNK))
    upto = last
    for id_, at in rows.all():
        if at is not None and at >= before:
            break
        upto = id_
    if upto > last:
        old = update(answers_table).where(of.id > last, of.id <= upto, of.features.is_not(None))
        connection.execute(old.values(features=None))
        insert_new(connection, totals, [{"name": _FORGOTTEN, "value": 0}])
        connection.execute(update(totals).where(totals.c.name == _FORGOTTEN).values(value=upto))
    return int(upto - last)


def answers_of(batch: AnsweredBatch) -> Iterator[StoredAnswer]:
    """Each query's answer of a batch, to be kept."""
    buckets, labels = batch.buckets_N.astype(np.int8).tobytes(), batch.fingerprints_N.astype("<u4").tobytes()
    propensities = None if batch.propensities_N is None else batch.propensities_N.astype("<f4").tobytes()
    for place, (start, end) in enumerate(pairwise([0, *batch.ends_B])):
        yield StoredAnswer(
            answer_id=batch.answer_ids[place],
            query=batch.places[place],
            release=batch.release,
            labels=labels[4 * start : 4 * end],
            buckets=buckets[start:end],
            bias_removal=float(batch.bias_removal_B[place]),
            popularity=float(batch.popularity_B[place]),
            propensities=None if propensities is None else propensities[4 * start : 4 * end],
            features=None if batch.features_B is None else batch.features_B[place],
            request_id=None if batch.request_ids is None else batch.request_ids[place],
            **_arm_columns(None if batch.arms_B is None else batch.arms_B[place]),
        )


def _arm_columns(arm: ArmAnswer | None) -> dict[str, Any]:
    if arm is None or not arm.counted:
        return {}
    # 64 bits as a database's integer.
    return {"run": arm.run, "arm": arm.arm, "unit": arm.unit - (1 << 64) if arm.unit >= 1 << 63 else arm.unit}


def _organic(event: ShadowPair, release: str, now: float) -> Iterator[dict[str, Any]]:
    """What is kept of an organic interaction, label by label; nothing where there are no features."""
    if event.features is not None:
        of_event = {"key": secrets.randbits(63), "at": now, "event": event.event, "weight": event.weight, "state": 3}
        for label, bucket in event.labels:
            yield of_event | {"label": label, "bucket": bucket, "release": release, "features": event.features}


def _key(id_: str, query: int) -> int:
    """Of an answer's or a request's id and the place of a query in it."""
    return _hash(f"{query}:{id_}")


def _hash(text: str) -> int:
    """64 bits: among a million answers, a strange id finds one by chance once in 10^13."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little", signed=True)
