"""A ledger, kept outside of a service, of every write that it acknowledged; and those who write.

What was acknowledged must be there exactly once, whatever was killed since; of what was asked and not answered, all or
nothing. Writers share no label, and each has a connection of its own, which is one worker's.

Legend: `D` embedding dimensions.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2 as httpx
import numpy as np
import onnxruntime as ort

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32

GENRES = 5
PRIOR = "recent"
_BUSY = (429, 503)
"""Statuses of a service that may have done what it was asked, and does not say so."""


class UnansweredError(Exception):
    """The service is gone, or too busy to say what it did."""


class Shown(NamedTuple):
    """What an answer shows of a label: its title, vector v and prior, all of one upsert or of the release."""

    title: str
    vector_D: Float32
    recent: float

    def matches(self, other: Shown | None) -> bool:
        """Whether both are of the same upsert."""
        return (
            other is not None
            and self.title == other.title
            and np.allclose(self.vector_D, other.vector_D, atol=1e-4)
            and abs(self.recent - other.recent) < 1e-3
        )


Labels = Mapping[str, Shown | None]
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
    found: dict[str, Any] = response.json()
    return found


def shown(client: httpx.Client, ids: list[str]) -> dict[str, Shown]:
    """The labels of these that are in answers; raises UnansweredError."""
    query = {"features": {}, "k": len(ids), "allow": ids, "bias_removal": 0}
    queries = [query | {"priors": {PRIOR: weight}} for weight in (0, 1)]
    plain, weighed = ask(client, "POST", "/v1/retrieve", {"queries": queries, "preview": True})["results"]
    scores = {label["id"]: label["score"] for label in weighed["labels"]}
    found = {label["id"]: label for label in plain["labels"]}
    vectors = ask(client, "POST", "/v1/embed", {"labels": list(found)})["vectors"] if found else []
    return {
        id_: Shown(label["display"]["title"], np.array(vector_D, np.float32), scores[id_] - label["score"])
        for (id_, label), vector_D in zip(found.items(), vectors, strict=True)
    }


class Catalogue:
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
            id_: Shown(f"Title {row}", bundle.embeddings[row], recent[row]) for id_, row in self._row_of.items()
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
        acknowledged: labels changed, by what was asked.
        read: how often it read its labels while it wrote.
    """

    catalogue: Catalogue
    labels: Labels
    known: set[str]
    asked: Labels = field(default_factory=dict)
    acknowledged: Counter[str] = field(default_factory=Counter)
    read: int = 0

    @classmethod
    def of(cls, catalogue: Catalogue, built: list[str], new: list[str]) -> LabelWriter:
        """A writer of some labels of the catalogue, and of some that are none yet."""
        return cls(catalogue, {id_: catalogue.built[id_] for id_ in built} | dict.fromkeys(new), set(built))

    def write(self, url: str, stop: threading.Event, rng: random.Random) -> None:
        """One change after the other until the service is gone or `stop` is set."""
        with httpx.Client(base_url=url, timeout=20) as client, suppress(UnansweredError):
            while not stop.is_set():
                kind, *request = self._change(rng)
                ask(client, *request)
                self.acknowledged[kind] += len(self.asked)
                gone = [id_ for id_, label in self.asked.items() if label is None]
                self._settle({**self.labels, **self.asked})
                if gone:
                    assert shown(client, gone) == {}
                if rng.random() < 0.2:
                    self._compare(shown(client, list(self.labels)), self.labels)
                    self.read += 1

    def check(self, client: httpx.Client) -> str:
        """What was acknowledged is answered; what was under way is there whole or not at all; which, if anything."""
        now = shown(client, list(self.labels))
        if not self.asked:
            self._compare(now, self.labels)
            return ""
        after = {**self.labels, **self.asked}
        new = all(self._same(now.get(id_), label) for id_, label in after.items())
        if not new:
            self._compare(now, self.labels)
        self._settle(after if new else self.labels)
        return "new" if new else "old"

    @staticmethod
    def _same(found: Shown | None, expected: Shown | None) -> bool:
        return found is None if expected is None else expected.matches(found)

    def _compare(self, found: Labels, expected: Labels) -> None:
        wrong = {id_: label for id_, label in expected.items() if not self._same(found.get(id_), label)}
        assert not wrong, f"acknowledged {wrong}, under way {self.asked}, found {[found.get(id_) for id_ in wrong]}"

    def _settle(self, labels: Labels) -> None:
        self.labels, self.asked = labels, {}
        self.known |= {id_ for id_, label in labels.items() if label is not None}

    def _change(self, rng: random.Random) -> tuple[str, str, str, Any]:
        """A change's name and request."""
        built = [id_ for id_ in self.labels if id_ in self.catalogue.built]
        hidden = [id_ for id_ in built if self.labels[id_] is None]
        kind = rng.random()
        if kind < 0.15:
            id_ = rng.choice(sorted(self.known))
            self.asked = {id_: None}
            return "deleted", "DELETE", f"/v1/labels/{id_}", None
        if kind < 0.3:
            ids = rng.sample(sorted(self.known), rng.randint(1, 8))
            self.asked = dict.fromkeys(ids)
            return "deleted in bulk", "POST", "/v1/labels/delete", {"ids": ids}
        if kind < 0.55 and hidden:
            back = rng.sample(hidden, rng.randint(1, len(hidden)))
            self.asked = {id_: self.catalogue.built[id_] for id_ in back}
            if kind < 0.42:
                return "restored", "POST", "/v1/labels", {"labels": [{"id": id_} for id_ in back]}
            there = [id_ for id_ in built if self.labels[id_] is not None]
            kept = rng.sample(there, min(3, len(there)))
            self.asked = {**self.asked, **{id_: self.labels[id_] for id_ in kept}}
            return "restored in bulk", "POST", "/v1/labels/restore", {"ids": back + kept}
        labels = [self._upsert(id_, rng) for id_ in rng.sample(sorted(self.labels), rng.randint(1, 20))]
        return "added or embedded anew", "POST", "/v1/labels", {"labels": labels}

    def _upsert(self, id_: str, rng: random.Random) -> dict[str, Any]:
        genre, year, recent = rng.randrange(GENRES), rng.uniform(-1, 1), rng.uniform(-3, 3)
        title = f"{id_}, {sum(self.acknowledged.values())} labels later, {rng.random()}"
        self.asked = {**self.asked, id_: Shown(title, self.catalogue.vector(id_, genre, year), recent)}
        features = {"genres": [f"g{genre}"], "year": year}
        return {"id": id_, "features": features, "display": {"title": title}, "priors": {PRIOR: recent}}


