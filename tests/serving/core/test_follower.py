"""Following CURRENT: swaps, refusals and their retries, on real releases and a clock of our own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from longtail.bundle import Hide
from longtail.index import IndexSpec, Releases, build, open_releases
from longtail.serving import Retriever
from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.loader import load_release
from longtail.serving.core.service import Service
from longtail.serving.events.folder import FolderEvents
from longtail.serving.monitoring import Monitoring
from longtail.state import LabelStore
from tests.bundles import make_bundle
from tests.clock import Clock
from tests.serving.monitoring.shop import scrape
from tests.serving.plane import PlaneLoader, plane_retriever, plane_settings
from tests.serving.process import until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    settings = plane_settings(tmp_path)
    events = FolderEvents(tmp_path / ".state/events", days=1, most_bytes=1 << 20)
    service = Service(settings, Monitoring(tmp_path / ".state"), events)
    yield service
    service.close()


def point_to(root: Path, name: str) -> None:
    (root / "CURRENT").write_text(f'{{"current": "{name}"}}')


@pytest.mark.slow
def test_it_waits_for_a_first_release_and_swaps_only_on_change(tmp_path: Path, service: Service) -> None:
    loads = PlaneLoader()
    follower = ReleaseFollower(tmp_path, service, load=loads)
    follower.check()
    assert not service.ready
    for name in ("one", "one", "two", "two", "one"):
        point_to(tmp_path, name)
        follower.check()
        assert service.retriever().name == name
    assert loads.loaded_names == ["one", "two", "one"]
    assert scrape(service.monitoring)["longtail_release_swaps_total"] == 3
    assert scrape(service.monitoring)['longtail_release_info{release="one"}'] == 1
    assert "two" not in service.monitoring.scrape().decode()


def test_a_refused_release_is_retried_ever_less_often_and_logged_once(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    loads, clock = PlaneLoader("bad"), Clock()
    follower = ReleaseFollower(tmp_path, service, load=loads, clock=clock)
    point_to(tmp_path, "good")
    follower.check()
    point_to(tmp_path, "bad")
    attempts = []
    with caplog.at_level(logging.ERROR):
        for second in range(200):
            before = len(loads.loaded_names)
            follower.check()
            attempts += [second] * (len(loads.loaded_names) - before)
            clock.pass_(1)
    assert attempts == [0, 2, 6, 14, 30, 62, 122, 182]
    assert scrape(service.monitoring)["longtail_release_load_failures_total"] == 8
    assert service.retriever().name == "good"
    assert [record.getMessage() for record in caplog.records] == [
        "release bad refused, good stays in service: ValueError: bad: expected sha256 aa, found bb"
    ]


@pytest.mark.parametrize("content", [b"", b'{"current": "../../etc"}', b"\xff\xfe", b'{"current": "missing"}'])
def test_a_current_that_names_no_release_is_a_refusal(tmp_path: Path, service: Service, content: bytes) -> None:
    follower = ReleaseFollower(tmp_path, service)
    (tmp_path / "CURRENT").write_bytes(content)
    follower.check()
    follower.check()
    assert scrape(service.monitoring)["longtail_release_load_failures_total"] == 1
    assert not service.ready


def test_a_release_whose_tower_does_not_fit_its_manifest_is_refused(tmp_path: Path) -> None:
    bundle = make_bundle()
    features = [feature.model_copy(update={"name": f"{feature.name}_2"}) for feature in bundle.manifest.query_features]
    manifest = bundle.manifest.model_copy(update={"query_features": features})
    replace(bundle, manifest=manifest).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec=IndexSpec("flat"), name="odd")
    with pytest.raises(Exception, match="expected the inputs"):
        load_release(open_releases(tmp_path / "releases"), "odd")


def test_label_changes_are_followed_while_a_release_loads(tmp_path: Path, service: Service) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(_: Releases, name: str) -> Retriever:
        if name == "two":
            loading.set()
            assert go_on.wait(20)
        return plane_retriever(name)

    follower = ReleaseFollower(tmp_path, service, load=load)
    point_to(tmp_path, "one")
    follower.start()
    try:
        until(lambda: service.ready, "a first release")
        point_to(tmp_path, "two")
        assert loading.wait(20)
        with closing(LabelStore(service.settings.state_directory)) as another_worker:
            another_worker.append([Hide(id="b", at=datetime.now(UTC))])
        until(lambda: len(service.retriever().overlay.hidden) == 1, "what another worker hid to be hidden")
        assert service.retriever().name == "one"
        go_on.set()
        until(lambda: service.retriever().name == "two", "the next release")
        assert len(service.retriever().overlay.hidden) == 1
    finally:
        go_on.set()
        follower.stop()
