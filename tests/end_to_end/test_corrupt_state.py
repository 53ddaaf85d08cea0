"""State that is not what was written: a service starts and answers all the same, says where, and destroys nothing."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from longtail.serving import create_app
from longtail.serving.errors import StateError
from longtail.serving.events.schema import event_json
from longtail.serving.export import export
from longtail.serving.settings import Settings
from longtail.state import read_label_changes
from tests.bundles import label_features, make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.serving.client import open_client
from tests.serving.process import until

QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": 60}
ADDED = {"id": "added", "features": label_features(1), "display": {"title": "Added"}}
RING_HEADER = 4096


@contextmanager
def service(releases: Path, *, ready: bool = True) -> Iterator[httpx.Client]:
    with open_client(create_app(Settings(releases=releases, poll_seconds=0.02))) as client:
        if ready:
            until(lambda: client.get("/readyz").status_code == 200)
        yield client


def statuses(client: httpx.Client) -> dict[str, int]:
    """Of every kind of request that reads or writes state."""
    answer = client.post("/v1/retrieve", json={"queries": [QUERY]})
    event = {"answer_id": answer.json()["results"][0]["answer_id"], "labels": ["item-2"]}
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
    publish_bundle(make_bundle(label_tower=True), root)
    with service(root / "releases") as client:
        for _ in range(20):
            assert statuses(client) == WELL
        assert client.post("/v1/labels", json={"labels": [ADDED]}).status_code == 200
        assert client.delete("/v1/labels/item-7").status_code == 200
    return root / "releases"


@pytest.fixture
def releases(lived: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lived, tmp_path / "releases"))


PAGE = 4096
"""Of SQLite."""
FILES = ["live/minutes.0", "live/only.shown"]
ALIKE = ["labels.sqlite", "answer_keys.json"]


def test_the_files_are_all(lived: Path) -> None:
    state = lived / ".state"
    written = {path.relative_to(state).as_posix() for path in state.rglob("*") if path.is_file()}
    (events,) = (state / "events").iterdir()
    assert events.suffix == ".parquet"
    covered = {*FILES, *ALIKE, f"events/{events.name}"}
    assert {name for name in written if not name.endswith(".lock")} == covered


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
    yield "a byte too long", content + b"\0"
    yield "bits flipped", flipped(300)
    yield "zeros", bytes(len(content))
    yield "noise after the head", head + rng.randbytes(len(body))
    yield "ones after the head", head + b"\xff" * len(body)
    yield "other JSON", b'[{"name": 5, "since": "x", "until": []}]'
    yield "deep JSON", b"[" * 100_000
    yield "times of no calendar", b'[{"name": "only", "since": 1e300, "until": null}]'


@pytest.mark.parametrize("file", FILES)
def test_damaged_figures_start_again(file: str, releases: Path) -> None:
    state, copy = releases / ".state", releases.parent / "kept"
    shutil.copytree(state, copy)
    written = (state / file).read_bytes()
    different = {content: kind for kind, content in damaged(written, random.Random(file)) if content != written}
    assert len(different) >= 8
    for content, kind in different.items():
        (state / file).write_bytes(content)
        with service(releases) as client:
            assert statuses(client) == WELL, kind
            assert {"added", "item-7"} & answered(client) == {"added"}
            assert client.get("/v1/monitoring").json()["windows"]["5m"]["queries"] >= 0
        shutil.rmtree(state)
        shutil.copytree(copy, state)
    (state / file).unlink()
    with service(releases) as client:
        assert statuses(client) == WELL


def test_damaged_events_are_set_aside(releases: Path, tmp_path: Path) -> None:
    events, out, window = releases / ".state/events", tmp_path / "out.parquet", (0.0, time.time() + 60)
    complete_line = (
        event_json(kind="organic", time=time.time(), labels=["whole"], positions=[None], propensities=[1]) + b"\n"
    )
    (events / "20260101T000000-a.jsonl").write_bytes(
        complete_line + b"\xff not one\n" + b'{"kind": 7}\n' + complete_line[:50]
    )
    for _ in range(2):  # before and after it became Parquet
        lines = export(releases, events, out, window=window, everything=True)
        assert pq.read_table(out)["label_id"].to_pylist().count("whole") == 1
        with service(releases) as client:
            assert statuses(client) == WELL
    assert "left out: lines of 20260101T000000-a.damaged that are no events" in lines
    assert len((events / "20260101T000000-a.damaged").read_bytes().splitlines()) == 2
    (events / "20260101T000000-b.parquet").write_bytes(b"PAR1" * 1000)
    with service(releases) as client:
        assert statuses(client) == WELL
    with pytest.raises(StateError, match=r"20260101T000000-b\.parquet"):
        export(releases, events, out, window=window)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"version": 1, "keys": [[1, 2, "x"]]}', b"\xff"])
def test_damaged_answer_keys_refuse_all_requests(
    damage: bytes, releases: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = releases / ".state" / "answer_keys.json"
    file.write_bytes(damage)
    with service(releases, ready=False) as client:
        until(lambda: str(file) in caplog.text)
        assert client.get("/readyz").status_code == 503
        assert file.read_bytes() == damage
        file.unlink()
        assert client.post("/v1/release/reload").status_code == 200
        assert statuses(client) == WELL


LABEL_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "head": lambda content: b"longtail" + content[8:],
    "a page": lambda content: content[:PAGE] + bytes(PAGE) + content[2 * PAGE :],
    "cut off": lambda content: content[: len(content) // 2],
    "emptied": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "another file": lambda _: b"PAR1" * 1000,
}


@pytest.mark.parametrize("kind", LABEL_DAMAGES)
def test_damaged_label_changes_refuse_all_requests(kind: str, releases: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = releases / ".state" / "labels.sqlite"
    content = file.read_bytes()
    broken = LABEL_DAMAGES[kind](content)
    assert broken != content
    file.write_bytes(broken)
    with service(releases, ready=False) as client:
        until(lambda: str(file) in caplog.text)
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/retrieve", json={"queries": [QUERY]}).status_code == 503
        assert file.read_bytes() == broken
        (file.parent / "repaired").write_bytes(content)
        (file.parent / "repaired").replace(file)
        assert client.post("/v1/release/reload").status_code == 200
        assert {"added", "item-7"} & answered(client) == {"added"}
        assert statuses(client) == WELL


def test_damage_to_label_changes_in_service_changes_no_answer(releases: Path) -> None:
    file = releases / ".state" / "labels.sqlite"
    with service(releases) as client:
        before = answered(client)
        file.rename(file.with_name("whole"))
        file.write_bytes(file.with_name("whole").read_bytes()[:PAGE] + b"!" * PAGE)
        time.sleep(0.3)
        assert answered(client) == before
        assert client.delete("/v1/labels/added").status_code == 503
        file.with_name("whole").replace(file)
        assert client.delete("/v1/labels/added").status_code == 200
        assert "added" not in answered(client)
    assert "added" in read_label_changes(file.parent).hidden
