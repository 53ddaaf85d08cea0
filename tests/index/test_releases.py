"""The pointer: publish, rollback, prune, and what a crash or a race leaves."""

from __future__ import annotations

import itertools
import json
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
    open_releases,
)
from longtail.index.release import releases as releases_module

ROOT = Path(__file__).parents[2]


@pytest.fixture
def releases(bundle_path: Path, tmp_path: Path) -> Releases:
    """Three releases, `a` the oldest; nothing published."""
    for name in ("a", "b", "c"):
        build(bundle_path, tmp_path, name=name)
    return open_releases(tmp_path)


def test_an_empty_directory_has_no_releases(tmp_path: Path) -> None:
    releases = open_releases(tmp_path / "missing")
    assert releases.names() == []
    assert releases.current() is None
    with pytest.raises(ReleaseNotFoundError, match="expected a directory of releases"):
        releases.rollback()


def test_publish_points_and_rollback_walks_back(releases: Releases) -> None:
    assert releases.current() is None
    for name in ("a", "b", "a", "c"):
        releases.publish(name)
        assert releases.current() == name
        assert json.loads((releases.root / "CURRENT").read_text())["current"] == name
    assert [releases.rollback() for _ in range(3)] == ["a", "b", "a"]
    with pytest.raises(ReleaseNotFoundError, match="expected a release published before a, found none"):
        releases.rollback()
    assert releases.current() == "a"


def test_publishing_after_a_rollback_drops_rolled_back_releases(releases: Releases) -> None:
    for name in ("a", "b"):
        releases.publish(name)
    releases.rollback()
    releases.publish("c")
    assert releases.rollback() == "a"


def test_rollback_skips_deleted_releases(releases: Releases) -> None:
    for name in ("a", "b", "c"):
        releases.publish(name)
    shutil.rmtree(releases.root / "b")
    assert releases.rollback() == "a"


def test_a_crash_inside_publish_or_rollback_keeps_the_pointer(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases.publish("a")
    releases.publish("b")
    before = releases.pointers()
    for action in (lambda: releases.publish("c"), releases.rollback):
        with monkeypatch.context() as patched:
            patched.setattr(
                "longtail.index.release.releases.replace_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                action()
        assert releases.pointers() == before
    assert releases.rollback() == "a"


@pytest.mark.parametrize("content", ["", "a", "[]", '{"schema_version": 2}', '{"history": 3}', '{"curent": "a"}'])
def test_a_garbled_pointer_is_refused(content: str, releases: Releases) -> None:
    (releases.root / "CURRENT").write_text(content)
    for use in (releases.current, lambda: releases.publish("a")):
        with pytest.raises(ReleaseCorruptError, match=r"CURRENT: expected what is published, as JSON"):
            use()


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
    (releases.root / "CURRENT").write_text('{"current": "../../etc"}')
    with pytest.raises(ReleaseNameError, match=r"received '\.\./\.\./etc'"):
        releases.current()


def test_prune_keeps_the_newest_and_the_published(releases: Releases) -> None:
    releases.publish("a")
    assert releases.prune(keep=1) == ["b"]
    assert releases.names() == ["a", "c"]
    assert releases.current() == "a"
    with pytest.raises(LongtailIndexError, match="--keep: expected at least 1, received 0"):
        releases.prune(keep=0)


def test_prune_keeps_the_rollback_target(releases: Releases) -> None:
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


def test_prune_keeps_and_reports_releases_of_arms(releases: Releases) -> None:
    releases.publish("c")
    arms = '[experiments.dial.arms.x]\nrelease = "a"\n[experiments.dial.arms.y]\nbias_removal = 0.5\n'
    (releases.root / "experiments.toml").write_text(arms + '[experiments.old]\narms.z.release = "c"\n')
    lines: list[str] = []
    assert releases.prune(keep=1, say=lines.append) == ["b"]
    assert lines == ["kept: a, which answers for an arm of experiments.toml"]
    (releases.root / "experiments.toml").write_text("")
    assert releases.prune(keep=1) == ["a"]


@pytest.mark.parametrize(
    "content", ["not TOML", "experiments = 3", "[experiments.dial]", "[experiments]\na.arms.b = 1"]
)
def test_prune_deletes_nothing_where_arms_cannot_be_read(releases: Releases, content: str) -> None:
    (releases.root / "experiments.toml").write_text(content)
    with pytest.raises(LongtailIndexError, match=r"experiments\.toml: expected experiments with arms, .*nothing was"):
        releases.prune(keep=1)
    assert releases.names() == ["a", "b", "c"]


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


def test_a_prune_resumes_one_that_was_killed_after_deleting(releases: Releases) -> None:
    releases.publish("b")
    pointers = json.loads((releases.root / "CURRENT").read_text())
    (releases.root / "CURRENT").write_text(json.dumps(pointers | {"deleting": ["long-gone"]}))
    assert releases.prune(keep=9) == ["long-gone"]
    assert releases.pointers().deleting == ()


@pytest.mark.process
def test_two_processes_that_publish_at_once_leave_a_valid_pointer(releases: Releases) -> None:
    repeat = (
        "import sys; from pathlib import Path; from longtail.index import open_releases\n"
        "for _ in range(15): open_releases(Path(sys.argv[1])).publish(sys.argv[2])"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", repeat, str(releases.root), name], cwd=ROOT) for name in ("a", "b")
    ]
    names_read = set()
    while any(writer.poll() is None for writer in writers):
        names_read.add(releases.current())
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert names_read <= {None, "a", "b"}
    current = releases.current()
    assert current in ("a", "b")
    history = releases.pointers().history
    assert history[-1] == current
    assert all(before != after for before, after in itertools.pairwise(history))
    assert not list(releases.root.glob(".*.tmp"))


def test_a_release_being_deleted_is_not_listed(releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = []
    remove = shutil.rmtree
    monkeypatch.setattr(
        releases_module.shutil, "rmtree", lambda path, **_: (listings.append(releases.names()), remove(path))
    )
    releases.prune(keep=2)
    assert listings == [["b", "c"]]


def test_staging_is_a_pointer_that_publishing_clears(releases: Releases) -> None:
    releases.publish("a")
    assert releases.staged() is None
    releases.stage("b")
    assert (releases.staged(), releases.current()) == ("b", "a")
    assert releases.prune(keep=1) == []
    releases.publish("c")
    assert releases.staged() == "b"
    releases.publish("b")
    assert releases.staged() is None
    releases.stage("a")
    assert (releases.unstage(), releases.unstage()) == ("a", None)
    with pytest.raises(LongtailIndexError, match="stage: expected another release than CURRENT, received 'b'"):
        releases.stage("b")
    with pytest.raises(ReleaseNotFoundError):
        releases.stage("d")
