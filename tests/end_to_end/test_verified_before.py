"""A service starts from what it verified before, finds damage while it answers, and refuses it at the next start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx

from longtail.client import Client
from longtail.index import Releases, build
from tests.bundles import make_bundle
from tests.serving.process import ServerProcess, server, until

LONG_AGO = 1_700_000_000
FEATURES = {"user_id": "u3", "history": ["item-1", "item-2"]}


def problem(process: ServerProcess) -> str | None:
    (model,) = httpx.get(f"{process.url}/v1/models").json()["models"]
    return model["problem"]  # type: ignore[no-any-return]


def test_damage_is_told_while_a_release_is_served_and_refused_afterwards(tmp_path: Path) -> None:
    make_bundle().write(tmp_path / "bundle")
    releases = tmp_path / "releases"
    build(tmp_path / "bundle", releases, spec="flat", name="good")
    Releases(releases).publish("good")
    for path in (releases / "good").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    record = releases / ".state" / "verified" / "good.json"

    with server(releases, tmp_path / "first.log") as process:
        process.wait_until_ready()
        with Client(process.url) as client:
            answer = client.retrieve(features=FEATURES, k=5).results[0].labels
        assert problem(process) is None
        assert process.terminate() == 0
    assert record.exists()

    # As of a disk that forgets: the file system knows of nothing, and the last reading is hours ago.
    embeddings = releases / "good" / "bundle" / "embeddings.npy"
    content = bytearray(embeddings.read_bytes())
    content[-1] ^= 1
    with embeddings.open("r+b") as file:
        file.write(content)
    os.utime(embeddings, (LONG_AGO, LONG_AGO))
    known = json.loads(record.read_text())
    record.write_text(json.dumps({**known, "read_at": known["read_at"] - 9000}))

    with server(releases, tmp_path / "second.log", poll_seconds=0.1) as process:
        process.wait_until_ready()
        told = "the published release, good, is damaged since it was loaded; the log says why"
        until(lambda: problem(process) == told, "damage to be told")
        assert httpx.get(f"{process.url}/readyz").status_code == 200
        with Client(process.url) as client:
            assert [label.id for label in client.retrieve(features=FEATURES, k=5).results[0].labels] == [
                label.id for label in answer
            ]
            findings = client.monitoring()["verdict"]["findings"]
            assert "refused_release" in {finding["signal"] for finding in findings}
        assert process.terminate() == 0
    log = (tmp_path / "second.log").read_text()
    assert log.count("release good, which is served, is damaged: ") == 1
    assert "embeddings.npy: expected sha256" in log

    with server(releases, tmp_path / "third.log", poll_seconds=0.1) as process:
        until(lambda: "release good refused" in (tmp_path / "third.log").read_text(), "the release to be refused")
        assert httpx.get(f"{process.url}/readyz").status_code == 503
        assert problem(process) == "the published release, good, could not be loaded, none is served; the log says why"
        assert process.terminate() == 0
