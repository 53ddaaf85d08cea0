"""A ledger, kept outside of a service, of every write that it acknowledged; and those who write.

What was acknowledged must be there exactly once, whatever was killed since; of what was asked and not answered, all or
nothing. Writers share no label, and each has a connection of its own, which is one worker's.

Legend: `D` embedding dimensions.
"""

from __future__ import annotations

import random
import threading
import time
from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np
import onnxruntime as ort
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32
from longtail.serving.core import answer_ids
from longtail.serving.export import export

GENRES = 5
PRIOR = "recent"
_BUSY = (429, 503)
"""Statuses of a service that may have done what it was asked, and does not say so."""


class UnansweredError(Exception):
    """The service is gone, or too busy to say what it did."""


class AnsweredLabel(NamedTuple):
    """What an answer shows of a label: its title, vector v and prior, all of one upsert or of the release."""

    title: str
    vector_D: Float32
    recent: float

    def matches(self, other: AnsweredLabel | None) -> bool:
        """Whether both are of the same upsert."""
        return (
            other is not None
            and self.title == other.title
            and np.allclose(self.vector_D, other.vector_D, atol=1e-4)
            and abs(self.recent - other.recent) < 1e-3
        )


Labels = Mapping[str, AnsweredLabel | None]
"""By id; None: in no answer."""


def ask(client: httpx.Client, method: str, path: str, body: object = None) -> dict[str, Any]:
    """What the service answers; raises UnansweredError."""
    try:
        response = client.request(method, path, json=body)
    except httpx.TransportError as error:
        raise UnansweredError(path) from error
    if response.status_code in _BUSY:
        raise UnansweredError(path)
    assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text}"
    content: dict[str, Any] = response.json()
    return content


def answered_ids(client: httpx.Client, ids: list[str]) -> dict[str, AnsweredLabel]:
    """The labels of these that are in answers; raises UnansweredError."""
    query = {"features": {}, "k": len(ids), "allow": ids, "bias_removal": 0}
    queries = [query | {"priors": {PRIOR: weight}} for weight in (0, 1)]
    plain, weighed = ask(client, "POST", "/v1/retrieve", {"queries": queries, "preview": True})["results"]
    scores = {label["id"]: label["score"] for label in weighed["labels"]}
    labels_by_id = {label["id"]: label for label in plain["labels"]}
    vectors = ask(client, "POST", "/v1/embed", {"labels": list(labels_by_id)})["vectors"] if labels_by_id else []
    return {
        id_: AnsweredLabel(label["display"]["title"], np.array(vector_D, np.float32), scores[id_] - label["score"])
        for (id_, label), vector_D in zip(labels_by_id.items(), vectors, strict=True)
    }


class BuiltLabels:
    """What labels are as they were built, and what the label tower makes of features.

    Args:
        bundle: `tests.bundles.make_bundle` with a label tower.
        recent: every label's prior.
    """

    def __init__(self, bundle: Bundle, recent: list[float]) -> None:
        assert bundle.label_tower is not None
        self._session = ort.InferenceSession(bundle.label_tower)
        self._row_of = {id_: row for row, id_ in enumerate(bundle.labels.ids.to_pylist())}
        self.built = {
            id_: AnsweredLabel(f"Title {row}", bundle.embeddings[row], recent[row]) for id_, row in self._row_of.items()
        }

    def vector(self, id_: str, genre: int, year: float) -> Float32:
        """Of a label with one genre, float32 [D]; row 0 of each table is for what is unknown."""
        inputs = {
            "item_id": np.array([self._row_of.get(id_, -1) + 1], np.int32),
            "genres": np.array([[genre + 1]], np.int32),
            "genres__weight": np.array([[1]], np.float32),
            "year": np.array([year], np.float32),
        }
        return np.asarray(self._session.run(None, inputs)[0][0], np.float32)


