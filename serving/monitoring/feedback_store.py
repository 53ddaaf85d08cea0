"""Answers, feedback on them, and the online recall per bucket that follows, in one SQLite file for all workers.

Recall counts stand in the same file as the events, so an event is marked joined and counted in one transaction: a
kill at any instant leaves both done or neither.

Two connections write. `durable` syncs every commit (`synchronous=FULL`): feedback, before it is acknowledged. `lazy`
leaves syncing to checkpoints (`NORMAL`, which unlike `OFF` keeps what `durable` has promised): answers and joins,
of which a power cut may undo the last; a join undone is done again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longtail.serving.monitoring.arm_counts import ArmCounts, count_answers, forget_runs, read_arms
from longtail.serving.monitoring.database import connect, prepare, transaction
from longtail.serving.monitoring.feedback_counts import (
    COUNTERS,
    EVENTS_OF_ANSWERS,
    EVENTS_ORGANIC,
    SHADOW,
    add_recall,
    add_to_total,
)
from longtail.serving.monitoring.joining import give_up, join
from longtail.serving.monitoring.records import AnsweredBatch, AnswerFeedback, ArmAnswer, ShadowPair

_JOIN_FOR_SECONDS = 60
_FRESH_SECONDS = 2
_LOOK_BACK_EVERY_SECONDS = 5
KEPT_SECONDS = 48 * 3600
_CHUNK = 5000
_AT_A_TIME = 64
"""Answers made ready before other threads have their turn."""
_FORGOTTEN = "features_forgotten"
"""Among the totals: the last answer whose features are not kept any more."""
_GENERATIONS = 32


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
        arm: of an experiment, that it was given in.
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
    arm: ArmAnswer | None = None


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

    Every method raises sqlite3.Error if the file cannot be read or written: nothing was recorded then.

    A file that is no such database, or one of another version, is put aside as `NAME.aside`, and another is started
    empty.

    Args:
        path: the SQLite file; its directory is there.
        max_answers: answers kept; the oldest go first.
        max_feedback: labels of feedback kept that were settled; the oldest go first. As `max_answers` if not given.
        feedback_seconds: how long they are kept at most, and the features of answers too.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_answers: int,
        max_feedback: int | None = None,
        feedback_seconds: float = KEPT_SECONDS,
    ) -> None:
        self._max_answers = max_answers
        self._max_feedback = max_answers if max_feedback is None else max_feedback
        self._feedback_seconds = feedback_seconds
        prepare(path)
        self._durable, self._lazy, self._reader = (connect(path, mode) for mode in ("FULL", "NORMAL", "NORMAL"))
        self._durable_lock, self._lazy_lock = threading.Lock(), threading.Lock()
        self._reader_lock = threading.Lock()
        self._looked_back_at = 0.0

    def record_feedback(self, events: Sequence[AnswerFeedback], now: float) -> None:
        """Record feedback durably. What was recorded before, label by label, counts once.

        Args:
            events: feedback on answers.
            now: seconds since 1970.
        """
        rows = [
            [
                (
                    _key(event.named, event.query),
                    _as_utf8(label),
                    bucket,
                    now,
                    _as_utf8(event.event),
                    event.weight,
                    None if event.answer_id is None else _as_utf8(event.answer_id),
                    None if event.request_id is None else _as_utf8(event.request_id),
                    event.query,
                )
                for label, bucket in zip(event.labels, event.buckets, strict=True)
            ]
            for event in events
        ]

        with self._durable_lock, transaction(self._durable):
            fresh = 0
            for labels in rows:
                before = self._durable.total_changes
                self._durable.executemany(
                    "INSERT OR IGNORE INTO feedback (key, label, bucket, at, event, weight, answer_id, "
                    "request_id, query, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                    labels,
                )
                fresh += self._durable.total_changes > before
            add_to_total(self._durable, EVENTS_OF_ANSWERS, fresh)

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
        with self._durable_lock, transaction(self._durable):
            fresh = [place for place, event in enumerate(events) if self._is_new(event.idempotency_key, now)]
            self._durable.executemany(
                "INSERT OR IGNORE INTO feedback (key, label, bucket, at, event, weight, release, features, state) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 3)",
                [row for place in fresh for row in _organic_rows(events[place], release, now)],
            )
            add_to_total(self._durable, EVENTS_ORGANIC, len(fresh))
            counts = [(release, bucket, *pair) for place in fresh for bucket, pair in enumerate(pairs[place])]
            add_recall(self._durable, SHADOW, now, counts)

    def keep_answers(self, answers: Iterable[StoredAnswer], now: float) -> None:
        """Keep answers for events to be joined with, and let the oldest go.

        Args:
            answers: one for each query.
            now: seconds since 1970.
        """
        keep: list[tuple[object, ...]] = []
        arms: list[tuple[ArmAnswer | None, bytes]] = []
        for answer in answers:
            keep.append(
                (
                    _key(answer.answer_id, answer.query),
                    answer.release,
                    answer.labels,
                    answer.buckets,
                    answer.propensities,
                    answer.bias_removal,
                    answer.popularity,
                    answer.features,
                    None if answer.request_id is None else _key(answer.request_id, answer.query),
                    answer.request_id,
                )
            )
            arms.append((answer.arm, answer.buckets))
            if len(keep) % _AT_A_TIME == 0:
                # Lets other threads have the interpreter.
                time.sleep(0)
        size = max(self._max_answers // _GENERATIONS, 1)
        with self._lazy_lock, transaction(self._lazy):
            oldest, newest = self._lazy.execute(
                "SELECT ifnull((SELECT min(id) FROM answers), 0), ifnull((SELECT max(id) FROM answers), 0)"
            ).fetchone()
            places = count_answers(self._lazy, arms, now, most_units=self._max_answers)
            self._lazy.executemany(
                "INSERT INTO answers (id, generation, key, release, labels, buckets, propensities, bias_removal, "
                "popularity, features, request_key, request_id, at, arm, cluster) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (id_, id_ // size, *answer, now, *place)
                    for id_, (answer, place) in enumerate(zip(keep, places, strict=True), newest + 1)
                ],
            )
            upto = min(newest + len(keep) - self._max_answers, oldest + len(keep) + _CHUNK)
            self._lazy.execute("DELETE FROM answers WHERE id <= ?", (upto,))

    def join(self, now: float) -> None:
        """Count what pending feedback found: each event once, by one worker, in the minute of `now`.

        Fresh events are looked up at every call, older ones every five seconds: an answer may still be on its way
        from another worker. After a minute an event is left, and its request is counted as unmatched.
        """
        with self._lazy_lock:
            looking_back = abs(now - self._looked_back_at) >= _LOOK_BACK_EVERY_SECONDS
            since = 0.0 if looking_back else now - _FRESH_SECONDS
            pending = "SELECT EXISTS (SELECT 1 FROM feedback WHERE state = 0 AND at >= ?)"
            if self._lazy.execute(pending, (since,)).fetchone()[0]:
                join(self._lazy, now, since)
                if looking_back:
                    give_up(self._lazy, now - _JOIN_FOR_SECONDS)
            if looking_back:
                self._looked_back_at = now

    def tidy(self, now: float) -> bool:
        """Delete what is too old, or more than is kept: settled feedback, idempotency keys, units of old experiments
        and features of answers, some thousands of each at most, and recall counts.

        Returns:
            Whether there is more to delete; other writers have their turn first.
        """
        with self._lazy_lock, transaction(self._lazy):
            deleted = [
                self._lazy.execute(
                    f"DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT ?) AND {settled} "
                    f"AND (at < ? OR id <= (SELECT max(id) FROM {table}) - ?)",
                    (_CHUNK, now - self._feedback_seconds, self._max_feedback),
                ).rowcount
                for table, settled in (("feedback", "state > 0"), ("organic", "TRUE"))
            ]
            self._lazy.execute("DELETE FROM recall WHERE minute < ?", (int((now - KEPT_SECONDS) // 60),))
            deleted.append(forget_runs(self._lazy, _CHUNK))
            forgotten = self._forget_features(now - self._feedback_seconds)
        return _CHUNK in (*deleted, forgotten)

    def _is_new(self, idempotency_key: str | None, now: float) -> bool:
        """Whether nothing was recorded under this key; from now on something is."""
        if idempotency_key is None:
            return True
        kept = self._durable.execute(
            "INSERT OR IGNORE INTO organic (key, at) VALUES (?, ?)", (_hash(idempotency_key), now)
        )
        return kept.rowcount == 1

    def _forget_features(self, before: float) -> int:
        """Take the features from the oldest answers that have some, where they are from before a time; how many."""
        (last,) = self._lazy.execute(
            "SELECT max(ifnull((SELECT value FROM totals WHERE name = ?), 0), "
            "ifnull((SELECT min(id) - 1 FROM answers), 0))",
            (_FORGOTTEN,),
        ).fetchone()
        rows = self._lazy.execute("SELECT id, at FROM answers WHERE id > ? ORDER BY id LIMIT ?", (last, _CHUNK))
        upto = last
        for id_, at in rows:
            if at is not None and at >= before:
                break
            upto = id_
        if upto > last:
            self._lazy.execute(
                "UPDATE answers SET features = NULL WHERE id > ? AND id <= ? AND features IS NOT NULL", (last, upto)
            )
            self._lazy.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (_FORGOTTEN, upto))
        return int(upto - last)

    def recall(self, now: float) -> list[RecallRow]:
        """Counts of the last 24 hours, of all releases."""
        newest = int(now // 60)
        with self._reader_lock:
            found = self._reader.execute(
                "SELECT release, minute, source, bucket, positives, hits FROM recall WHERE minute > ? AND minute <= ?",
                (newest - 1440, newest),
            ).fetchall()
        return [RecallRow(*row) for row in found]

    def arms(self, run: str) -> dict[str, ArmCounts]:
        """What is known of the arms of an experiment's run."""
        with self._reader_lock:
            return read_arms(self._reader, run)

    def totals(self) -> dict[str, int]:
        """Counters since the file was made, by COUNTERS."""
        with self._reader_lock:
            found = dict(self._reader.execute("SELECT name, value FROM totals").fetchall())
        return {name: found.get(name, 0) for name in COUNTERS}

    def close(self) -> None:
        """Close the connections; waits for writes under way."""
        with self._durable_lock, self._lazy_lock, self._reader_lock:
            for connection in (self._durable, self._lazy, self._reader):
                connection.close()


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
            arm=None if batch.arms_B is None else batch.arms_B[place],
        )


def _organic_rows(event: ShadowPair, release: str, now: float) -> Iterator[tuple[object, ...]]:
    """What is kept of an organic interaction, label by label; nothing where there are no features."""
    if event.features is not None:
        key = secrets.randbits(63)
        for label, bucket in event.labels:
            yield key, _as_utf8(label), bucket, now, _as_utf8(event.event), event.weight, release, event.features


def _key(id_: str, query: int) -> int:
    """Of an answer's or a request's id and the place of a query in it."""
    return _hash(f"{query}:{id_}")


def _hash(text: str) -> int:
    """64 bits: among a million answers, a strange id finds one by chance once in 10^13."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little", signed=True)


def _as_utf8(label: str) -> str:
    """The id with `?` for what UTF-8 cannot hold."""
    return label.encode("utf-8", "replace").decode()
