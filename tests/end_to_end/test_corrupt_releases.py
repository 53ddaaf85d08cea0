"""Releases and state that are not what was written: refused or put aside, said where, and what was served goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest

from longtail.index import IndexSpec, build
from longtail.serving.core.follower import ReleaseFollower
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.core.service import Service
from longtail.serving.events.folder import FolderEvents
from longtail.serving.monitoring import Monitoring
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.serving.process import until

FILES = [
    "release.json",
    "index/index.faiss",
    "index/priors.npy",
    "bundle/manifest.json",
    "bundle/manifest.sha256",
    "bundle/labels.arrow",
    "bundle/embeddings.npy",
    "bundle/calibration_queries.npy",
    "bundle/query_tower.onnx",
    "bundle/label_tower.onnx",
    "bundle/proposal.npz",
    "bundle/vocabularies/users.arrow",
    "bundle/vocabularies/items.arrow",
    "bundle/vocabularies/genres.arrow",
    "bundle/metrics.json",
]
SAME_IN_ALL = "bundle/vocabularies/genres.arrow"
NEWLINE_ENDS_IT = ["release.json", "bundle/manifest.sha256"]
"""Nothing else vouches for these, and their last byte says nothing."""
FAILURES = "longtail_release_load_failures_total "
QUERY = {"features": {"user_id": "u3", "history": ["item-1"]}, "k": 5}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases `first`, `second` and `third` of different models, as they were written."""
    root = tmp_path_factory.mktemp("made")
    for seed, name in enumerate(("first", "second", "third")):
        bundle = make_bundle(labels=60 + seed, users=20 + seed, label_tower=True, proposal=name != "first", seed=seed)
        object.__setattr__(bundle, "reports", {"metrics.json": b'{"model": "%s"}' % name.encode()})
        bundle.write(root / "bundles" / name)
        build(root / "bundles" / name, root / "releases", spec=IndexSpec("flat"), name=name)
    return root / "releases"


class Following:
    """A service that serves `first`, beside a `second` to be damaged.

    Args:
        made: intact releases.
        root: directory for copies of them.
    """

    def __init__(self, intact: Path, root: Path) -> None:
        self.intact, self.root, self.now = intact, root, 0.0
        shutil.copytree(intact, root, dirs_exist_ok=True)
        self.second = root / "second"
        monitoring = Monitoring(root / ".state")
        events = FolderEvents(root / ".state" / "events", days=1, most_bytes=1)
        self.service = Service(Settings(releases=root), monitoring, events)
        self._follower = ReleaseFollower(root, self.service, clock=lambda: self.now)
        self.point_to("first")
        self._answer = self.answer()

    def point_to(self, content: str | bytes) -> None:
        """Write CURRENT, or what stands there for it, and have the service see it."""
        (self.root / "CURRENT").write_bytes(
            content if isinstance(content, bytes) else json.dumps({"current": content}).encode()
        )
        self.look()

    def look(self) -> None:
        self.now += 100
        self._follower.check()

    def answer(self) -> bytes:
        return self.service.retriever().retrieve([RetrieveQuery.model_validate(QUERY)]).results[0]

    def failures(self) -> int:
        scraped = self.service.monitoring.scrape().decode().splitlines()
        return int(float(next(line for line in scraped if line.startswith(FAILURES)).split()[-1]))

    def check_refused(self, log: pytest.LogCaptureFixture, *named: str) -> None:
        """The second was refused by name, and the first answers as before."""
        before = self.failures()
        log.clear()
        self.point_to("second")
        assert self.failures() == before + 1
        assert (self.service.retriever().name, self.answer(), self.service.ready) == ("first", self._answer, True)
        (record,) = log.records
        assert record.getMessage().startswith("release second refused, first stays in service: ")
        assert any(str(self.second / name) in record.getMessage() for name in named), record.getMessage()
        self.point_to("first")

    def repair(self) -> None:
        if self.second.is_dir():
            shutil.rmtree(self.second)
        else:
            self.second.unlink(missing_ok=True)
        shutil.copytree(self.intact / "second", self.second)

    def check_loads(self) -> None:
        for name in ("second", "first"):
            self.point_to(name)
            assert self.service.retriever().name == name


@pytest.fixture(scope="module")
def following(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Following]:
    following = Following(intact, tmp_path_factory.mktemp("following"))
    yield following
    following.service.close()


