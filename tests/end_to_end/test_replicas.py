"""Replicas that share a database and releases in an object store: what one acknowledges all answer by within a second,
and choices are exported once, whichever answered and whichever took them, through kill -9 of any and of the database.

`LONGTAIL_OPERATIONS=200 pytest tests/end_to_end/test_replicas.py -s` makes two hundred operations and prints how long
replicas took to agree; `LONGTAIL_SECONDS=600` chooses for ten minutes and prints the ledger.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from longtail.bundle import Hide
from longtail.index import IndexSpec, build, merge_labels, open_releases
from longtail.serving.settings import Settings
from longtail.state import LabelStore, parse_location, read_label_changes
from tests.bundles import label_features, make_bundle
from tests.end_to_end.commands import longtail
from tests.end_to_end.killing import KilledService, serving
from tests.end_to_end.ledger import Chooser, check_export
from tests.postgres import PostgresServer, postgres
from tests.s3 import S3Server
from tests.serving.process import until

LABELS, REPLICAS = 40, 3
OPERATIONS = int(os.environ.get("LONGTAIL_OPERATIONS", "40"))
SECONDS = float(os.environ.get("LONGTAIL_SECONDS", "15"))
CHOOSERS = 4
QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": LABELS}


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    """To be killed by these tests."""
    with postgres() as server:
        yield server


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replicas") / "bundle"
    make_bundle(labels=LABELS, label_tower=True).write(path)
    return path


def kept_port() -> int:
    """A port that nothing takes while its service restarts: outgoing connections have ports above."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


@dataclass
class Replicas:
    """Services that share a database and releases; each has a directory of its own."""

    releases: str
    database: str
    folder: Path
    environment: Mapping[str, str]
    workers: int = 1
    ports: list[int] = field(default_factory=lambda: [kept_port() for _ in range(REPLICAS)])
    services: dict[int, KilledService] = field(default_factory=dict)
    clients: dict[int, httpx.Client] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, number: int, *, ready: bool = True) -> KilledService:
        settings = Settings(
            releases=self.releases,
            database_url=self.database,
            state=self.folder / f"replica-{number}",
            port=self.ports[number],
            workers=self.workers,
            poll_seconds=0.05,
            drain_seconds=0,
        )
        log = self.folder / f"replica-{number}.log"
        environment = {**self.environment, "LONGTAIL_CACHE": str(self.folder / f"cache-{number}")}
        service = self.stack.enter_context(serving(settings, log, environment))
        self.services[number] = service
        self.clients[number] = self.stack.enter_context(httpx.Client(base_url=service.url, timeout=30))
        if ready:
            service.wait_until_ready()
        return service

    def kill(self, number: int) -> None:
        self.services.pop(number).kill()

    def request(self, number: int, method: str, path: str, **content: Any) -> httpx.Response:
        return self.clients[number].request(method, path, **content)

    def titles(self, number: int, ids: Iterable[str]) -> dict[str, str]:
        """The titles that a replica shows of some labels."""
        return {id_: self.request(number, "GET", f"/v1/labels/{id_}").json()["display"]["title"] for id_ in ids}

    def answered(self, number: int) -> set[str]:
        """Every label that a replica answers: it gives at most as many at once as the release has."""
        answered_ids: set[str] = set()
        while True:
            query = QUERY | {"exclude": sorted(answered_ids)}
            response = self.request(number, "POST", "/v1/retrieve", json={"queries": [query]})
            assert response.status_code == 200, response.text
            labels = {label["id"] for label in response.json()["results"][0]["labels"]}
            answered_ids |= labels
            if len(labels) < LABELS:
                return answered_ids


@pytest.fixture(params=[1])
def replicas(
    request: pytest.FixtureRequest, bundle: Path, s3: S3Server, database: PostgresServer, tmp_path: Path
) -> Iterator[Replicas]:
    """Three of so many workers each."""
    releases = s3.url()
    for name in ("a", "b"):
        build(bundle, releases, spec=IndexSpec("flat"), name=name)
    open_releases(releases).publish("a")
    replicas = Replicas(releases, database.url(), tmp_path, s3.environment, request.param)
    with replicas.stack:
        for number in range(REPLICAS):
            replicas.start(number)
        yield replicas


