"""kill -9 at random moments of building, publishing, changing labels and taking feedback: the old state or the new."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from longtail.bundle import Bundle
from longtail.index import Releases, build, cli
from longtail.serving.settings import Settings
from tests.bundles import label_features, make_bundle
from tests.end_to_end.killing import KILLS, Killable, kill, moments, seconds_of, serving, start
from tests.serving.process import free_port

LABELS, WRITERS, OWN = 60, 2, 20
QUERY = {"features": {"user_id": "u3", "history": ["item-1", "item-2"]}, "k": 5, "bias_removal": 0.25}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(labels=LABELS, label_tower=True).write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def releases(bundle: Path) -> Releases:
    """Releases `a` and `b`, of which `a` is published."""
    root = bundle.parent / "releases"
    for name in ("a", "b"):
        build(bundle, root, name=name)
    Releases(root).publish("a")
    return Releases(root)


def test_a_killed_build_leaves_no_release_or_a_whole_one(bundle: Path, tmp_path: Path) -> None:
    releases = Releases(tmp_path / "releases")
    arguments = ["build", str(bundle), "--releases", str(releases.root), "--name"]
    span = sorted(seconds_of(cli.main, [*arguments, f"whole-{turn}"]) for turn in range(3))[1]
    found: Counter[str] = Counter()
    for turn, moment in enumerate(moments(random.Random(1))):
        building = start(cli.main, [*arguments, "new"])
        # Every other kill is aimed at the writing, a fifth of the time or so.
        if turn % 2:
            killed = kill(building, moment * span / 5, seen=lambda: list(releases.root.glob(".new.*.tmp/*")))
        else:
            killed = kill(building, moment * span)
        left = list(releases.root.glob(".new.*.tmp"))
        if "new" in releases.names():
            assert releases.verify("new").searcher.labels == LABELS
            found["whole" if killed else "ended by itself"] += 1
            shutil.rmtree(releases.root / "new")
        else:
            assert killed
            found["absent, being written" if left else "absent"] += 1
        assert len(left) <= 1
        if found.total() - found["ended by itself"] == KILLS:
            break
    print(f"\nbuild: {KILLS} kills in {span * 1e3:.0f} ms each: {dict(found)}")
    build(bundle, releases.root, name="new")
    assert releases.verify("new").searcher.labels == LABELS
    assert not list(releases.root.glob(".*.tmp"))
    Bundle.load(bundle)


def test_a_killed_publish_or_rollback_leaves_the_old_pointer_or_the_new(releases: Releases) -> None:
    rng, found = random.Random(2), Counter[str]()
    root = str(releases.root)
    span = sorted(seconds_of(cli.main, ["publish", root, name]) for name in ("b", "a", "b", "a"))[2]
    published = history(releases)
    for turn, moment in enumerate(moments(rng)):
        if len(published) > 2 and rng.random() < 0.4:
            command, after = ["rollback", root], published[:-1]
        else:
            name = "b" if published[-1] == "a" else "a"
            command, after = ["publish", root, name], [*published, name]
        if turn % 2:
            killed = kill(start(cli.main, command), moment * span / 20, seen=lambda: being_replaced(releases))
        else:
            killed = kill(start(cli.main, command), moment * span)
        now = history(releases)
        assert now in (published, after)
        assert killed or now == after
        written = (releases.root / "HISTORY").read_text().split()
        half = " (HISTORY ahead of CURRENT)" if written != now else ""
        found[("new" if now == after else "old") + half if killed else "ended by itself"] += 1
        published = now
        assert releases.verify(now[-1]).name == now[-1]
        if found.total() - found["ended by itself"] == KILLS:
            break
    print(f"\npublish and rollback: {KILLS} kills in {span * 1e3:.0f} ms each: {dict(found)}")
    releases.prune(keep=2)
    kept = {path.name for path in releases.root.iterdir()}
    assert kept - {"FORCED"} == {".lock", "CURRENT", "HISTORY", "a", "b"}, "FORCED where a rollback was the last word"


def being_replaced(releases: Releases) -> list[Path]:
    return [path for name in ("HISTORY", "CURRENT") for path in releases.root.glob(f".{name}.*.tmp")]


def history(releases: Releases) -> list[str]:
    """The names published up to CURRENT's last place in HISTORY, which is all of it that counts."""
    names, current = (releases.root / "HISTORY").read_text().split(), releases.current()
    while names[-1] != current:
        names.pop()
    return names


