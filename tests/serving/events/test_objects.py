"""Copies of event files in an object store: each file once, and a download equal to the store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from longtail.bundle.objects import ObjectStore
from longtail.serving import cli
from longtail.serving.events.objects import download_events, upload_events
from longtail.serving.events.reader import open_events
from longtail.serving.events.schema import event_json
from tests.events import write_events
from tests.s3 import S3Server


def keep(folder: Path, *keys: str) -> None:
    """Store events by their keys, in one more file."""
    write_events(folder, *(event_json(kind="organic", time=1e9, labels=["x"], idempotency_key=key) for key in keys))


def read_keys(folder: Path) -> list[str]:
    with open_events(folder) as connection:
        return sorted(key for (key,) in connection.execute("SELECT idempotency_key FROM events").fetchall())


def test_store_collects_events_of_two_folders(s3: S3Server, tmp_path: Path) -> None:
    url, (first_folder, other) = s3.url(), (tmp_path / name for name in ("one", "other"))
    assert upload_events(first_folder, url) == 0, "no folder yet"
    keep(first_folder, "a", "b")
    keep(other, "c")
    (other / "unfinished.jsonl").write_bytes(event_json(kind="organic", time=1e9, labels=["x"]) + b"\n")
    assert (upload_events(first_folder, url), upload_events(other, f"{url}/")) == (1, 1)
    assert read_keys(download_events(url)) == ["a", "b", "c"]
    keep(first_folder, "d")
    s3.requests.clear()
    assert upload_events(first_folder, url) == 1
    assert sum(method == "PUT" for method, _ in s3.requests) == 1
    s3.requests.clear()
    assert read_keys(download_events(url)) == ["a", "b", "c", "d"]
    assert sum(path.endswith(".parquet") for _, path in s3.requests) == 1


def test_download_is_private(s3: S3Server, tmp_path: Path) -> None:
    url = s3.url()
    keep(tmp_path / "one", "a")
    upload_events(tmp_path / "one", url)
    before = os.umask(0o022)
    try:
        folder = download_events(url)
    finally:
        os.umask(before)
    (file,) = folder.glob("*.parquet")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]


def test_download_drops_deleted_files(s3: S3Server, tmp_path: Path) -> None:
    url = s3.url()
    keep(tmp_path / "one", "a")
    upload_events(tmp_path / "one", url)
    assert read_keys(download_events(url)) == ["a"]
    store = ObjectStore(url)
    store.delete(store.list())
    assert read_keys(download_events(url)) == []


def test_missing_folder_is_reported(s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "events", "a")
    url = s3.url()
    for name, uploaded, warning in (
        ("evnets", 0, f"longtail-serve: {tmp_path}/evnets: expected a folder of events, found none (yet): nothing is"),
        ("events", 1, ""),
    ):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["upload-events", str(tmp_path / name), url])
        captured = capsys.readouterr()
        assert captured.out == f"uploaded: {uploaded} files\n"
        assert captured.err.startswith(warning)
        assert bool(captured.err) == bool(warning)


def test_unreachable_store_is_reported(s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path / "one", "a")
    with s3.failing(lambda _method, _path: "fail"), pytest.raises(SystemExit):
        cli.main(["upload-events", str(tmp_path / "one"), s3.url()])
    assert "expected a store that answers" in capsys.readouterr().err