@dataclass
class LabelWriter:
    """Changes labels that no other writer touches.

    Attributes:
        catalogue: what labels are built as.
        labels: its labels as acknowledged.
        asked: what the request under way makes of some of them.
        known: ids that a DELETE may name.
        back: what labels of the catalogue come back as when they are restored: as built, with what was patched.
        asked_back: likewise, of the request under way.
        acknowledged: labels changed, by what was asked.
        read: how often it read its labels while it wrote.
    """

    catalogue: BuiltLabels
    labels: Labels
    known_ids: set[str]
    pending: Labels = field(default_factory=dict)
    back: dict[str, AnsweredLabel] = field(default_factory=dict)
    pending_back: dict[str, AnsweredLabel] = field(default_factory=dict)
    acknowledged: Counter[str] = field(default_factory=Counter)
    read: int = 0

    @classmethod
    def create(cls, catalogue: BuiltLabels, built: list[str], new: list[str]) -> LabelWriter:
        """A writer of some labels of the catalogue, and of some that are none yet."""
        as_built = {id_: catalogue.built[id_] for id_ in built}
        return cls(catalogue, as_built | dict.fromkeys(new), set(built), back=as_built)

    def write(self, url: str, stop: threading.Event, rng: random.Random) -> None:
        """One change after the other until the service is gone or `stop` is set."""
        with httpx.Client(base_url=url, timeout=20) as client, suppress(UnansweredError):
            while not stop.is_set():
                kind, *request = self._change(rng)
                ask(client, *request)
                self.acknowledged[kind] += len(self.pending)
                gone = [id_ for id_, label in self.pending.items() if label is None]
                self._settle(new=True)
                if gone:
                    assert answered_ids(client, gone) == {}
                if rng.random() < 0.2:
                    self._compare(answered_ids(client, list(self.labels)), self.labels)
                    self.read += 1

    def check(self, client: httpx.Client) -> str:
        """What was acknowledged is answered; what was under way is there whole or not at all; which, if anything."""
        now = answered_ids(client, list(self.labels))
        if not self.pending:
            self._compare(now, self.labels)
            return ""
        after = {**self.labels, **self.pending}
        new = all(self._same(now.get(id_), label) for id_, label in after.items())
        if not new:
            self._compare(now, self.labels)
        self._settle(new=new)
        return "new" if new else "old"

    @staticmethod
    def _same(actual: AnsweredLabel | None, expected: AnsweredLabel | None) -> bool:
        return actual is None if expected is None else expected.matches(actual)

    def _compare(self, actual: Labels, expected: Labels) -> None:
        wrong = {id_: label for id_, label in expected.items() if not self._same(actual.get(id_), label)}
        assert not wrong, f"acknowledged {wrong}, under way {self.pending}, found {[actual.get(id_) for id_ in wrong]}"

    def _settle(self, *, new: bool) -> None:
        if new:
            self.labels, self.back = {**self.labels, **self.pending}, {**self.back, **self.pending_back}
        self.pending, self.pending_back = {}, {}
        self.known_ids |= {id_ for id_, label in self.labels.items() if label is not None}

    def _change(self, rng: random.Random) -> tuple[str, str, str, Any]:
        """A change's name and request."""
        built = [id_ for id_ in self.labels if id_ in self.catalogue.built]
        hidden = [id_ for id_ in built if self.labels[id_] is None]
        kind = rng.random()
        if kind < 0.15:
            id_ = rng.choice(sorted(self.known_ids))
            self.pending = {id_: None}
            return "deleted", "DELETE", f"/v1/labels/{id_}", None
        if kind < 0.3:
            ids = rng.sample(sorted(self.known_ids), rng.randint(1, 8))
            self.pending = dict.fromkeys(ids)
            return "deleted in bulk", "POST", "/v1/labels/delete", {"ids": ids}
        if kind < 0.55 and hidden:
            back = rng.sample(hidden, rng.randint(1, len(hidden)))
            self.pending = {id_: self.back[id_] for id_ in back}
            present_ids = [id_ for id_ in built if self.labels[id_] is not None]
            restored_ids = rng.sample(present_ids, min(3, len(present_ids)))
            self.pending = {**self.pending, **{id_: self.labels[id_] for id_ in restored_ids}}
            return "restored in bulk", "POST", "/v1/labels/restore", {"ids": back + restored_ids}
        present_ids = [id_ for id_, label in self.labels.items() if label is not None]
        if kind < 0.75 and present_ids:
            patches = [
                self._patch(id_, rng)
                for id_ in rng.sample(sorted(present_ids), rng.randint(1, min(20, len(present_ids))))
            ]
            if len(patches) == 1:
                return "patched", "PATCH", f"/v1/labels/{patches[0].pop('id')}", patches[0]
            return "patched in bulk", "PATCH", "/v1/labels", {"labels": patches}
        labels = [self._upsert(id_, rng) for id_ in rng.sample(sorted(self.labels), rng.randint(1, 20))]
        return "added or embedded anew", "POST", "/v1/labels", {"labels": labels}

    def _patch(self, id_: str, rng: random.Random) -> dict[str, Any]:
        before, title = self.labels[id_], f"{id_}, patched, {rng.random()}"
        assert before is not None
        self.pending = {**self.pending, id_: before._replace(title=title)}
        if id_ in self.back:
            self.pending_back = {**self.pending_back, id_: self.back[id_]._replace(title=title)}
        return {"id": id_, "display": {"title": title}}

    def _upsert(self, id_: str, rng: random.Random) -> dict[str, Any]:
        genre, year, recent = rng.randrange(GENRES), rng.uniform(-1, 1), rng.uniform(-3, 3)
        title = f"{id_}, {sum(self.acknowledged.values())} labels later, {rng.random()}"
        self.pending = {**self.pending, id_: AnsweredLabel(title, self.catalogue.vector(id_, genre, year), recent)}
        if id_ in self.catalogue.built:
            self.pending_back = {**self.pending_back, id_: self.catalogue.built[id_]}
        features = {"genres": [f"g{genre}"], "year": year}
        return {"id": id_, "features": features, "display": {"title": title}, "priors": {PRIOR: recent}}