def test_replicas_agree_despite_kills(replicas: Replicas, database: PostgresServer) -> None:
    rng = random.Random(5)
    expected = {f"item-{row}" for row in range(LABELS)}
    titles: dict[str, str] = {}
    took: list[tuple[float, str]] = []
    done: Counter[str] = Counter()
    shelf = open_releases(replicas.releases)
    for count in range(OPERATIONS):
        numbers = sorted(replicas.services)
        by = rng.choice(numbers)
        kind = rng.choices(
            ["upsert", "hide", "restore", "patch", "publish", "rollback", "kill a replica", "kill the database"],
            [6, 6, 4, 4, 1, 1, 1, 1],
        )[0]
        if kind == "upsert":
            label = {"id": f"new-{count}", "features": label_features(count % 5)}
            assert replicas.request(by, "POST", "/v1/labels", json={"labels": [label]}).status_code == 200
            expected.add(label["id"])
        elif kind == "hide":
            id_ = rng.choice(sorted(expected))
            assert replicas.request(by, "DELETE", f"/v1/labels/{id_}").status_code == 200
            expected.remove(id_)
        elif kind == "restore":
            hidden = [f"item-{row}" for row in range(LABELS) if f"item-{row}" not in expected]
            if not hidden:
                continue
            id_ = rng.choice(hidden)
            assert replicas.request(by, "POST", "/v1/labels/restore", json={"ids": [id_]}).status_code == 200
            expected.add(id_)
        elif kind == "patch":
            id_ = rng.choice(sorted(expected))
            titles[id_] = f"patched {count}"
            patch = {"display": {"title": titles[id_]}}
            assert replicas.request(by, "PATCH", f"/v1/labels/{id_}", json=patch).status_code == 200
        elif kind == "publish":
            shelf.publish("b" if shelf.current() == "a" else "a", force=True)
        elif kind == "rollback":
            if shelf.current() == "a":
                continue
            assert shelf.rollback() == "a"
        elif kind == "kill a replica":
            replicas.kill(by)
            replicas.start(by)
        else:
            database.kill()
            refused = replicas.request(by, "DELETE", "/v1/labels/item-0")
            assert refused.status_code == 503, refused.text
            assert replicas.answered(by) <= expected, "nothing that was hidden comes back"
            until(
                lambda: all(replicas.request(item, "GET", "/readyz").status_code == 503 for item in numbers),  # noqa: B023
                "every replica to say that it cannot read the state",
            )
            database.start()
            until(
                lambda: all(replicas.request(item, "GET", "/readyz").status_code == 200 for item in numbers),  # noqa: B023
                "every replica to be ready again",
            )
        done[kind] += 1
        began = time.monotonic()
        until(lambda: all(replicas.answered(item) == expected for item in replicas.services), "replicas to agree")
        wanted_titles = {id_: title for id_, title in titles.items() if id_ in expected}
        until(
            lambda: all(replicas.titles(item, wanted_titles) == wanted_titles for item in replicas.services),  # noqa: B023
            "columns to agree",
        )
        took.append((time.monotonic() - began, kind))
    within = [sum(item <= bound for item, _ in took) for bound in (0.1, 0.2, 0.5, 1)]
    slowest = ", ".join(f"{item:.2f} s {kind}" for item, kind in sorted(took, reverse=True)[:5])
    print(f"\n{dict(done)}; agreed within 0.1, 0.2, 0.5, 1 s: {within} of {len(took)}; slowest: {slowest}")
    changes = read_label_changes(parse_location(replicas.database))
    assert set(changes.upserts) == {id_ for id_ in expected if id_.startswith("new-")}


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [2], indirect=True)
def test_choices_of_all_replicas_are_exported_once(replicas: Replicas, tmp_path: Path) -> None:
    rng, stop = random.Random(7), threading.Event()
    done: Counter[str] = Counter()
    choosers = [Chooser(f"chooser-{number}", [f"item-{row}" for row in range(LABELS)]) for number in range(CHOOSERS)]
    urls = [replicas.services[number].url for number in range(REPLICAS)]
    with ThreadPoolExecutor(CHOOSERS) as pool:
        choosing = [pool.submit(item.write, urls, stop, random.Random(rng.random())) for item in choosers]
        try:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                time.sleep(rng.uniform(0, 2))
                number = rng.randrange(REPLICAS)
                if rng.random() < 0.6 and replicas.services[number].workers:
                    replicas.services[number].kill_worker(rng)
                    done["kills of a worker"] += 1
                    continue
                if replicas.services[number].process.is_alive():
                    replicas.kill(number)
                    done["kills of a replica"] += 1
                else:  # as it does when its workers die young, again and again
                    done["ends of a replica"] += 1
                # Sometimes the next kill comes before it is ready.
                replicas.start(number, ready=rng.random() < 0.7)
        finally:
            stop.set()
    for item in choosing:
        item.result()
    for number in range(REPLICAS):
        if not replicas.services[number].process.is_alive():
            replicas.start(number)
        replicas.services[number].wait_until_ready()
    for chooser in choosers:
        chooser.send(replicas.clients[0])
    replicas.kill(2)
    assert [replicas.services[number].terminate() for number in (0, 1)] == [0, 0]
    together = tmp_path / "events"
    together.mkdir()
    for number in range(REPLICAS):
        for path in (tmp_path / f"replica-{number}" / "events").iterdir():
            shutil.copy(path, together)
    exported = check_export(replicas.releases, together, choosers)
    sent, elsewhere = (sum(getattr(item, name) for item in choosers) for name in ("sent", "elsewhere"))
    print(f"\n{SECONDS:g} s, {dict(done)}: {exported} chosen labels, of {sent} sent, in "
          f"{sum(item.events for item in choosers)} events, {elsewhere} requests to others than answered: "
          "all there once")  # fmt: skip
    assert min(elsewhere, done.total()) > 0


