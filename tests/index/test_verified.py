"""A release that was verified whole is not read again at every start, unless somebody wrote to it."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longtail.bundle import Bundle, BundleCorruptError, BundleInvariantError
from longtail.index import Release, ReleaseCorruptError, Releases, build, open_releases
from longtail.index.release import releases as releases_module
from longtail.index.release.release import open_release

FILES = ("bundle/embeddings.npy", "bundle/labels.arrow", "index/index.faiss", "release.json")
LONG_AGO = 1_700_000_000


@pytest.fixture
def releases(bundle_path: Path, tmp_path: Path) -> Releases:
    """One release, copied for the test, written long ago and verified since."""
    build(bundle_path, tmp_path / "built", spec="flat", name="first")
    shutil.copytree(tmp_path / "built", tmp_path / "releases")
    for path in (tmp_path / "releases").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    releases = open_releases(tmp_path / "releases")
    reopen(releases)
    return releases


@pytest.fixture
def full_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each opening whether it read every byte."""
    openings: list[bool] = []

    def noting(path: Path, *, verify: bool = True, **more: Any) -> Release:
        openings.append(verify)
        return open_release(path, verify=verify, **more)

    monkeypatch.setattr(releases_module, "open_release", noting)
    return openings


def reopen(releases: Releases) -> Release:
    return releases.open("first", state=releases.root / ".state")


def spoil(path: Path) -> None:
    """Change a byte in the middle, and nothing else."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_verified_files_are_not_read_again(releases: Releases, full_reads: list[bool]) -> None:
    assert reopen(releases).searcher.labels == 600
    assert full_reads == [False]
    releases.open("first")
    releases.verify("first")
    assert full_reads == [False, True, True], "without a state, and before publishing, every byte is read"


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_read_again(file: str, releases: Releases) -> None:
    spoil(releases.root / "first" / file)
    for _ in range(2):
        with pytest.raises((ReleaseCorruptError, BundleCorruptError)):
            reopen(releases)
    spoil(releases.root / "first" / file)
    reopen(releases)


@pytest.mark.parametrize("change", ["touched", "replaced", "shorter", "gone", "another"])
def test_any_change_of_files_is_noticed(change: str, releases: Releases, full_reads: list[bool]) -> None:
    path = releases.root / "first" / "index" / "index.faiss"
    if change == "touched":
        os.utime(path, (LONG_AGO, LONG_AGO + 1))
    elif change == "replaced":
        shutil.copy2(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)
    elif change == "another":
        path.with_name("more").touch()
    else:
        path.write_bytes(path.read_bytes()[:-1]) if change == "shorter" else path.unlink()
        with pytest.raises(ReleaseCorruptError):
            reopen(releases)
        return
    reopen(releases)
    assert full_reads == [True, False]


def test_files_written_a_moment_ago_are_not_trusted(
    releases: Releases, full_reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another write in the same tick of the clock would leave the same time."""
    now = LONG_AGO + 0.5
    monkeypatch.setattr(releases_module.time, "time", lambda: now)
    os.utime(releases.root / "first" / "index" / "index.faiss", (LONG_AGO, LONG_AGO + 0.25))
    reopen(releases)
    now = LONG_AGO + 3
    reopen(releases)
    reopen(releases)
    assert full_reads == [True, False, True, False, False]


def test_one_of_several_workers_verifies(releases: Releases, full_reads: list[bool]) -> None:
    shutil.rmtree(releases.root / ".state")
    threads = [threading.Thread(target=reopen, args=(releases,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(full_reads) == [False, False, False, True]


def test_publish_refuses_a_bundle_that_contradicts_its_contract(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(bundle_path)
    counts = bundle.labels.counts.copy()
    counts[0] = -1
    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "validate", lambda _: None)
        replace(bundle, labels=replace(bundle.labels, counts=counts)).write(tmp_path / "broken")
    build(tmp_path / "broken", tmp_path / "releases", spec="flat", name="broken")

    with pytest.raises(BundleInvariantError, match="counts are >= 0: expected >= 0, found -1"):
        open_releases(tmp_path / "releases").publish("broken")