class ChoiceKey(NamedTuple):
    """One label chosen, by the key of its event."""

    key: str
    label: str


class ChoiceRecord(NamedTuple):
    """What an export says of a choice: in which arm it was answered, its place, P(shown)."""

    arm: str | None
    position: int | None
    propensity: float


@dataclass
class Chooser:
    """Says what was chosen, of answers and without; what is not acknowledged it says again, maybe elsewhere.

    Attributes:
        name: leads its units, users and keys.
        labels: that it asks for; no writer changes them.
        choices: that were acknowledged, and what the export must say of them; None: of no answer.
        asked: likewise, of the request that is not acknowledged yet, and what it sends.
        events: acknowledged.
        elsewhere: requests that were acknowledged by another service than answered.
        sent: labels in all that it sent, whether or not that was answered.
    """

    name: str
    labels: list[str]
    choices: dict[ChoiceKey, ChoiceRecord | None] = field(default_factory=dict)
    pending: tuple[dict[ChoiceKey, ChoiceRecord | None], dict[str, Any]] | None = None
    events: int = 0
    elsewhere: int = 0
    sent: int = 0
    _units: int = 0

    def write(self, urls: Sequence[str], stop: threading.Event, rng: random.Random) -> None:
        """One post after the other until `stop` is set, to a service that did not answer where there are several."""
        with ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=url, timeout=20)) for url in urls]
            while not stop.is_set():
                answering, telling = rng.sample(clients, 2) if len(clients) > 1 else clients * 2
                try:
                    if self.pending is None:
                        self._units += 1
                        self.pending = self._of_answer(answering, rng) if rng.random() < 0.7 else self._organic(rng)
                    self.send(telling)
                    self.elsewhere += telling is not answering
                except UnansweredError:
                    stop.wait(0.02)

    def send(self, client: httpx.Client) -> None:
        """Have acknowledged what is not yet; raises UnansweredError."""
        if self.pending is not None:
            choices, body = self.pending
            self.sent += len(choices)
            ask(client, "POST", "/v1/feedback", body)
            self.choices |= choices
            self.events += len(body["events"])
            self.pending = None

    def _of_answer(
        self, client: httpx.Client, rng: random.Random
    ) -> tuple[dict[ChoiceKey, ChoiceRecord | None], dict[str, Any]]:
        query = {"features": {"user_id": f"u{rng.randrange(20)}"}, "k": 5, "allow": self.labels}
        query["explore"] = {"tail": rng.randrange(1, 3)}
        pending = {"queries": [query] * rng.randint(1, 3), "unit": f"{self.name}-{self._units}"}
        choices: dict[ChoiceKey, ChoiceRecord | None] = {}
        events = []
        for i, result in enumerate(ask(client, "POST", "/v1/retrieve", pending)["results"]):
            answered_ids = [label["id"] for label in result["labels"]]
            at, other = choose_unique(result["answer_id"], answered_ids, self.labels, rng)
            key, arm = f"{self.name}-{self._units}-{i}", result.get("arm")
            choices[ChoiceKey(key, answered_ids[at])] = ChoiceRecord(arm, at, result["labels"][at]["propensity"])
            choices[ChoiceKey(key, other)] = ChoiceRecord(arm, None, 1)
            event = {"answer_id": result["answer_id"], "labels": [answered_ids[at], other], "idempotency_key": key}
            events.append(event | {"event": rng.choice(["click", "purchase"])})
        return choices, {"events": events}

    def _organic(self, rng: random.Random) -> tuple[dict[ChoiceKey, ChoiceRecord | None], dict[str, Any]]:
        keys = [f"{self.name}-{self._units}-{i}" for i in range(rng.randint(1, 3))]
        events = [
            {"features": {"user_id": key}, "labels": rng.sample(self.labels, 2), "idempotency_key": key} for key in keys
        ]
        return {ChoiceKey(event["idempotency_key"], label): None for event in events for label in event["labels"]}, {
            "events": events
        }


