"""kill -9 at random moments of building and publishing: the old state or the new."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from longtail.bundle import Bundle
from longtail.index import Releases, build, cli, open_releases
from tests.bundles import make_bundle
from tests.end_to_end.killing import KILLS, kill, measure_seconds, moments, start

LABELS = 60


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(labels=LABELS, label_tower=True).write(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def releases(bundle: Path) -> Releases:
    """Releases `a` and `b`, of which `a` is published."""
    root = bundle.parent / "releases"
    for name in ("a", "b"):
        build(bundle, root, name=name)
    open_releases(root).publish("a")
    return open_releases(root)


def test_killed_build_leaves_no_partial_release(bundle: Path, tmp_path: Path) -> None:
    releases = open_releases(tmp_path / "releases")
    arguments = ["build", str(bundle), "--releases", str(releases.root), "--name"]
    span = sorted(measure_seconds(cli.main, [*arguments, f"whole-{turn}"]) for turn in range(3))[1]
    outcomes: Counter[str] = Counter()
    for turn, moment in enumerate(moments(random.Random(1))):
        building = start(cli.main, [*arguments, "new"])
        # Every other kill is aimed at the writing, a fifth of the time or so.
        if turn % 2:
            killed = kill(building, moment * span / 5, observe=lambda: list(releases.root.glob(".new.*.tmp/*")))
        else:
            killed = kill(building, moment * span)
        leftovers = list(releases.root.glob(".new.*.tmp"))
        if "new" in releases.names():
            assert releases.verify("new").searcher.labels == LABELS
            outcomes["whole" if killed else "ended by itself"] += 1
            shutil.rmtree(releases.root / "new")
        else:
            assert killed
            outcomes["absent, being written" if leftovers else "absent"] += 1
        assert len(leftovers) <= 1
        if outcomes.total() - outcomes["ended by itself"] == KILLS:
            break
    print(f"\nbuild: {KILLS} kills in {span * 1e3:.0f} ms each: {dict(outcomes)}")
    build(bundle, releases.root, name="new")
    assert releases.verify("new").searcher.labels == LABELS
    assert not list(releases.root.glob(".*.tmp"))
    Bundle.load(bundle)


def test_killed_publish_leaves_old_or_new_pointer(releases: Releases) -> None:
    rng, outcomes = random.Random(2), Counter[str]()
    root = str(releases.root)
    span = sorted(measure_seconds(cli.main, ["publish", f"{root}/{name}"]) for name in ("b", "a", "b", "a"))[2]
    published = list(releases.pointers().history)
    for turn, moment in enumerate(moments(rng)):
        if len(published) > 2 and rng.random() < 0.4:
            command, after = ["rollback", root], published[:-1]
        else:
            name = "b" if published[-1] == "a" else "a"
            command, after = ["publish", f"{root}/{name}"], [*published, name]
        if turn % 2:
            killed = kill(start(cli.main, command), moment * span / 20, observe=lambda: being_replaced(releases))
        else:
            killed = kill(start(cli.main, command), moment * span)
        now = list(releases.pointers().history)
        assert now[-1] == releases.current()
        assert now in (published, after)
        assert killed or now == after
        outcomes[("new" if now == after else "old") if killed else "ended by itself"] += 1
        published = now
        assert releases.verify(now[-1]).name == now[-1]
        if outcomes.total() - outcomes["ended by itself"] == KILLS:
            break
    print(f"\npublish and rollback: {KILLS} kills in {span * 1e3:.0f} ms each: {dict(outcomes)}")
    releases.prune(keep=2)
    assert {path.name for path in releases.root.iterdir()} == {".lock", "CURRENT", "a", "b"}


def being_replaced(releases: Releases) -> list[Path]:
    return list(releases.root.glob(".CURRENT.*.tmp"))