def test_unmigrated_label_changes_are_refused(replicas: Replicas) -> None:
    state_folder = replicas.folder / "replica-9"
    state_folder.mkdir()
    with closing(LabelStore(state_folder)) as store:
        store.append([Hide(id="item-1", at=datetime.now(UTC))])
    command = ["-m", "longtail.serving", "run", replicas.releases, "--port", "0", "--state", str(state_folder)]
    schema = f"{replicas.database}_other"
    refused = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"LONGTAIL_DATABASE_URL": schema}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
    assert (
        f"found none, and 1 in {state_folder}: copy them with longtail-serve copy-labels {state_folder}"
        in refused.stderr
    )
    copied = longtail("serving", "copy-labels", state_folder, "--state", schema)
    assert copied.startswith("1 label changes copied to postgresql://longtail@127.0.0.1")
    assert set(read_label_changes(schema).hidden) == {"item-1"}


def _status(replicas: Replicas, number: int) -> int | None:
    try:
        return replicas.request(number, "GET", "/readyz").status_code
    except httpx.TransportError:
        return None


@pytest.mark.nightly
def test_service_survives_a_missing_or_hanging_database(
    replicas: Replicas, database: PostgresServer, bundle: Path, tmp_path: Path
) -> None:
    """A replica that starts without it serves nothing, others answer on; a rebuild takes in what any has changed."""
    assert replicas.request(0, "DELETE", "/v1/labels/item-3").status_code == 200
    replicas.kill(0)
    database.kill()
    replicas.start(0, ready=False)
    until(
        lambda: replicas.services[0].process.is_alive() and _status(replicas, 0) == 503, "a replica that is not ready"
    )
    time.sleep(1)
    assert replicas.request(0, "POST", "/v1/retrieve", json={"queries": [QUERY]}).status_code == 503
    database.start()
    replicas.services[0].wait_until_ready()
    assert "item-3" not in replicas.answered(0)
    until(lambda: _status(replicas, 1) == 200, "another to be ready again")
    database.pause()
    try:
        until(lambda: _status(replicas, 1) == 503, "a replica to say that it cannot read the state")
        assert len(replicas.answered(1)) == LABELS - 1
        assert replicas.request(1, "DELETE", "/v1/labels/item-4").status_code == 503
        assert replicas.services.pop(2).terminate() == 0, "one that is told to stop does"
    finally:
        database.go_on()
    until(lambda: _status(replicas, 1) == 200, "the replica to be ready again")
    added = {"id": "fresh", "features": label_features(1)}
    assert replicas.request(0, "POST", "/v1/labels", json={"labels": [added]}).status_code == 200
    assert replicas.request(1, "DELETE", "/v1/labels/item-9").status_code == 200
    report = merge_labels(bundle, replicas.database, tmp_path / "merged")
    assert (report.added, report.labels) == (1, LABELS + 1 - report.removed)
    assert report.removed in (2, 3), "what was not acknowledged is there whole or not at all"
