"""kill -9 of a service under load, all of it or one worker: what it acknowledged is there exactly once.

`LONGTAIL_KILLS=200 pytest tests/end_to_end/test_ledger.py -s` makes two hundred of each and prints the ledger.
"""

from __future__ import annotations

import random
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

from longtail.index import IndexSpec, build, open_releases
from longtail.serving.compare import compare, read_experiment
from longtail.serving.events.schema import event_json
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.killing import KILLS, KilledService, moments, serving
from tests.end_to_end.ledger import BuiltLabels, Chooser, LabelWriter, check_export
from tests.serving.process import free_port, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks processes up in /proc")

LABELS, WRITERS, CHOOSERS = 60, 2, 2
EXPERIMENT = """
[experiments.kills.arms.control]
share = 0.5
[experiments.kills.arms.other]
share = 0.5
bias_removal = 0.3
"""


@dataclass
class KilledShop:
    """A directory of releases, what is written to its service, and what became of that.

    Attributes:
        releases: of which `a` is published.
        writers, choosers: whose ledgers are kept.
        found: how often each state was found after a kill.
    """

    releases: Path
    writers: list[LabelWriter]
    choosers: list[Chooser]
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def events(self) -> Path:
        return self.releases / ".state" / "events"

    @property
    def acknowledged(self) -> int:
        """Labels and events of all."""
        return sum(writer.acknowledged.total() for writer in self.writers) + sum(
            chooser.events for chooser in self.choosers
        )

    @contextmanager
    def load(self, url: str, rng: random.Random) -> Iterator[None]:
        """All write while this lasts, one request after the other; begins with the first that is acknowledged."""
        stop, before = threading.Event(), self.acknowledged
        with ThreadPoolExecutor(len(self.writers) + len(self.choosers)) as pool:
            writing = [pool.submit(writer.write, url, stop, random.Random(rng.random())) for writer in self.writers]
            writing += [pool.submit(writer.write, [url], stop, random.Random(rng.random())) for writer in self.choosers]
            try:
                until(lambda: self.acknowledged > before, "anything to be acknowledged")
                yield
            finally:
                stop.set()
        for writer in writing:
            writer.result()

    def tear(self) -> None:
        """Leave of an event what a kill in the middle of writing leaves."""
        for segment in self.events.glob("*.jsonl"):
            with segment.open("ab") as file:
                file.write(event_json(kind="choice", labels=["torn"])[:-7])
            self.outcomes["torn line"] += 1

    def check(self, url: str) -> None:
        """What a service shows that has been started, or has lost a worker, beside the ledger."""
        check_export(self.releases, self.events, self.choosers, under_way=True)
        with httpx.Client(base_url=url, timeout=20) as client:
            for writer in self.writers:
                if state := writer.check(client):
                    self.outcomes[f"label change under way: {state}"] += 1
            for chooser in self.choosers:
                self.outcomes["feedback under way"] += chooser.pending is not None
                chooser.send(client)
        # Connections that other workers may have taken.
        for _ in range(3):
            with httpx.Client(base_url=url, timeout=20) as client:
                assert [writer.check(client) for writer in self.writers] == [""] * len(self.writers)
        check_export(self.releases, self.events, self.choosers)
        self._check_arms()
        until(lambda: self._counted(url), "the figures to have all that was acknowledged", 30)

    def _counted(self, url: str) -> bool:
        """Whether the figures have all choices, and none more often than it was sent."""
        positives = sum(
            of["all"]["positives"]
            for of in httpx.get(f"{url}/v1/monitoring").json()["windows"]["24h"]["recall"].values()
        )
        acknowledged, sent = map(
            sum, zip(*((len(chooser.choices), chooser.sent) for chooser in self.choosers), strict=True)
        )
        return bool(acknowledged <= positives <= sent)

    def _check_arms(self) -> None:
        """The arms of the experiment have what was chosen of their answers."""
        experiment = read_experiment(self.releases)
        assert experiment is not None
        report = compare(experiment, self.events, (0.0, time.time()))
        choices = [choice for chooser in self.choosers for choice in chooser.choices.values() if choice is not None]
        for arm in report["arms"]:
            mine = [choice for choice in choices if choice.arm == arm["name"]]
            assert (arm["chosen"], arm["hits"]) == (len(mine), sum(choice.position is not None for choice in mine))