@dataclass
class Writer:
    """Changes labels that no other writer touches, and knows what the service has acknowledged of it.

    Attributes:
        titles: of its labels as acknowledged; None: not to be answered.
        asked: what the request under way makes of some of them.
    """

    number: int
    titles: dict[str, str | None]
    original: dict[str, str]
    asked: dict[str, str | None] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    acknowledged: int = 0

    @classmethod
    def of(cls, number: int) -> Writer:
        catalogue = {f"item-{row}": f"Title {row}" for row in range(number, LABELS, WRITERS)}
        new = dict.fromkeys(f"new-{number}-{place}" for place in range(OWN))
        return cls(number, {**catalogue, **new}, catalogue, known=set(catalogue))

    def write(self, url: str, rng: random.Random) -> None:
        """One change after the other until the service is gone."""
        with httpx.Client(base_url=url) as client:
            while True:
                method, path, body = self._change(rng)
                try:
                    response = client.request(method, path, json=body)
                except httpx.TransportError:
                    return
                assert response.status_code == 200, response.text
                self._settle(self.titles | self.asked)
                self.acknowledged += 1

    def check(self, shown: dict[str, str]) -> str:
        """What was acknowledged is answered; what was under way is there whole or not at all."""
        now = {id_: shown.get(id_) for id_ in self.titles}
        assert now in (self.titles, self.titles | self.asked)
        state = "" if not self.asked else "old" if now == self.titles else "new"
        self._settle(now)
        return state

    def _settle(self, titles: dict[str, str | None]) -> None:
        self.titles, self.asked = titles, {}
        self.known |= {id_ for id_, title in titles.items() if title is not None}

    def _change(self, rng: random.Random) -> tuple[str, str, Any]:
        hidden = [id_ for id_ in self.original if self.titles[id_] is None]
        kind = rng.random()
        if kind < 0.3:
            id_ = rng.choice(sorted(self.known))
            self.asked = {id_: None}
            return "DELETE", f"/v1/labels/{id_}", None
        if kind < 0.5 and hidden:
            back = rng.sample(hidden, rng.randint(1, len(hidden)))
            self.asked = {id_: self.original[id_] for id_ in back}
            return "POST", "/v1/labels", {"labels": [{"id": id_} for id_ in back]}
        ids = rng.sample(sorted(self.titles), rng.randint(1, 30))
        self.asked = {id_: f"{id_} in change {self.acknowledged} of {rng.random()}" for id_ in ids}
        labels = [
            {"id": id_, "features": label_features(rng.randrange(9)), "display": {"title": title}}
            for id_, title in self.asked.items()
        ]
        return "POST", "/v1/labels", {"labels": labels}


def titles_of(response: httpx.Response) -> dict[str, str]:
    assert response.status_code == 200, response.text
    labels = [label for result in response.json()["results"] for label in result["labels"]]
    return {label["id"]: label["display"]["title"] for label in labels}


def test_killed_while_labels_change_no_acknowledged_change_is_lost(releases: Releases) -> None:
    writers = [Writer.of(number) for number in range(WRITERS)]
    rng, found, log = random.Random(3), Counter[str](), releases.root / ".state" / "labels.log"

    def check(server: Killable) -> None:
        shown = titles_of(server.first_answer("POST", "/v1/retrieve", json=everything))
        found.update(f"change under way: {state}" for writer in writers if (state := writer.check(shown)))
        for _ in range(2):
            assert titles_of(server.first_answer("POST", "/v1/retrieve", json=everything)) == shown
        logs.update([log.read_bytes()[:50]] if log.exists() else [])

    everything = {"queries": [{"features": {}, "k": LABELS, "allow": list(writer.titles)} for writer in writers]}
    logs: set[bytes] = set()
    kill_again_and_again(releases, rng, found, check, [writer.write for writer in writers])
    acknowledged = sum(writer.acknowledged for writer in writers)
    print(f"\nlabels: {KILLS} kills, {acknowledged} changes acknowledged, none lost: {dict(found)}, {len(logs)} log(s)")
    assert acknowledged > KILLS


@dataclass
class Reader:
    """Says what it chose, and knows what the service has acknowledged of it.

    Attributes:
        chooses: makes events.
        acknowledged: how many events.
        asked: those of the request under way.
        last: those taken last.
    """

    chooses: Callable[[httpx.Client, random.Random], list[dict[str, Any]]]
    acknowledged: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)

    def read(self, url: str, rng: random.Random) -> None:
        """One request after the other until the service is gone."""
        with httpx.Client(base_url=url) as client, suppress(httpx.TransportError):
            while True:
                events = self.chooses(client, rng)
                self.asked = events
                response = client.post("/v1/feedback", json={"events": events})
                assert response.status_code == 200, response.text
                self.acknowledged, self.asked, self.last = self.acknowledged + len(events), [], events

    def check(self, counted: int) -> str:
        """What was acknowledged is counted once; what was under way as well or not at all."""
        assert counted in (self.acknowledged, self.acknowledged + len(self.asked))
        return "nothing" if not self.asked else "old" if counted == self.acknowledged else "new"


