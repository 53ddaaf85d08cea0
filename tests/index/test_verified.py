"""A release that was verified whole is not read again at every start, unless somebody wrote to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from longtail.bundle import BundleCorruptError
from longtail.index import DeviceError, LongtailIndexError, Release, ReleaseNotFoundError, Releases, build
from longtail.index.release import verified

FILES = ("bundle/embeddings.npy", "bundle/labels.parquet", "index/all.faiss", "index/lookup.arrow", "release.json")
LONG_AGO = 1_700_000_000


@pytest.fixture
def releases(bundle_path: Path, tmp_path: Path) -> Releases:
    """Of one release, a copy of its own, written long ago and verified since."""
    build(bundle_path, tmp_path / "built", spec="flat", name="first")
    shutil.copytree(tmp_path / "built", tmp_path / "releases")
    releases = Releases(tmp_path / "releases")
    age(releases)
    state_of(releases).mkdir()
    reopen(releases)
    return releases


def state_of(releases: Releases) -> Path:
    return releases.root / ".state"


def reopen(releases: Releases) -> Release:
    return releases.open("first", state=state_of(releases))


def age(releases: Releases) -> None:
    for path in (releases.root / "first").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


def record_of(releases: Releases) -> Path:
    return state_of(releases) / "verified" / "first.json"


def spoil(path: Path) -> None:
    """Change a byte in the middle, and nothing else."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def rot(releases: Releases, file: str) -> None:
    """Change a byte as a failing disk does, whose file system knows nothing of it; the last reading is long ago."""
    path = releases.root / "first" / file
    spoil(path)
    os.utime(path, (LONG_AGO, LONG_AGO))
    known = json.loads(record_of(releases).read_text())
    record_of(releases).write_text(json.dumps({**known, "read_at": known["read_at"] - 4000}))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole from here on."""
    from longtail.bundle import integrity

    read: list[str] = []
    sha256_of = integrity.sha256_of

    def noting(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(integrity, "sha256_of", noting)
    return read


def files_hashed(root: str) -> int:
    """In another process: how many files opening the release reads whole."""
    from longtail.bundle import integrity

    count, sha256_of = 0, integrity.sha256_of

    def counting(path: Path) -> str:
        nonlocal count
        count += 1
        return sha256_of(path)

    integrity.sha256_of = counting
    reopen(Releases(root))
    return count


def test_what_was_verified_is_opened_without_reading_it_again(releases: Releases, hashed: list[str]) -> None:
    opened = reopen(releases)
    assert hashed == ["manifest.json"]
    assert opened.bundle.labels.row_of["item-7"] == 7
    for read in (releases.verify, releases.open):
        hashed.clear()
        read("first")
        assert "embeddings.npy" in hashed


@pytest.mark.parametrize("file", FILES)
def test_whatever_is_written_is_found(releases: Releases, file: str) -> None:
    spoil(releases.root / "first" / file)
    with pytest.raises((BundleCorruptError, LongtailIndexError)):
        reopen(releases)


def by_another_file(root: Path) -> None:
    (root / "more.txt").touch()


def by_a_copy(root: Path) -> None:
    shutil.copytree(root, root.with_name("copy"))
    shutil.rmtree(root)
    root.with_name("copy").rename(root)


def by_its_time(root: Path) -> None:
    (root / "index" / "all.faiss").touch()


@pytest.mark.parametrize("change", [by_another_file, by_a_copy, by_its_time])
def test_a_release_that_is_not_what_it_was_is_read_whole(
    releases: Releases, hashed: list[str], change: Callable[[Path], None]
) -> None:
    change(releases.root / "first")
    reopen(releases)
    assert "embeddings.npy" in hashed


def test_a_release_written_just_now_is_not_taken_for_settled(releases: Releases) -> None:
    (releases.root / "first" / "index" / "all.faiss").touch()
    reopen(releases)
    assert not record_of(releases).exists()
    age(releases)
    reopen(releases)
    assert record_of(releases).exists()


@pytest.mark.parametrize("file", [file for file in FILES if file != "release.json"])
def test_rot_is_found_by_reading_again_and_then_by_every_start(releases: Releases, file: str) -> None:
    rot(releases, file)
    reopen(releases)
    assert releases.verified("first", state_of(releases)).damage is None
    with pytest.raises((BundleCorruptError, LongtailIndexError), match="expected sha256"):
        releases.read_again("first", state_of(releases))
    damage = releases.verified("first", state_of(releases)).damage
    assert damage is not None
    assert file in damage
    with pytest.raises((BundleCorruptError, LongtailIndexError), match="expected sha256"):
        reopen(releases)


def test_it_is_read_again_after_an_hour_by_one_process(releases: Releases, hashed: list[str]) -> None:
    releases.read_again("first", state_of(releases))
    assert hashed == []
    known = json.loads(record_of(releases).read_text())
    record_of(releases).write_text(json.dumps({**known, "read_at": known["read_at"] - 4000}))
    with verified.Verified(releases.root / "first", state_of(releases)).alone() as alone:
        assert alone
        releases.read_again("first", state_of(releases))
    assert hashed == []
    releases.read_again("first", state_of(releases))
    assert "embeddings.npy" in hashed
    hashed.clear()
    releases.read_again("first", state_of(releases))
    assert hashed == []


def test_a_release_that_is_deleted_while_it_is_read_is_not_damaged(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(releases, "index/all.faiss")

    def deleted(*_: object, **__: object) -> None:
        shutil.rmtree(releases.root / "first")
        raise BundleCorruptError("expected a file, found none")

    monkeypatch.setattr("longtail.index.release.release.verify_files", deleted)
    with pytest.raises(ReleaseNotFoundError, match="deleted while it was read"):
        releases.read_again("first", state_of(releases))
    assert releases.verified("first", state_of(releases)).damage is None


def test_without_a_record_every_byte_is_read(releases: Releases, hashed: list[str]) -> None:
    shutil.rmtree(state_of(releases))
    for _ in range(2):
        hashed.clear()
        reopen(releases)
        assert "embeddings.npy" in hashed
    releases.read_again("first", state_of(releases))


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', '{"version": 1, "files": 3}'])
def test_a_record_that_cannot_be_read_says_nothing(releases: Releases, hashed: list[str], content: str) -> None:
    record_of(releases).write_text(content)
    assert releases.verified("first", state_of(releases)).damage is None
    reopen(releases)
    assert "embeddings.npy" in hashed
    hashed.clear()
    reopen(releases)
    assert hashed == ["manifest.json"]


@pytest.mark.process
def test_what_ends_the_process_while_it_opens_by_the_record_ends_the_trust_in_it(
    releases: Releases, hashed: list[str]
) -> None:
    """As a damaged file that is mapped may, which no exception tells of."""
    opening = "from longtail.index import Releases; import os, sys; from pathlib import Path\n"
    opening += "with Releases(sys.argv[1]).verified('first', Path(sys.argv[2])).opening(): os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", opening, str(releases.root), str(state_of(releases))])
    assert ended.returncode == -9
    reopen(releases)
    assert "embeddings.npy" in hashed
    hashed.clear()
    with releases.verified("first", state_of(releases)).opening():
        reopen(releases)  # of another worker, which is well
    assert hashed == ["manifest.json"]


@pytest.mark.process
def test_the_trust_of_a_release_whose_name_begins_alike_stays(releases: Releases, hashed: list[str]) -> None:
    other = releases.verified("first.2", state_of(releases))
    opening = "from longtail.index import Releases; import os, sys; from pathlib import Path\n"
    opening += "with Releases(sys.argv[1]).verified('first.2', Path(sys.argv[2])).opening(): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", opening, str(releases.root), str(state_of(releases))])
    reopen(releases)
    assert hashed == ["manifest.json"]
    assert other._ended_while_opening()


def test_a_device_that_is_not_there_is_no_damage(
    releases: Releases, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise DeviceError("expected a GPU, found none")

    monkeypatch.setattr("longtail.index.release.release.read_index", missing)
    with pytest.raises(DeviceError):
        reopen(releases)
    assert hashed == ["manifest.json"]
    assert record_of(releases).exists()


def test_a_link_to_nowhere_beside_the_files_is_no_matter(releases: Releases) -> None:
    (releases.root / "first" / "note").symlink_to("nowhere")
    reopen(releases)


def test_a_record_of_what_cannot_be_opened_is_dropped_and_the_file_is_named(releases: Releases) -> None:
    index = releases.root / "first" / "index" / "all.faiss"
    with index.open("r+b") as file:
        file.write(b"no index")
    os.utime(index, (LONG_AGO, LONG_AGO))
    with pytest.raises(LongtailIndexError, match=r"all.faiss: expected sha256"):
        reopen(releases)
    assert not record_of(releases).exists()


def test_a_disk_that_cannot_read_is_damage(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    rot(releases, "index/all.faiss")

    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("longtail.index.release.release.verify_files", failing)
    with pytest.raises(OSError, match="Input/output error"):
        releases.read_again("first", state_of(releases))
    assert "Input/output error" in str(releases.verified("first", state_of(releases)).damage)


def test_damage_that_a_full_disk_cannot_keep_ends_the_trust_all_the_same(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(releases, "bundle/embeddings.npy")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verified, "replace_file", full)
    for read in (lambda: releases.read_again("first", state_of(releases)), lambda: reopen(releases)):
        with pytest.raises(BundleCorruptError, match=r"embeddings.npy: expected sha256"):
            read()


def test_files_behind_a_link_are_looked_at_too(releases: Releases, hashed: list[str]) -> None:
    bundle = releases.root / "first" / "bundle"
    shutil.move(bundle, releases.root.parent / "elsewhere")
    bundle.symlink_to(releases.root.parent / "elsewhere")
    reopen(releases)
    hashed.clear()
    shutil.copy(bundle / "embeddings.npy", bundle / "other")
    (bundle / "other").replace(bundle / "embeddings.npy")
    reopen(releases)
    assert "embeddings.npy" in hashed


def test_times_in_the_future_are_settled(releases: Releases) -> None:
    record_of(releases).unlink()
    os.utime(releases.root / "first" / "index" / "all.faiss", (2 * LONG_AGO, 2 * LONG_AGO))
    reopen(releases)
    assert record_of(releases).exists()


def test_records_of_releases_that_are_gone_go(releases: Releases, bundle_path: Path) -> None:
    build(bundle_path, releases.root, spec="flat", name="second")
    shutil.rmtree(releases.root / "first")
    for path in (releases.root / "second").rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    releases.open("second", state=state_of(releases))
    assert {path.name for path in record_of(releases).parent.iterdir()} == {"second.json", "second.lock"}


@pytest.mark.process
def test_of_several_processes_one_verifies_and_the_others_wait(releases: Releases) -> None:
    record_of(releases).unlink()
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        read = [*pool.map(files_hashed, [str(releases.root)] * 3)]
    assert sorted(count > 1 for count in read) == [False, False, True]
