"""Following CURRENT: swaps, refusals and their retries, on real releases and a clock of our own."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx2 as httpx
import pytest

from longtail.bundle import Hide
from longtail.index import IndexSpec, Releases, build, open_releases
from longtail.serving import Retriever, create_app
from longtail.serving.core.description import release_json
from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.loader import load_release
from longtail.serving.core.service import Service
from longtail.serving.events.folder import FolderEvents
from longtail.serving.monitoring import Monitoring
from longtail.state import LabelStore
from tests.bundles import make_bundle
from tests.serving.plane import plane_retriever, plane_settings
from tests.serving.process import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loads:
    """Loads the plane under any name, but for names that are broken."""

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.loaded_names: list[str] = []

    def __call__(self, _: Releases, name: str) -> Retriever:
        self.loaded_names.append(name)
        if name in self.broken:
            raise ValueError(f"{name}: expected sha256 aa, found bb")
        return plane_retriever(name)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    settings = plane_settings(tmp_path)
    events = FolderEvents(tmp_path / ".state/events", days=1, most_bytes=1 << 20)
    service = Service(settings, Monitoring(tmp_path / ".state"), events)
    yield service
    service.close()


def point_to(root: Path, name: str) -> None:
    (root / "CURRENT").write_text(f'{{"current": "{name}"}}')


def figure(service: Service, name: str) -> str:
    return next(line.split()[-1] for line in service.monitoring.scrape().decode().splitlines() if line.startswith(name))


@pytest.mark.slow
def test_it_waits_for_a_first_release_and_swaps_only_on_change(tmp_path: Path, service: Service) -> None:
    loads = Loads()
    follower = ReleaseFollower(tmp_path, service, load=loads)
    follower.check()
    assert not service.ready
    for name in ("one", "one", "two", "two", "one"):
        point_to(tmp_path, name)
        follower.check()
        assert service.retriever().name == name
    assert loads.loaded_names == ["one", "two", "one"]
    assert figure(service, "longtail_release_swaps_total") == "3.0"
    assert figure(service, 'longtail_release_info{release="one"}') == "1.0"
    assert "two" not in service.monitoring.scrape().decode()


def test_a_refused_release_is_retried_ever_less_often_and_logged_once(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    loads, clock = Loads("bad"), Clock()
    follower = ReleaseFollower(tmp_path, service, load=loads, clock=clock)
    point_to(tmp_path, "good")
    follower.check()
    point_to(tmp_path, "bad")
    attempts = []
    with caplog.at_level(logging.ERROR):
        for second in range(200):
            clock.now = 100.0 + second
            before = len(loads.loaded_names)
            follower.check()
            attempts += [second] * (len(loads.loaded_names) - before)
    assert attempts == [0, 2, 6, 14, 30, 62, 122, 182]
    assert figure(service, "longtail_release_load_failures_total") == "8.0"
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
    assert figure(service, "longtail_release_load_failures_total") == "1.0"
    assert not service.ready


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda release: flip_last_byte(release / "bundle" / "embeddings.npy"),
        lambda release: flip_last_byte(release / "bundle" / "query_tower.onnx"),
        lambda release: flip_last_byte(next((release / "index").glob("*.faiss"))),
        lambda release: (release / "bundle" / "labels.arrow").unlink(),
        lambda release: (release / "release.json").write_bytes(b"{"),
        lambda release: shutil.rmtree(release),
    ],
    ids=["embeddings", "tower", "index", "labels", "release.json", "gone"],
)
def test_real_releases_load_and_damaged_ones_are_refused(
    tmp_path: Path, service: Service, damage: Callable[[Path], None]
) -> None:
    for name, seed in (("first", 0), ("second", 1)):
        make_bundle(seed=seed).write(tmp_path / "bundles" / name)
        build(tmp_path / "bundles" / name, tmp_path / "releases", spec=IndexSpec("flat"), name=name)
    releases = tmp_path / "releases"
    follower = ReleaseFollower(releases, service)
    point_to(releases, "first")
    follower.check()
    assert release_json(service.retriever())["labels"] == 60
    damage(releases / "second")
    point_to(releases, "second")
    follower.check()
    assert service.retriever().name == "first"
    assert figure(service, "longtail_release_load_failures_total") == "1.0"


def test_a_release_whose_tower_does_not_fit_its_manifest_is_refused(tmp_path: Path) -> None:
    bundle = make_bundle()
    features = [feature.model_copy(update={"name": f"{feature.name}_2"}) for feature in bundle.manifest.query_features]
    manifest = bundle.manifest.model_copy(update={"query_features": features})
    replace(bundle, manifest=manifest).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec=IndexSpec("flat"), name="odd")
    with pytest.raises(Exception, match="expected the inputs"):
        load_release(open_releases(tmp_path / "releases"), "odd")


def test_swaps_amid_requests_fail_none_and_every_answer_is_of_one_release(tmp_path: Path) -> None:
    app = create_app(plane_settings(tmp_path), retriever=plane_retriever("one", "one-"))
    service: Service = app.state.service
    body = {"queries": [{"features": {"user": "east"}, "k": 4, "bias_removal": 0}] * 3}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def ask() -> list[httpx.Response]:
                return [await client.post("/v1/retrieve", json=body) for _ in range(20)]

            async def swap() -> None:
                for turn in range(60):
                    name = ("two", "one")[turn % 2]
                    service.serve(plane_retriever(name, f"{name}-"))
                    await asyncio.sleep(0.002)

            query = asyncio.gather(*(ask() for _ in range(10)))
            await swap()
            return [response for responses in await query for response in responses]

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200] * 200
    history = set()
    for response in responses:
        answer = response.json()
        history.add(answer["release"])
        ids = [label["id"] for result in answer["results"] for label in result["labels"]]
        assert ids == [f"{answer['release']}-{id_}" for id_ in ("a", "c/é", "b", "4")] * 3
    assert history == {"one", "two"}
    service.close()


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