def answered(client: httpx.Client, rng: random.Random) -> list[dict[str, Any]]:
    """After answers given just now: of each the best label, and one that is not in it."""
    body = {"queries": [QUERY] * rng.randint(1, 3)}
    answer = client.post("/v1/retrieve", json=body).json()
    events = []
    for place, result in enumerate(answer["results"]):
        ids = [label["id"] for label in result["labels"]]
        other = next(id_ for row in range(LABELS) if (id_ := f"item-{row}") not in ids)
        events.append({"answer_id": answer["answer_id"], "query": place, "labels": [ids[0], other]})
    return events


def organic(_: httpx.Client, rng: random.Random) -> list[dict[str, Any]]:
    """Without an answer, each under a key of its own."""
    return [
        {
            "features": QUERY["features"],
            "labels": [f"item-{rng.randrange(LABELS)}"],
            "idempotency_key": f"{rng.getrandbits(64):x}",
        }
        for _ in range(rng.randint(1, 3))
    ]


def test_killed_while_feedback_comes_every_acknowledged_event_counts_once(releases: Releases) -> None:
    after_answers, on_their_own = Reader(answered), Reader(organic)
    rng, found = random.Random(4), Counter[str]()

    def check(server: Killable) -> None:
        metrics = server.first_answer("GET", "/metrics").text
        for reader, kind in ((after_answers, "answer"), (on_their_own, "organic")):
            counted = int(float(metrics.split(f'longtail_feedback_events_total{{kind="{kind}"}} ')[1].split("\n")[0]))
            if (state := reader.check(counted)) != "nothing":
                found[f"{kind} events under way: {state}"] += 1
            if counted > reader.acknowledged:
                reader.last = reader.asked
            reader.acknowledged, reader.asked = counted, []
        # As a client does that lost the answer to its request: what was taken must not count again.
        if again := after_answers.last + on_their_own.last:
            assert server.client.post("/v1/feedback", json={"events": again}).json()["accepted"] == len(again)
        expected = {
            "feedback": (2 * after_answers.acknowledged, after_answers.acknowledged),
            "shadow": on_their_own.acknowledged,
        }
        assert settled(server, expected) == expected

    kill_again_and_again(releases, rng, found, check, [after_answers.read, on_their_own.read])
    acknowledged = after_answers.acknowledged + on_their_own.acknowledged
    print(f"\nfeedback: {KILLS} kills, {acknowledged} events acknowledged, each counted once: {dict(found)}")
    assert acknowledged > KILLS


def settled(server: Killable, expected: dict[str, Any]) -> dict[str, Any]:
    """What GET /v1/monitoring counts once it counts what is expected, or after 10 s."""
    deadline = time.monotonic() + 10
    while True:
        recall = server.first_answer("GET", "/v1/monitoring").json()["windows"]["24h"]["recall"]
        feedback, shadow = recall["feedback"]["all"], recall["shadow"]["all"]
        found = {"feedback": (feedback["positives"], feedback["hits"]), "shadow": shadow["positives"]}
        if found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def kill_again_and_again(
    releases: Releases,
    rng: random.Random,
    found: Counter[str],
    check: Callable[[Killable], None],
    loads: list[Callable[[str, random.Random], None]],
) -> None:
    """Start, check, load and kill a server; every sixth time it is killed while it starts. In the end, check."""
    span = 0.3
    times = moments(rng)
    for kills in range(KILLS + 1):
        with serving(Settings(releases=releases.root, port=free_port(), poll_seconds=0.05)) as server:
            if kills % 6 == 5 and kills < KILLS:
                assert kill(server.process, next(times) * span)
                found["killed while starting"] += 1
                continue
            began = time.perf_counter()
            server.first_answer("GET", "/readyz")
            span = time.perf_counter() - began
            check(server)
            if kills == KILLS:
                return
            with ThreadPoolExecutor(len(loads)) as pool:
                url = str(server.client.base_url)
                loading = [pool.submit(load, url, random.Random(rng.random())) for load in loads]
                assert kill(server.process, 0.02 + 0.5 * next(times))
                found["killed under load"] += 1
            for load in loading:
                load.result()