def choose_unique(
    answer_id: str, answered_ids: Sequence[str], labels: Sequence[str], rng: random.Random
) -> tuple[int, str]:
    """Choose a place of an answer and a label that was not answered, which no other label of the answer passes for."""
    head = urlsafe_b64decode(answer_id + "=" * (-len(answer_id) % 4))
    code_of = dict(zip(labels, answer_ids._codes(labels, answer_ids._HEAD.unpack_from(head)[3]), strict=True))
    times = Counter(code_of[id_] for id_ in answered_ids)
    at = rng.choice([i for i, id_ in enumerate(answered_ids) if times[code_of[id_]] == 1])
    return at, rng.choice([id_ for id_ in labels if code_of[id_] not in times])


def check_export(releases: str | Path, events: Path, choosers: Sequence[Chooser], *, under_way: bool = False) -> int:
    """Every acknowledged choice is exported once and as it was answered, and no other; how many.

    Args:
        releases: of the services.
        events: their folder.
        choosers: who chose.
        under_way: what was not acknowledged may be there, too.
    """
    out = events.with_name("exported.parquet")
    export(releases, events, out, window=(0, time.time() + 1), everything=True)
    rows = pq.read_table(out).to_pylist()
    times = Counter(ChoiceKey(row["idempotency_key"], row["label_id"]) for row in rows)
    assert set(times.values()) <= {1}
    expected = {choice: record for chooser in choosers for choice, record in chooser.choices.items()}
    pending = {
        choice: record for chooser in choosers if chooser.pending for choice, record in chooser.pending[0].items()
    }
    assert expected.keys() - times.keys() == set(), "acknowledged and lost"
    assert times.keys() - expected.keys() - (pending.keys() if under_way else set()) == set(), "never acknowledged"
    for row in rows:
        record = (expected | pending)[ChoiceKey(row["idempotency_key"], row["label_id"])]
        assert row["source"] == ("organic" if record is None else "answer")
        if record is not None:
            assert (row["arm"], row["position"]) == (record.arm, record.position), row
            assert row["propensity"] == pytest.approx(record.propensity, rel=1e-3)
    return len(rows)
