"""State that is not what was written: a service starts and answers all the same, says where, and destroys nothing."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from longtail.bundle import LabelLog, LabelLogError
from longtail.index import IndexSpec, Releases, build
from longtail.serving import create_app
from longtail.serving.errors import StateError
from longtail.serving.settings import Settings
from tests.bundles import label_features, make_bundle
from tests.serving.client import client_of
from tests.serving.process import until

QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": 60}
ADDED = {"id": "added", "features": label_features(1), "display": {"title": "Added"}}
RING_HEADER = 4096


@contextmanager
def service(releases: Path, *, ready: bool = True) -> Iterator[httpx.Client]:
    with client_of(create_app(Settings(releases=releases, poll_seconds=0.02))) as client:
        if ready:
            until(lambda: client.get("/readyz").status_code == 200)
        yield client


def statuses(client: httpx.Client) -> dict[str, int]:
    """Of every kind of request that reads or writes state."""
    answer = client.post("/v1/retrieve", json={"queries": [QUERY]})
    event = {"request_id": answer.json()["request_id"], "labels": ["item-2"]}
    organic = {"features": QUERY["features"], "labels": ["item-2"]}
    return {
        "retrieve": answer.status_code,
        "feedback": client.post("/v1/feedback", json={"events": [event]}).status_code,
        "organic": client.post("/v1/feedback", json={"events": [organic]}).status_code,
        "labels": client.post("/v1/labels", json={"labels": [{**ADDED, "id": "another"}]}).status_code,
        "monitoring": client.get("/v1/monitoring").status_code,
        "metrics": client.get("/metrics").status_code,
    }


WELL = dict.fromkeys(["retrieve", "feedback", "organic", "labels", "monitoring", "metrics"], 200)


def answered(client: httpx.Client) -> set[str]:
    answer = client.post("/v1/retrieve", json={"queries": [QUERY]}).json()
    return {label["id"] for label in answer["results"][0]["labels"]}


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases with the state of a service that was used: `added` was added, `item-7` hidden, answers counted."""
    root = tmp_path_factory.mktemp("lived")
    make_bundle(label_tower=True).write(root / "bundle")
    build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="only")
    Releases(root / "releases").publish("only")
    with service(root / "releases") as client:
        for _ in range(20):
            assert statuses(client) == WELL
        assert client.post("/v1/labels", json={"labels": [ADDED]}).status_code == 200
        assert client.delete("/v1/labels/item-7").status_code == 200
    return root / "releases"


@pytest.fixture
def releases(lived: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lived, tmp_path / "releases"))


FILES = [
    "feedback.sqlite",
    "releases.json",
    "live/only/baseline.json",
    "live/only/answers.0.ring",
    "live/only/requests.0.ring",
    "live/only/priors.0.ring",
    "live/only/likeness.0.ring",
    "live/only/new.0.ring",
    "live/only/labels-5m.0.ring",
]
ALIKE = [
    "live/only/dials.0.ring",
    "live/only/dropped.0.ring",
    "live/only/labels-1h.0.ring",
    "live/only/labels-24h.0.ring",
    "labels.log",
]


def test_the_files_are_all(lived: Path) -> None:
    state = lived / ".state"
    written = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
    assert {name for name in written if not name.endswith(".lock")} == {*FILES, *ALIKE}