def damages(file: str, rng: random.Random) -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """Every way to damage a file, beside the same file of another release."""

    def cut(keep: Callable[[int], int]) -> Callable[[Path, Path], None]:
        return lambda path, _: rewrite(path, (content := path.read_bytes())[: keep(len(content))])

    def flip(at: float, bits: int) -> Callable[[Path, Path], None]:
        def damage(path: Path, _: Path) -> None:
            content = bytearray(path.read_bytes())
            content[min(int(at * len(content)), len(content) - 1)] ^= bits
            rewrite(path, bytes(content))

        return damage

    def instead(make: Callable[[Path], object]) -> Callable[[Path, Path], None]:
        def damage(path: Path, _: Path) -> None:
            path.unlink()
            make(path)

        return damage

    yield "empty", cut(lambda _: 0)
    yield "half", cut(lambda size: size // 2)
    yield "a byte short", cut(lambda size: size - (2 if file in NEWLINE_ENDS_IT else 1))
    yield "a byte too long", lambda path, _: rewrite(path, path.read_bytes() + b"0")
    yield "first byte", flip(0, 1)
    yield "last byte", flip(1, 0xFF)
    yield "some byte", flip(rng.random(), 1 << rng.randrange(8))
    if file != SAME_IN_ALL:
        yield "another release's", lambda path, other: rewrite(path, other.read_bytes())
        yield "a link to another release's", lambda path, other: (path.unlink(), path.symlink_to(other))[1]
    yield "zeros", lambda path, _: rewrite(path, bytes(path.stat().st_size))
    yield "missing", instead(lambda _: None)
    yield "a directory", instead(Path.mkdir)
    yield "a link to nothing", instead(lambda path: path.symlink_to("nothing"))
    yield "a link to itself", instead(lambda path: path.symlink_to(path.name))


def rewrite(path: Path, content: bytes) -> None:
    """In a new file: the old one is mapped, and linked from elsewhere."""
    path.unlink()
    path.write_bytes(content)


def test_the_files_are_all(intact: Path) -> None:
    for name in ("second", "third"):
        written = [path.relative_to(intact / name).as_posix() for path in (intact / name).rglob("*") if path.is_file()]
        assert sorted(written) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_refused_by_name(file: str, following: Following, caplog: pytest.LogCaptureFixture) -> None:
    # manifest.sha256 vouches for the manifest: which of them is damaged nobody can tell.
    named = ["bundle/manifest.json", file] if file == "bundle/manifest.sha256" else [file]
    for kind, damage in damages(file, random.Random(file)):
        damage(following.second / file, following.intact / "third" / file)
        try:
            following.check_refused(caplog, *named)
        except AssertionError as error:
            raise AssertionError(f"{file}, {kind}") from error
        finally:
            following.repair()
            following.point_to("first")
    following.check_loads()


@pytest.mark.parametrize("file", NEWLINE_ENDS_IT)
def test_final_newline_in_current_is_ignored(file: str, following: Following) -> None:
    rewrite(following.second / file, (following.second / file).read_bytes()[:-1])
    following.check_loads()
    following.repair()


def swap_directory(name: str) -> Callable[[Following], None]:
    def damage(following: Following) -> None:
        shutil.rmtree(following.second / name)
        shutil.copytree(following.intact / "third" / name, following.second / name)

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda following: shutil.rmtree(following.second), ""),
        (lambda following: (shutil.rmtree(following.second), following.second.write_bytes(b""))[0], ""),
        (lambda following: (shutil.rmtree(following.second), following.second.mkdir())[0], "release.json"),
        (swap_directory("bundle"), "bundle/manifest.json"),
        (swap_directory("index"), "index"),
        (swap_directory("."), "release.json"),
    ],
    ids=["missing", "a file", "empty", "another's bundle", "another's index", "another release"],
)
def test_a_damaged_directory_is_refused(
    damage: Callable[[Following], None], named: str, following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    damage(following)
    if named:
        following.check_refused(caplog, named)
    else:
        following.point_to("second")
        assert "expected one of its releases ['first', 'third'], received 'second'" in caplog.text
        assert following.service.retriever().name == "first"
        following.point_to("first")
    following.repair()
    following.check_loads()


def test_current_that_is_a_directory_changes_nothing(following: Following) -> None:
    before, current = following.failures(), following.root / "CURRENT"
    current.unlink()
    following.look()
    assert following.failures() == before
    current.mkdir()
    following.look()
    assert following.failures() == before + 1
    current.rmdir()
    current.symlink_to("CURRENT")
    following.look()
    assert following.failures() == before + 2
    assert (following.service.retriever().name, following.service.ready) == ("first", True)
    current.unlink()
    following.check_loads()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_truncated_mapped_file_ends_the_process_with_a_message(intact: Path, tmp_path: Path, workers: int) -> None:
    """What the system does where a mapped file has no more of what was asked for, nobody can answer."""
    releases = tmp_path / "releases"
    shutil.copytree(intact / "first", releases / "first")
    (releases / "CURRENT").write_text('{"current": "first"}')
    log = tmp_path / "log"
    with server(releases, log, workers=workers) as service:
        service.wait_until_ready()
        os.truncate(releases / "first" / "bundle" / "embeddings.npy", 0)
        with suppress(httpx.TransportError):  # a label alone is scored by its row in that file
            httpx.post(f"{service.url}/v1/retrieve", json={"queries": [{**QUERY, "allow": ["item-2"]}]})
        until(lambda: "Fatal Python error: Bus error" in log.read_text())
        if workers == 1:
            assert service.process.wait(20) == -signal.SIGBUS
        else:
            until(lambda: "ended with SIGBUS: a file that it serves was cut off" in log.read_text())
            until(lambda: "release first refused, nothing stays in service" in log.read_text())
