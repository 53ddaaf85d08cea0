"""A service whose index is a collection of Milvus: killed, held, started again and emptied under load."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from longtail.index import Releases, build, open_releases
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.killing import KilledService, serving
from tests.milvus import RunningMilvus, milvus as milvus
from tests.serving.process import free_port, until

pytestmark = pytest.mark.nightly
LABELS = 3_000
SECONDS = 1.0
"""The service's patience with Milvus."""
QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": 20, "exclude": ["item-5"], "buckets": ["tail"]}


@pytest.fixture(scope="module")
def releases(milvus: RunningMilvus, tmp_path_factory: pytest.TempPathFactory) -> Releases:  # noqa: ARG001
    """`exact`, which is published, `banded` and `faiss` over one bundle."""
    root = tmp_path_factory.mktemp("milvus")
    make_bundle(labels=LABELS, label_tower=True).write(root / "bundle")
    for name, spec in (("exact", "milvus_flat"), ("banded", "milvus_ivf_flat"), ("faiss", "flat")):
        build(root / "bundle", root / "releases", spec=spec, name=name)
    return open_releases(root / "releases")


@pytest.fixture
def service(releases: Releases, milvus: RunningMilvus, tmp_path: Path) -> Iterator[KilledService]:
    releases.publish("exact")
    with serving(_settings(releases, tmp_path), tmp_path / "log", {"LONGTAIL_MILVUS": milvus.uri}) as started:
        started.wait_until_ready()
        yield started


def _settings(releases: Releases, folder: Path) -> Settings:
    return Settings(
        releases=releases.root,
        port=free_port(),
        state=folder / "state",
        search_threads=8,
        poll_seconds=0.1,
        drain_seconds=0,
    )


@dataclass
class QueryLoad:
    """What clients were answered: status and type of error, and the longest that any waited."""

    url: str
    counted: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    answers: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, clients: int = 4) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as http:
            while not self._stop.is_set():
                began = time.monotonic()
                response = http.post("/v1/retrieve", json={"queries": [QUERY]})
                self.slowest = max(self.slowest, time.monotonic() - began)
                if response.status_code == 200:
                    self.counted["200"] += 1
                    self.answers.add(str(_labels(response)))
                else:
                    self.counted[f"{response.status_code} {response.json()['error']['type']}"] += 1
                    assert int(response.headers["Retry-After"]) >= 1


def _ask(service: KilledService, **more: Any) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/retrieve", json={"queries": [QUERY | more]}, timeout=30)


def _labels(response: httpx.Response) -> list[tuple[str, float]]:
    return [(label["id"], round(label["score"], 4)) for label in response.json()["results"][0]["labels"]]


def _engine_findings(service: KilledService) -> list[str]:
    """What the verdict says of the engine."""
    report = httpx.get(f"{service.url}/v1/monitoring", timeout=30).json()
    return [finding["sentence"] for finding in report["verdict"]["findings"] if finding["signal"] == "engine"]


def _answers(service: KilledService) -> bool:
    return _ask(service).status_code == 200


def test_train_build_and_serve_over_http(service: KilledService, releases: Releases) -> None:
    answers = {}
    for name in ("faiss", "banded", "exact"):
        releases.publish(name)
        until(lambda: _ask(service).json().get("release") == name, f"{name} to be served")  # noqa: B023
        answers[name] = _labels(_ask(service))
    assert answers["faiss"] == answers["exact"]
    assert len(set(answers["faiss"]) & set(answers["banded"])) >= 18
    best = answers["exact"][0][0]
    deleted = httpx.delete(f"{service.url}/v1/labels/{best}", timeout=30)
    assert deleted.status_code == 200
    assert [label for label, _ in _labels(_ask(service))][:19] == [label for label, _ in answers["exact"][1:]]
    assert releases.rollback() == "banded"
    until(lambda: _ask(service).json()["release"] == "banded", "the rollback to be served")
    assert best not in dict(_labels(_ask(service)))


def test_milvus_restarts_under_load(service: KilledService, milvus: RunningMilvus) -> None:
    expected = str(_labels(_ask(service)))
    load = QueryLoad(service.url)
    with load.running():
        time.sleep(1)
        milvus.kill()
        until(lambda: load.counted["503 engine"] > 50, "refusals")
        httpx.get(f"{service.url}/livez", timeout=1).raise_for_status()
        until(lambda: _engine_findings(service), "the verdict to tell")
        milvus.start()
        until(lambda: _answers(service), "answers", seconds=90)
        answered = load.counted["200"]
        until(lambda: load.counted["200"] > answered + 50, "answers to all", seconds=30)
        until(lambda: not _engine_findings(service), "the verdict to be well", seconds=30)
    assert load.counted.keys() == {"200", "503 engine"}
    assert load.answers == {expected}
    assert load.slowest < SECONDS + 4, "expected no request to hang"
    assert httpx.get(f"{service.url}/metrics", timeout=30).text.count("longtail_engine_unanswered_total") == 3
    print(f"\n{dict(load.counted)}, the slowest in {load.slowest:.2f} s")


def test_hanging_milvus_costs_one_timeout(service: KilledService, milvus: RunningMilvus) -> None:
    milvus.pause()
    try:
        waits = []
        for _ in range(8):
            began = time.monotonic()
            response = _ask(service)
            waits.append(time.monotonic() - began)
            assert (response.status_code, response.json()["error"]["type"]) == (503, "engine")
        assert max(waits) < SECONDS + 2
        assert sum(wait < SECONDS / 2 for wait in waits) >= 3, f"expected refusals without a wait, found {waits}"
    finally:
        milvus.resume()
    until(lambda: _answers(service), "answers", seconds=60)


def test_service_waits_for_milvus_at_start(releases: Releases, milvus: RunningMilvus, tmp_path: Path) -> None:
    releases.publish("exact")
    milvus.kill()
    with serving(_settings(releases, tmp_path), tmp_path / "log", {"LONGTAIL_MILVUS": milvus.uri}) as started:
        log = tmp_path / "log"
        until(lambda: log.exists() and "Milvus at" in log.read_text(), "the log to tell", seconds=60)
        with suppress(httpx.TransportError):
            assert httpx.get(f"{started.url}/readyz", timeout=10).status_code == 503
        milvus.start()
        started.wait_until_ready(120)
        until(lambda: _answers(started), "answers", seconds=60)


def test_dropped_collection_is_reported_and_replaced(service: KilledService, releases: Releases) -> None:
    expected = _labels(_ask(service))
    bundle = releases.open("faiss").bundle
    record = releases.open("exact").manifest.collection
    assert record is not None

    def drop(client: Any, seconds: float) -> None:
        for alias in client.list_aliases(record.name, timeout=seconds)["aliases"]:
            client.drop_alias(alias, timeout=seconds)
        client.drop_collection(record.name, timeout=seconds)

    releases.milvus().ask(drop)
    until(lambda: _ask(service).status_code == 503, "the collection to be missed")
    until(lambda: any("collection" in sentence for sentence in _engine_findings(service)), "the verdict to tell")
    build(bundle, releases.root, spec="milvus_flat", name="again")
    releases.publish("again")
    until(lambda: _answers(service), "answers", seconds=30)
    assert _labels(_ask(service)) == expected