def damaged(content: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """What a disk, a script or a mistake may leave of a file."""

    def flipped(bits: int) -> bytes:
        flipped = bytearray(content)
        for _ in range(bits):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)

    head, body = content[:RING_HEADER], content[RING_HEADER:]
    yield "empty", b""
    yield "half", content[: len(content) // 2]
    yield "a byte short", content[:-1]
    yield "a byte too long", content + b"\0"
    yield "a bit flipped", flipped(1)
    yield "bits flipped", flipped(300)
    yield "zeros", bytes(len(content))
    yield "noise", rng.randbytes(len(content))
    yield "noise after the head", head + rng.randbytes(len(body))
    yield "ones after the head", head + b"\xff" * len(body)
    yield "other JSON", b'[{"name": 5, "since": "x", "until": []}]'
    yield "deep JSON", b"[" * 100_000
    yield "times of no calendar", b'[{"name": "only", "since": 1e300, "until": null}]'
    if b'"dtype": "float64"' in head:
        for kind, number in (("infinite", np.inf), ("huge", 1e300), ("no number", np.nan), ("negative", -1.0)):
            numbers = np.frombuffer(body).reshape(1440, -1).copy()
            numbers[:, 1:][numbers[:, 1:] != 0] = number
            yield f"{kind} counts", head + numbers.tobytes()


@pytest.mark.parametrize("file", FILES)
def test_damaged_figures_are_begun_anew_and_all_else_goes_on(file: str, releases: Path) -> None:
    state, kept = releases / ".state", releases.parent / "kept"
    shutil.copytree(state, kept)
    written = (state / file).read_bytes()
    different = {content: kind for kind, content in damaged(written, random.Random(file)) if content != written}
    assert len(different) >= 11
    for content, kind in different.items():
        (state / file).write_bytes(content)
        with service(releases) as client:
            assert statuses(client) == WELL, kind
            assert {"added", "item-7"} & answered(client) == {"added"}
            window = client.get("/v1/monitoring").json()["windows"]["5m"]
            assert window["queries"] >= 0 or kind == "negative counts"
        aside = state / f"{file}.aside"
        assert not aside.exists() or aside.read_bytes() == content
        shutil.rmtree(state)
        shutil.copytree(kept, state)
    (state / file).unlink()
    with service(releases) as client:
        assert statuses(client) == WELL


@pytest.mark.parametrize("file", FILES)
def test_a_directory_in_place_of_a_file_is_said_and_serves(file: str, releases: Path) -> None:
    path = releases / ".state" / file
    path.unlink()
    path.mkdir()
    if file == "feedback.sqlite":
        with pytest.raises(StateError, match="expected one to write to"):
            create_app(Settings(releases=releases))
        return
    with service(releases) as client:
        found = statuses(client)
    assert (found["retrieve"], found["metrics"]) == (200, 200)
    assert set(found.values()) <= {200, 503}


LOG_DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "head": lambda lines: [b"longtail" + lines[0], *lines[1:]],
    "newer": lambda lines: [lines[0].replace(b" 1 ", b" 2 ", 1), *lines[1:]],
    "first change": lambda lines: [lines[0], lines[1].replace(b"title", b"tilte", 1), *lines[2:]],
    "last change": lambda lines: [*lines[:-1], lines[-1].replace(b"item-7", b"item-8")],
    "a line missing": lambda lines: [lines[0], b"".join(lines[1:])[100:]],
    "emptied": lambda _: [],
    "zeros": lambda lines: [bytes(len(line)) for line in lines],
}


@pytest.mark.parametrize("kind", LOG_DAMAGES)
def test_with_a_damaged_label_log_nothing_is_served_until_it_is_repaired(
    kind: str, releases: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = releases / ".state" / "labels.log"
    content = log.read_bytes()
    broken = b"".join(LOG_DAMAGES[kind](content.splitlines(keepends=True)))
    assert broken != content
    log.write_bytes(broken)
    with service(releases, ready=False) as client:
        until(lambda: str(log) in caplog.text)
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/retrieve", json={"queries": [QUERY]}).status_code == 503
        assert log.read_bytes() == broken
        log.write_bytes(content)
        assert client.post("/v1/release/reload").status_code == 200
        assert {"added", "item-7"} & answered(client) == {"added"}
        assert statuses(client) == WELL


def test_a_label_log_damaged_while_it_is_served_changes_no_answer(releases: Path) -> None:
    log = releases / ".state" / "labels.log"
    with service(releases) as client:
        content, before = log.read_bytes(), answered(client)
        log.write_bytes(content[:-40] + b"!" + content[-39:] + b"more")
        time.sleep(0.3)
        assert answered(client) == before
        log.write_bytes(content)
        assert client.delete("/v1/labels/added").status_code == 200
        assert "added" not in answered(client)
        assert json.loads(log.read_bytes().splitlines()[-1].split(b" ", 2)[2])["id"] == "added"


def test_a_log_too_long_that_cannot_be_shortened_is_read_as_it_is(
    releases: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: LabelLog) -> None:
        raise LabelLogError("labels.log: expected to rewrite it: No space left on device")

    with service(releases) as client:
        for _ in range(3):
            client.post("/v1/labels", json={"labels": [ADDED]})
    monkeypatch.setattr("longtail.serving.core.label_changes._LONG_LOG", 1)
    monkeypatch.setattr(LabelLog, "compact", full)
    with service(releases) as client:
        assert {"added", "item-7"} & answered(client) == {"added"}
    assert "No space left on device" in caplog.text