@pytest.fixture
def shop(tmp_path: Path) -> KilledShop:
    bundle = make_bundle(labels=LABELS, label_tower=True)
    bundle.write(tmp_path / "bundle")
    recent = [float(row % 7 - 3) for row in range(LABELS)]
    pq.write_table(pa.table({"label_id": bundle.labels.ids, "recent": recent}), tmp_path / "recent.parquet")
    releases = tmp_path / "releases"
    build(tmp_path / "bundle", releases, spec=IndexSpec("flat"), name="a", priors=tmp_path / "recent.parquet")
    open_releases(releases).publish("a")
    (releases / "experiments.toml").write_text(EXPERIMENT)
    catalogue = BuiltLabels(bundle, recent)
    ids = list(catalogue.built)
    asked_for, written = ids[::3], [id_ for i, id_ in enumerate(ids) if i % 3]
    writers = [
        LabelWriter.create(catalogue, written[number::WRITERS], [f"new-{number}-{i}" for i in range(20)])
        for number in range(WRITERS)
    ]
    return KilledShop(releases, writers, [Chooser(f"chooser-{number}", asked_for) for number in range(CHOOSERS)])


def wait_for_all(service: KilledService, before: list[int]) -> None:
    """Until others are in the place of workers that were killed."""
    until(lambda: len(now := service.workers) == len(before) and now != before, "another worker in its place", 60)

    def ready() -> Any:
        return httpx.get(f"{service.url}/readyz").json().get("workers", {}).get("ready") == len(before)

    until(ready, "all workers to serve", 60)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_kills_under_load_keep_acknowledged_writes_once(shop: KilledShop, tmp_path: Path, workers: int) -> None:
    rng = random.Random(workers)
    times, span = moments(rng), 1.0
    kills, log = 0, tmp_path / "log"

    def started() -> Any:
        return serving(Settings(releases=shop.releases, port=free_port(), workers=workers, poll_seconds=0.05), log)

    while kills < KILLS:
        with started() as service:
            if kills % 4 == 2:
                time.sleep(next(times) * span)
                service.kill()
                kills += 1
                shop.outcomes["killed while starting"] += 1
                continue
            span = service.wait_until_ready()
            shop.check(service.url)
            while workers > 1 and kills < KILLS - 1 and rng.random() < 0.4:
                before = service.workers
                with shop.load(service.url, rng):
                    time.sleep(0.7 * next(times))
                    service.kill_worker(rng)
                kills += 1
                shop.outcomes["one worker killed under load"] += 1
                wait_for_all(service, before)
                shop.check(service.url)
            with shop.load(service.url, rng):
                time.sleep(0.7 * next(times))
                service.kill()
            kills += 1
            shop.outcomes["all killed under load"] += 1
            shop.tear()
        assert "Traceback" not in log.read_text()
    with started() as service:
        service.wait_until_ready()
        shop.check(service.url)
        assert service.terminate() == 0
    exported = check_export(shop.releases, shop.events, shop.choosers)
    assert {path.suffix for path in shop.events.iterdir()} == {".parquet"}
    acknowledged = sum((writer.acknowledged for writer in shop.writers), Counter[str]())
    print(f"\n{workers} workers, {kills} kills: {dict(shop.outcomes)}")
    print(f"acknowledged: labels {dict(acknowledged)}, {exported} chosen labels in "
          f"{sum(chooser.events for chooser in shop.choosers)} events, "
          f"{sum(chooser.sent for chooser in shop.choosers)} sent; "
          f"{sum(writer.read for writer in shop.writers)} times read beside the writing: all there once")  # fmt: skip
    assert shop.acknowledged >= KILLS
