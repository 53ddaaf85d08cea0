"""The pointer: publish, rollback, prune, and what a crash or a race leaves."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longtail.index import (
    LongtailIndexError,
    ReleaseCorruptError,
    ReleaseNameError,
    ReleaseNotFoundError,
    Releases,
    build,
)
from longtail.index.release import local as local_module
from longtail.index.release.pointers import PointerFiles

ROOT = Path(__file__).parents[2]


@pytest.fixture
def releases(bundle_path: Path, tmp_path: Path) -> Releases:
    """Three releases, `a` the oldest; nothing published."""
    for name in ("a", "b", "c"):
        build(bundle_path, tmp_path, name=name)
    return Releases(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    releases = Releases(tmp_path / "missing")
    assert releases.names() == []
    assert releases.current() is None
    with pytest.raises(ReleaseNotFoundError, match="expected a directory of releases"):
        releases.rollback()


def test_publish_points_and_rollback_walks_back(releases: Releases) -> None:
    assert releases.current() is None
    for name in ("a", "b", "a", "c"):
        releases.publish(name)
        assert releases.current() == name
        assert (releases.root / "CURRENT").read_text() == f"{name}\n"
    assert [releases.rollback() for _ in range(3)] == ["a", "b", "a"]
    with pytest.raises(ReleaseNotFoundError, match="expected a release published before a, found none"):
        releases.rollback()
    assert releases.current() == "a"


def test_publishing_after_a_rollback_forgets_what_was_rolled_back(releases: Releases) -> None:
    for name in ("a", "b"):
        releases.publish(name)
    releases.rollback()
    releases.publish("c")
    assert releases.rollback() == "a"


def test_publishing_the_current_release_again_changes_nothing(releases: Releases) -> None:
    releases.publish("a")
    releases.publish("b")
    releases.publish("b")
    assert releases.rollback() == "a"


def test_rollback_skips_deleted_releases(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        releases.publish(name)
    shutil.rmtree(releases.root / "b")
    assert releases.rollback() == "a"


@pytest.mark.parametrize("step", ["HISTORY", "CURRENT"])
def test_a_crash_inside_publish_or_rollback_keeps_a_valid_pointer(
    step: str, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either file may be the first that was not written; rollback still goes to the release before CURRENT."""

    class CrashError(Exception):
        pass

    write = PointerFiles._write

    def crash(pointers: PointerFiles, file: str, *names: str | None) -> None:
        if file == step:
            raise CrashError
        write(pointers, file, *names)

    releases.publish("a")
    releases.publish("b")
    for action in (lambda: releases.publish("c"), releases.rollback):
        with monkeypatch.context() as patched:
            patched.setattr(PointerFiles, "_write", crash)
            with pytest.raises(CrashError):
                action()
        now = PointerFiles(releases.root).read()
        assert (now.current, now.history) == ("b", ("a", "b"))


def test_a_damaged_release_is_not_published(releases: Releases) -> None:
    releases.publish("a")
    (releases.root / "b" / "index" / "index.faiss").write_bytes(b"")
    with pytest.raises(ReleaseCorruptError, match=r"expected .* bytes, found 0"):
        releases.publish("b")
    assert releases.current() == "a"


def test_a_damaged_release_is_not_rolled_back_to(releases: Releases) -> None:
    releases.publish("a")
    releases.publish("b")
    (releases.root / "a" / "index" / "index.faiss").unlink()
    with pytest.raises(ReleaseCorruptError):
        releases.rollback()
    assert releases.current() == "b"


def test_unknown_and_garbled_names(releases: Releases) -> None:
    with pytest.raises(ReleaseNotFoundError, match=r"expected one of its releases \['a', 'b', 'c'\], received 'd'"):
        releases.publish("d")
    (releases.root / "CURRENT").write_bytes(b"../../etc")
    with pytest.raises(ReleaseNameError, match=r"received '\.\./\.\./etc'"):
        releases.current()


def test_prune_keeps_the_newest_and_the_published(releases: Releases) -> None:
    releases.publish("a")
    assert releases.prune(keep=1) == ["b"]
    assert releases.names() == ["a", "c"]
    assert releases.current() == "a"
    with pytest.raises(LongtailIndexError, match="--keep: expected at least 1, received 0"):
        releases.prune(keep=0)


def test_prune_keeps_what_rollback_would_go_to(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        releases.publish(name)
    assert releases.prune(keep=1) == ["a"]
    assert releases.rollback() == "b"


def test_prune_keeps_the_rollback_target_beyond_a_deleted_release(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        releases.publish(name)
    shutil.rmtree(releases.root / "b")
    assert releases.prune(keep=1) == []
    assert releases.rollback() == "a"


def test_prune_takes_unreadable_releases_for_the_oldest(releases: Releases) -> None:
    (releases.root / "c" / "release.json").write_text("{}")
    assert releases.prune(keep=2) == ["c"]


@pytest.mark.process
def test_prune_removes_leftovers_of_dead_processes_only(releases: Releases) -> None:
    with subprocess.Popen(["sleep", "60"]) as running:
        try:
            alive = releases.root / f".new.{running.pid}.abcdefgh.tmp"
            dead = releases.root / ".old.999999999.abcdefgh.tmp"
            pointer = releases.root / ".CURRENT.abcdefgh.tmp"
            alive.mkdir()
            (dead / "bundle").mkdir(parents=True)
            pointer.write_text("a")
            assert releases.prune(keep=3) == []
            assert alive.exists()
            assert not dead.exists()
            assert not pointer.exists()
        finally:
            running.kill()


@pytest.mark.process
def test_two_processes_that_publish_at_once_leave_a_valid_pointer(releases: Releases) -> None:
    repeat = (
        "import sys; from pathlib import Path; from longtail.index import Releases\n"
        "for _ in range(15): Releases(Path(sys.argv[1])).publish(sys.argv[2])"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", repeat, str(releases.root), name], cwd=ROOT) for name in ("a", "b")
    ]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(releases.current())
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {None, "a", "b"}
    current = releases.current()
    assert current in ("a", "b")
    history = (releases.root / "HISTORY").read_text().split()
    assert history[-1] == current
    assert all(before != after for before, after in itertools.pairwise(history))
    assert not list(releases.root.glob(".*.tmp"))


def test_a_rollback_killed_midway_does_not_revive_what_a_killed_publish_left(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publish of `a` died between HISTORY and CURRENT; the rollback to `a` dies behind CURRENT."""
    for name in ("a", "b", "c", "a", "b"):
        releases.publish(name)
    (releases.root / "HISTORY").write_text("a\nb\nc\na\nb\na\n")
    assert releases.current() == "b"
    write = PointerFiles._write

    def dying(pointers: PointerFiles, file: str, *names: str | None) -> None:
        write(pointers, file, *names)
        if file == "CURRENT":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PointerFiles, "_write", dying)
        with pytest.raises(KeyboardInterrupt):
            releases.rollback()

    assert releases.current() == "a"
    assert releases.rollback() == "c", "a, b, c, a: c came before"


def test_a_release_being_deleted_is_never_seen_half_there(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    remove = shutil.rmtree
    monkeypatch.setattr(local_module.shutil, "rmtree", lambda path, **_: (seen.append(releases.names()), remove(path)))
    releases.prune(keep=2)
    assert seen == [["b", "c"]]
