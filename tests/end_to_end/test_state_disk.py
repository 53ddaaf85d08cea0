"""State on a disk that turns read-only, or stalls, while the service runs: nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest

from longtail.serving.export import export
from longtail.state import read_label_changes
from tests.bundles import make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import server, until

FEATURES = {"user_id": "u1"}


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    return publish_bundle(make_bundle(), tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own: root may write to files of any mode."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(96 << 20)
    tools = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    for command in (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, disk]):
        if (done := subprocess.run(command, capture_output=True, check=False, env=tools)).returncode:
            pytest.skip(f"no disk may be mounted: {done.stderr.decode()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def acknowledged(http: httpx.Client, row: int) -> bool:
    """Hide a label and send feedback on it; whether both are acknowledged."""
    event = {"features": FEATURES, "labels": [f"item-{row}"], "idempotency_key": f"key-{row}"}
    statuses = {
        http.delete(f"/v1/labels/item-{row}").status_code,
        http.post("/v1/feedback", json={"events": [event]}).status_code,
    }
    assert statuses <= {200, 503}
    return statuses == {200}


def check_kept(releases: Path, disk: Path, rows: list[int]) -> None:
    labels = {f"item-{row}" for row in rows}
    assert labels <= read_label_changes(disk).hidden.keys()
    out = releases.parent / "out.parquet"
    export(releases, disk / "events", out, window=(0, time.time() + 1))
    assert labels <= {*pq.read_table(out)["label_id"].to_pylist()}


def test_read_only_disk_refuses_changes_only(releases: Path, disk: Path) -> None:
    with server(releases, releases.parent / "log", state=disk) as process:
        process.wait_until_ready()
        with httpx.Client(base_url=process.url, timeout=30) as http:
            assert all(acknowledged(http, row) for row in range(3))
            # As the kernel does after an error of the disk; who has files open does not hinder it.
            subprocess.run(["mount", "-o", "remount,abort", disk], check=False, capture_output=True)
            with pytest.raises(OSError, match="Read-only"):
                (disk / "probe").touch()
            assert not any(acknowledged(http, row) for row in range(3, 6))
            answer = http.post("/v1/retrieve", json={"queries": [{"features": FEATURES, "k": 60}]})
            assert answer.status_code == 200
            answered_ids = {label["id"] for label in answer.json()["results"][0]["labels"]}
            assert answered_ids.isdisjoint(f"item-{row}" for row in range(3))
            assert http.get("/livez").status_code == 200
            signals = {finding["signal"] for finding in http.get("/v1/monitoring").json()["verdict"]["findings"]}
            assert "records" in signals
        assert process.terminate() == 0
    subprocess.run(["umount", "-l", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk.with_name("image"), disk], check=True)
    check_kept(releases, disk, [0, 1, 2])


@pytest.mark.nightly
def test_kill_during_disk_stall_keeps_acknowledged_events(releases: Path, disk: Path) -> None:
    stored: list[int] = []

    def write(url: str) -> None:
        with httpx.Client(base_url=url, timeout=30) as http, suppress(httpx.TransportError):
            stored.extend(row for row in range(40) if acknowledged(http, row))

    with server(releases, releases.parent / "log", state=disk) as process:
        process.wait_until_ready()
        writer = threading.Thread(target=write, args=(process.url,))
        writer.start()
        time.sleep(0.3)
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        try:
            time.sleep(0.5)
            process.process.kill()
        finally:
            subprocess.run(["fsfreeze", "-u", disk], check=True)
        process.process.wait(20)
        writer.join()
    check_kept(releases, disk, stored)
    with server(releases, releases.parent / "log", state=disk) as process:
        process.wait_until_ready()
        with httpx.Client(base_url=process.url, timeout=30) as http:
            until(lambda: acknowledged(http, 50))