class Choice(NamedTuple):
    """One label chosen: of an answer, or, where `answer_id` is None, of what `query` names."""

    answer_id: str | None
    query: int | str
    label: str
    event: str


@dataclass
class Chooser:
    """Says what was chosen: of answers in an experiment, and without answers, under keys.

    Attributes:
        name: leads its units, users and keys.
        labels: that it asks for; no writer changes them.
        positions: of every acknowledged choice, where its answer had it; None: it had not.
        arms: of every answer with an acknowledged choice.
        answers: given while it looked, by arm.
        asked: choices of the request under way and their positions, what it sent, and the arm of its answer.
        uncertain: choices that were acknowledged the second time: their answer may be gone.
        last: bodies that were taken, to be sent again.
    """

    name: str
    labels: list[str]
    positions: dict[Choice, int | None] = field(default_factory=dict)
    arms: dict[str, str] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)
    asked: tuple[dict[Choice, int | None], dict[str, Any], str | None] | None = None
    uncertain: set[Choice] = field(default_factory=set)
    last: list[dict[str, Any]] = field(default_factory=list)
    events: int = 0
    units: int = 0

    def write(self, url: str, stop: threading.Event, rng: random.Random) -> None:
        """One post after the other until the service is gone or `stop` is set."""
        with httpx.Client(base_url=url, timeout=20) as client, suppress(UnansweredError):
            while not stop.is_set():
                self.units += 1
                self.asked = self._of_answer(client, rng) if rng.random() < 0.7 else self._organic(rng)
                ask(client, "POST", "/v1/feedback", self.asked[1])
                self._take()

    def check(self, client: httpx.Client, rows: Counter[Choice]) -> str:
        """Every acknowledged choice is in the file once; of the request under way all or none, and now all."""
        assert {choice: rows[choice] for choice in self.positions if rows[choice] != 1} == {}
        state = ""
        if self.asked is not None:
            choices, body, _ = self.asked
            found = {rows[choice] for choice in choices}
            assert found in ({0}, {1}), (choices, found)
            state = "new" if found == {1} else "old"
            # As a client does that had no answer.
            ask(client, "POST", "/v1/feedback", body)
            self.uncertain |= choices.keys()
            self._take()
        # As one does that lost it: what was taken does not count again.
        for body in self.last:
            ask(client, "POST", "/v1/feedback", body)
        assert self.mine(rows) <= self.positions.keys()
        return state

    def mine(self, rows: Counter[Choice]) -> set[Choice]:
        """Those of the choices that are this chooser's."""
        answers = {choice.answer_id for choice in self.positions} - {None}
        return {
            choice
            for choice in rows
            if choice.answer_id in answers or (choice.answer_id is None and str(choice.query).startswith(self.name))
        }

    def _take(self) -> None:
        assert self.asked is not None
        choices, body, arm = self.asked
        self.positions |= choices
        if arm is not None:
            self.arms[body["events"][0]["answer_id"]] = arm
        self.events += len(body["events"])
        self.asked, self.last = None, [*self.last[-1:], body]

    def _of_answer(
        self, client: httpx.Client, rng: random.Random
    ) -> tuple[dict[Choice, int | None], dict[str, Any], str | None]:
        query = {"features": {"user_id": f"u{rng.randrange(20)}"}, "k": 5, "allow": self.labels}
        asked = {"queries": [query] * rng.randint(1, 3), "unit": f"{self.name}-{self.units}"}
        answer = ask(client, "POST", "/v1/retrieve", asked)
        arm = answer["results"][0]["arm"]
        self.answers[arm] += len(answer["results"])
        choices: dict[Choice, int | None] = {}
        events = []
        for place, result in enumerate(answer["results"]):
            ids = [label["id"] for label in result["labels"]]
            at, other = rng.randrange(len(ids)), rng.choice([id_ for id_ in self.labels if id_ not in ids])
            event = rng.choice(["click", "purchase"])
            choices |= {
                Choice(answer["answer_id"], place, ids[at], event): at,
                Choice(answer["answer_id"], place, other, event): None,
            }
            events.append(
                {"answer_id": answer["answer_id"], "query": place, "labels": [ids[at], other], "event": event}
            )
        return choices, {"events": events}, arm

    def _organic(self, rng: random.Random) -> tuple[dict[Choice, int | None], dict[str, Any], None]:
        choices: dict[Choice, int | None] = {}
        events = []
        for place in range(rng.randint(1, 3)):
            user, labels = f"{self.name}-{self.units}-{place}", rng.sample(self.labels, 2)
            choices |= {Choice(None, user, label, "click"): None for label in labels}
            events.append({"features": {"user_id": user}, "labels": labels, "idempotency_key": user})
        return choices, {"events": events}, None
