"""A service of releases in an object store that is slow, torn, failing or gone: what it has, it serves on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from longtail.bundle.objects import ObjectStore
from longtail.bundle.remote import copies_path
from longtail.index import Releases, build, open_releases
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.killing import KilledService, serving
from tests.s3 import S3Server
from tests.serving.process import free_port, until

QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": 5}


@dataclass
class StoredShop:
    """One host: a service, its cache and its state."""

    url: str
    folder: Path
    environment: dict[str, str]
    releases: Releases
    overrides: dict[str, Any] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def settings(self) -> Settings:
        usual = {
            "poll_seconds": 0.05,
            "drain_seconds": 0,
            "state": self.folder / "state",
        }
        return Settings(releases=self.url, port=free_port(), **(usual | self.overrides))

    @property
    def directory(self) -> Path:
        return copies_path(self.url, self.folder / "host")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self, *, ready: bool = True) -> KilledService:
        environment = {**self.environment, "LONGTAIL_CACHE": str(self.folder / "host")}
        service = self.stack.enter_context(serving(self.settings, self.folder / "log", environment))
        if ready:
            service.wait_until_ready()
        return service


@pytest.fixture
def shop(s3: S3Server, tmp_path: Path) -> Iterator[StoredShop]:
    """Releases `a`, which is published, and `b`; no service yet."""
    make_bundle(labels=40).write(tmp_path / "bundle")
    url = s3.url()
    for name in ("a", "b"):
        build(tmp_path / "bundle", url, name=name, spec="flat")
    releases = open_releases(url)
    releases.publish("a")
    shop = StoredShop(url, tmp_path, s3.environment, releases)
    with shop.stack:
        yield shop


def served(service: KilledService) -> str | None:
    """The release that answers a query; None if none does."""
    with suppress(httpx.TransportError):
        response = httpx.post(f"{service.url}/v1/retrieve", json={"queries": [QUERY]}, timeout=10)
        if response.status_code == 200:
            return str(response.json()["release"])
    return None


def read_verdict(service: KilledService) -> str:
    """What the service says is wrong with its release."""
    report = httpx.get(f"{service.url}/v1/monitoring", timeout=30).json()
    return str([finding for finding in report["verdict"]["findings"] if finding["signal"] == "refused_release"])


def test_reload_reads_the_store_at_once(shop: StoredShop) -> None:
    shop.overrides = {"poll_seconds": 60.0, "admin_keys": ("k" * 16,)}
    service = shop.start()
    shop.releases.publish("b")
    response = httpx.post(
        f"{service.url}/v1/release/reload", headers={"Authorization": f"Bearer {'k' * 16}"}, timeout=30
    )
    assert (response.json()["release"], response.json()["changed"]) == ("b", True)


def _ready(service: KilledService) -> int | None:
    with suppress(httpx.TransportError):
        return httpx.get(f"{service.url}/readyz", timeout=10).status_code
    return None


@pytest.mark.parametrize(
    "fault", [*(pytest.param(fault, marks=pytest.mark.nightly) for fault in ("fail", "garble")), "tear", "hang"]
)
def test_failed_download_keeps_the_present_release(fault: str, shop: StoredShop, s3: S3Server) -> None:
    service = shop.start()
    build(shop.folder / "bundle", shop.url, name="c", spec="ivf_flat")  # an index that is not here yet
    with s3.failing(lambda method, path: fault if method == "GET" and "/c/index/" in path else None):
        shop.releases.publish("c")
        began = time.monotonic()
        while time.monotonic() < began + 3:
            assert served(service) == "a"
        if fault != "hang":
            until(
                lambda: "c, cannot be fetched, the one before is served" in read_verdict(service), "it to be told", 90
            )
            assert "c cannot be fetched: ObjectStoreError: s3://" in shop.log
        assert _ready(service) == 200
    until(lambda: served(service) == "c", "c to be served once the store is well", 90)
    until(lambda: "cannot be fetched" not in read_verdict(service), "nothing to be told any more")


def test_service_starts_from_cache_without_the_store(shop: StoredShop, s3: S3Server) -> None:
    service = shop.start()
    service.kill()
    s3.stop()
    try:
        service = shop.start()
        assert served(service) == "a"
        until(lambda: f"at {shop.url}, cannot be looked for" in read_verdict(service), "it to be told", 60)
        assert service.terminate() == 0
    finally:
        s3.start()
    service = shop.start()
    shop.releases.publish("b")
    until(lambda: served(service) == "b", "b to be served")


def test_hanging_store_blocks_neither_answers_nor_stop(shop: StoredShop, s3: S3Server) -> None:
    service = shop.start()
    with s3.failing(lambda *_: "hang"):
        time.sleep(0.5)
        assert served(service) == "a"
        began = time.monotonic()
        assert service.terminate() == 0
        assert time.monotonic() - began < 10


def test_emptied_store_changes_nothing(shop: StoredShop) -> None:
    service = shop.start()
    store = ObjectStore(shop.url)
    store.delete(store.list())
    assert service.terminate() == 0
    service = shop.start()
    assert served(service) == "a"
    until(lambda: "is not there, the one before is served" in read_verdict(service), "it to be told", 60)


def test_failed_downloads_are_retried_with_backoff(shop: StoredShop, s3: S3Server) -> None:
    service = shop.start()
    build(shop.folder / "bundle", shop.url, name="c", spec="ivf_flat")
    store = ObjectStore(shop.url)
    wrong = next(path for path in store.list() if path.startswith("c/index/") and path.endswith(".faiss"))
    (shop.folder / "zeros").write_bytes(bytes(len(store.read(wrong) or b"")))
    store.upload(shop.folder / "zeros", wrong)
    s3.requests.clear()
    with open_releases(shop.url).change_pointers() as (now, move):
        move(now.model_copy(update={"current": "c", "history": (*now.history, "c")}))
    until(lambda: "c, cannot be fetched" in read_verdict(service), "it to be told", 60)
    time.sleep(3)
    assert 1 <= len([path for method, path in s3.requests if method == "GET" and path.endswith(wrong)]) <= 3
    assert served(service) == "a"


@pytest.mark.nightly
def test_workers_share_one_download(shop: StoredShop, s3: S3Server) -> None:
    shop.overrides = {"workers": 2}
    s3.requests.clear()
    service = shop.start()
    reads = [path for method, path in s3.requests if method == "GET" and path.endswith("index.faiss")]
    assert len(reads) == 1
    shop.releases.publish("b")
    until(lambda: all(served(service) == "b" for _ in range(20)), "every worker to serve b")
    service.kill_worker(random.Random(0))
    shop.releases.rollback()
    until(lambda: {served(service) for _ in range(10)} == {"a"}, "a to be served by all", 60)


def test_staged_release_and_experiments_are_downloaded(shop: StoredShop) -> None:
    service = shop.start()
    shop.releases.stage("b")
    staged = f"{service.url}/v1/release/staged"
    until(lambda: httpx.get(staged).status_code == 200, "b to be asked unseen")
    assert httpx.get(staged).json()["staged"] == "b"
    experiment = """
        [experiments.tail_week]
        unit = "user_id"
        arms.control.share = 0.5
        arms.tail = {share = 0.5, release = "b"}
    """
    (shop.folder / "experiments.toml").write_text(experiment)
    ObjectStore(shop.url).upload(shop.folder / "experiments.toml", "experiments.toml")

    def runs() -> bool:
        queries = [{"features": {"user_id": f"u{number}"}} for number in range(20)]
        answer = httpx.post(f"{service.url}/v1/retrieve", json={"queries": queries}).json()
        return {result.get("release") for result in answer["results"]} == {"a", "b"}

    until(runs, "the experiment to run")
    shop.releases.unstage()
    until(lambda: httpx.get(staged).status_code == 404, "it to be asked no more")


def test_releases_at_urls_need_a_state_directory(shop: StoredShop) -> None:
    with pytest.raises(ValueError, match="releases at a URL, received none: use --state"):
        Settings(releases=shop.url)
