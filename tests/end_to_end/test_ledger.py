"""kill -9 of a service under load, all of it or one worker: what it acknowledged is there exactly once.

`LONGTAIL_KILLS=200 pytest tests/end_to_end/test_ledger.py -s` makes two hundred of each and prints the ledger.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.index import IndexSpec, Releases, build
from longtail.serving.compare import compare, count_units, read_experiment
from longtail.serving.monitoring import FeedbackRow, feedback_of
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.killing import KILLS, Service, moments, serving
from tests.end_to_end.ledger import Catalogue, Choice, Chooser, LabelWriter
from tests.serving.process import free_port, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks processes up in /proc")

LABELS, WRITERS, CHOOSERS, ASKED_FOR = 60, 2, 2, 20
EXPERIMENT = """
[experiments.kills.arms.control]
share = 0.5
[experiments.kills.arms.other]
share = 0.5
bias_removal = 0.3
"""


@dataclass
class Shop:
    """A directory of releases, what is written to its service, and what became of that.

    Attributes:
        releases: of which `a` is published.
        writers, choosers: whose ledgers are kept.
        found: how often each state was found after a kill.
    """

    releases: Path
    writers: list[LabelWriter]
    choosers: list[Chooser]
    found: Counter[str] = field(default_factory=Counter)

    @property
    def state(self) -> Path:
        return self.releases / ".state"

    @property
    def acknowledged(self) -> int:
        """Labels and events of all."""
        return sum(writer.acknowledged.total() for writer in self.writers) + sum(one.events for one in self.choosers)

    @contextmanager
    def load(self, url: str, rng: random.Random) -> Iterator[None]:
        """All write while this lasts, one request after the other; begins with the first that is acknowledged."""
        stop, before = threading.Event(), self.acknowledged
        everybody = [*self.writers, *self.choosers]
        with ThreadPoolExecutor(len(everybody)) as pool:
            writing = [pool.submit(each.write, url, stop, random.Random(rng.random())) for each in everybody]
            try:
                until(lambda: self.acknowledged > before, "anything to be acknowledged")
                yield
            finally:
                stop.set()
        for each in writing:
            each.result()

    def check(self, url: str) -> None:
        """What a service shows that has been started, or has lost a worker, beside the ledger."""
        with httpx.Client(base_url=url, timeout=20) as client:
            for writer in self.writers:
                if state := writer.check(client):
                    self.found[f"label change under way: {state}"] += 1
            rows = Counter(map(_choice, self._rows()))
            for chooser in self.choosers:
                if state := chooser.check(client, rows):
                    self.found[f"feedback under way: {state}"] += 1
        # Connections that other workers may have taken.
        for _ in range(3):
            with httpx.Client(base_url=url, timeout=20) as client:
                assert [writer.check(client) for writer in self.writers] == [""] * len(self.writers)
        until(lambda: self._joined(url), "all feedback to be joined with its answers, and counted", 30)

    def _rows(self) -> list[FeedbackRow]:
        with feedback_of(self.state) as feedback:
            return list(feedback.rows(0, time.time() + 86_400))

    def _joined(self, url: str) -> bool:
        """Whether every choice has found its answer, and the figures are what the choices amount to."""
        rows = {_choice(row): row for row in self._rows()}
        uncertain = {choice for chooser in self.choosers for choice in chooser.uncertain}
        of_answers: dict[Choice, FeedbackRow] = {}
        for chooser in self.choosers:
            for choice, position in chooser.positions.items():
                row = rows[choice]
                if choice.answer_id is None:
                    assert row.source == "organic"
                elif row.release is not None:
                    assert (row.release, row.position) == ("a", position), (row, position)
                    of_answers[choice] = row
                elif choice not in uncertain:
                    return False
        hits = [choice for choice, row in of_answers.items() if row.position is not None]
        organic = sum(choice.answer_id is None for chooser in self.choosers for choice in chooser.positions)
        recall = httpx.get(f"{url}/v1/monitoring").json()["windows"]["24h"]["recall"]
        counted = [recall["feedback"]["all"]["positives"], recall["feedback"]["all"]["hits"]]
        counted.append(recall["organic"]["all"]["positives"])
        return counted == [len(of_answers), len(hits), organic] and self._arms_agree(of_answers)

    def _arms_agree(self, joined: dict[Choice, FeedbackRow]) -> bool:
        """Whether the arms of the experiment have what was chosen of their answers, and no answer twice."""
        experiment = read_experiment(self.releases)
        assert experiment is not None
        report = compare(experiment, [count_units(self.state, experiment.run, (0.0, time.time()))])
        arm_of = {answer: arm for chooser in self.choosers for answer, arm in chooser.arms.items()}
        for arm in report["arms"]:
            mine = {choice: row for choice, row in joined.items() if arm_of[str(choice.answer_id)] == arm["name"]}
            if (arm["chosen"], arm["hits"]) != (len(mine), sum(row.position is not None for row in mine.values())):
                return False
            answered = len({(choice.answer_id, choice.query) for choice in mine})
            # The arm of an answer that never arrived is not known.
            given = sum(chooser.answers[arm["name"]] for chooser in self.choosers) + 3 * CHOOSERS * (KILLS + 1)
            assert answered <= arm["answers"] <= given
            assert sum(shown["count"] for shown in arm["exposures"].values()) == 5 * arm["answers"]
        return True


def _choice(row: FeedbackRow) -> Choice:
    if row.source == "answer":
        return Choice(row.answer_id, int(row.query or 0), row.label, row.event)
    return Choice(None, json.loads(row.features or b"{}")["user_id"], row.label, row.event)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    bundle = make_bundle(labels=LABELS, label_tower=True)
    bundle.write(tmp_path / "bundle")
    recent = [float(row % 7 - 3) for row in range(LABELS)]
    pq.write_table(pa.table({"label_id": bundle.labels.ids, "recent": recent}), tmp_path / "recent.parquet")
    releases = tmp_path / "releases"
    build(tmp_path / "bundle", releases, spec=IndexSpec("flat"), name="a", priors=tmp_path / "recent.parquet")
    Releases(releases).publish("a")
    (releases / "experiments.toml").write_text(EXPERIMENT)
    catalogue = Catalogue(bundle, recent)
    ids = list(catalogue.built)
    writers = [
        LabelWriter.of(catalogue, ids[ASKED_FOR + number :: WRITERS], [f"new-{number}-{place}" for place in range(20)])
        for number in range(WRITERS)
    ]
    return Shop(releases, writers, [Chooser(f"chooser-{number}", ids[:ASKED_FOR]) for number in range(CHOOSERS)])


def wait_for_all(service: Service, before: list[int]) -> None:
    """Until others are in the place of workers that were killed."""
    until(lambda: len(now := service.workers) == len(before) and now != before, "another worker in its place", 60)

    def ready() -> Any:
        return httpx.get(f"{service.url}/readyz").json().get("workers", {}).get("ready") == len(before)

    until(ready, "all workers to serve", 60)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_under_load_all_that_was_acknowledged_is_there_once(shop: Shop, tmp_path: Path, workers: int) -> None:
    rng = random.Random(workers)
    times, span = moments(rng), 1.0
    kills, log = 0, tmp_path / "log"

    def started() -> Any:
        return serving(Settings(releases=shop.releases, port=free_port(), workers=workers, poll_seconds=0.05), log)

    while kills < KILLS:
        with started() as service:
            if kills % 6 == 5:
                time.sleep(next(times) * span)
                service.kill()
                kills += 1
                shop.found["killed while starting"] += 1
                continue
            span = service.wait_until_ready()
            shop.check(service.url)
            while workers > 1 and kills < KILLS - 1 and rng.random() < 0.4:
                before = service.workers
                with shop.load(service.url, rng):
                    time.sleep(0.7 * next(times))
                    service.kill_worker(rng)
                kills += 1
                shop.found["one worker killed under load"] += 1
                wait_for_all(service, before)
                shop.check(service.url)
            with shop.load(service.url, rng):
                time.sleep(0.7 * next(times))
                service.kill()
            kills += 1
            shop.found["all killed under load"] += 1
        assert "Traceback" not in log.read_text()
    with started() as service:
        service.wait_until_ready()
        shop.check(service.url)
        metrics = httpx.get(f"{service.url}/metrics").text
        assert service.terminate() == 0
    acknowledged = sum((writer.acknowledged for writer in shop.writers), Counter[str]())
    choices = Counter("organic" if choice.answer_id is None else "of answers" for chooser in shop.choosers
                      for choice in chooser.positions)  # fmt: skip
    events = sum(
        int(float(metrics.split(f'longtail_feedback_events_total{{kind="{kind}"}} ')[1].split("\n")[0]))
        for kind in ("answer", "organic")
    )
    assert events == sum(chooser.events for chooser in shop.choosers)
    print(f"\n{workers} workers, {kills} kills: {dict(shop.found)}")
    print(f"acknowledged: labels {dict(acknowledged)}, chosen labels {dict(choices)} in {events} events, "
          f"{sum(len(chooser.arms) for chooser in shop.choosers)} requests of arms; "
          f"{sum(writer.read for writer in shop.writers)} times read beside the writing: all there once")  # fmt: skip
    assert shop.acknowledged >= KILLS
    with sqlite3.connect(shop.state / "feedback.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
