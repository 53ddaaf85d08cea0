"""A release is written completely or not at all, and changed files are refused."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Bundle, BundleCorruptError, BundleError, BundleExistsError
from longtail.index import (
    IndexSpec,
    LongtailIndexError,
    ReleaseCorruptError,
    ReleaseManifest,
    ReleaseMismatchError,
    ReleaseNotFoundError,
    ReleaseVersionError,
    build,
    open_releases,
)
from longtail.index.release import index_files
from tests.bundles import make_bundle

ROOT = Path(__file__).parents[2]


@pytest.fixture
def release(bundle_path: Path, tmp_path: Path) -> Path:
    """A release of copies, whose bytes a test may change."""
    build(bundle_path, tmp_path, spec=IndexSpec("ivf_flat"), name="good")
    path = tmp_path / "good"
    shutil.copytree(path / "bundle", tmp_path / "copy")
    shutil.rmtree(path / "bundle")
    (tmp_path / "copy").rename(path / "bundle")
    return path


def reopen(path: Path) -> None:
    open_releases(path.parent).open(path.name)


def rewrite(path: Path, **changes: object) -> None:
    """Change fields of release.json and seal it again, as another version of the program would."""
    manifest = ReleaseManifest.model_validate_json((path / "release.json").read_bytes())
    changed = manifest.model_copy(update=changes).sealed()
    (path / "release.json").write_text(changed.model_dump_json())


def test_the_release_matches_its_manifest(bundle_path: Path, release: Path) -> None:
    opened = open_releases(release.parent).open("good")
    assert opened.name == "good"
    assert opened.path == release
    assert opened.searcher.labels == 600
    assert opened.bundle.manifest == Bundle.load(bundle_path).manifest
    assert opened.manifest.recall_k == 100
    assert {path.relative_to(release).as_posix() for path in (release / "index").iterdir()} == {
        "index/index.faiss",
        "index/lists.npy",
        "index/priors.npy",
    }
    index = json.loads((release / "release.json").read_text())
    assert (index["spec"], index["kind"], index["labels"], index["dim"]) == ("ivf_flat", "ivf_flat", 600, 13)
    assert index["factory"] == "IVF14,Flat"


def test_bundle_files_are_hard_links_and_never_symbolic(bundle_path: Path, tmp_path: Path) -> None:
    build(bundle_path, tmp_path / "releases", name="linked")
    linked = tmp_path / "releases" / "linked" / "bundle"
    for path in linked.rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            assert path.samefile(bundle_path / path.relative_to(linked))


def test_bundle_files_are_copied_where_links_do_not_work(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    build(bundle_path, tmp_path, name="copied")
    reopen(tmp_path / "copied")
    assert not (tmp_path / "copied" / "bundle" / "embeddings.npy").samefile(bundle_path / "embeddings.npy")


def test_names_are_unique_in_one_second_and_can_be_chosen(bundle_path: Path, tmp_path: Path) -> None:
    names = [build(bundle_path, tmp_path).name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.split("Z-")[1].startswith("synthetic") for name in names)
    assert open_releases(tmp_path).names() == sorted(names)
    with pytest.raises(BundleExistsError, match="already exists"):
        build(bundle_path, tmp_path, name=names[0])


def test_one_flipped_byte_in_any_file_is_refused(release: Path) -> None:
    reopen(release)
    for path in sorted(path for path in release.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for position in {0, len(content) // 3, len(content) // 2, len(content) - 2}:
            flipped = bytearray(content)
            flipped[position] ^= 1
            path.write_bytes(bytes(flipped))
            with pytest.raises((LongtailIndexError, BundleError)):
                reopen(release)
        path.write_bytes(content)
    reopen(release)


def test_any_missing_file_is_refused(release: Path) -> None:
    for path in sorted(path for path in release.rglob("*") if path.is_file()):
        hidden = release.parent / "hidden"
        path.rename(hidden)
        with pytest.raises((ReleaseCorruptError, BundleCorruptError), match="expected"):
            reopen(release)
        hidden.rename(path)
    reopen(release)


def test_an_index_of_another_bundle_is_refused(release: Path) -> None:
    shutil.rmtree(release / "bundle")
    make_bundle(labels=600, dim=8, bias=True, seed=9).write(release / "bundle")
    with pytest.raises(ReleaseMismatchError, match=r"expected the bundle that the index was built from.*build the ind"):
        reopen(release)


def test_another_version_is_refused_with_what_to_do(release: Path) -> None:
    rewrite(release, schema_version=9)
    with pytest.raises(
        ReleaseVersionError, match=r"expected schema version 1, found 9: made by another version of Longtail; build"
    ):
        reopen(release)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_index_that_claims_more_memory_than_its_file_is_refused(mapped: bool, release: Path) -> None:
    """FAISS's limits catch what a checksum cannot: a file that was crafted, not damaged."""
    file = release / "index" / "index.faiss"
    content = bytearray(file.read_bytes())
    vector_count = content.index(np.uint64(14 * 13 * 4 // 4).tobytes())
    content[vector_count : vector_count + 8] = np.uint64(1 << 40).tobytes()
    file.write_bytes(bytes(content))
    with pytest.raises(ReleaseCorruptError, match="cannot read this index"):
        index_files._read_faiss(file, 600, mapped=mapped)


@pytest.mark.process
def test_kill_9_in_the_middle_of_a_write_leaves_the_published_release(bundle_path: Path, tmp_path: Path) -> None:
    build(bundle_path, tmp_path, name="good")
    releases = open_releases(tmp_path)
    releases.publish("good")
    killed = (
        "import os, signal, sys, longtail.index.building.writing as writing\n"
        "writing.write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from longtail.index.cli import main; main(sys.argv[1:])"
    )
    options = ["--releases", str(tmp_path), "--name", "half", "--publish"]
    command = [sys.executable, "-c", killed, "build", str(bundle_path), *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".half.*.tmp"))
    assert releases.names() == ["good"]
    assert releases.current() == "good"
    releases.open("good")
    with pytest.raises(ReleaseNotFoundError):
        releases.open("half")
    releases.prune(keep=1)
    assert not list(tmp_path.glob(".*.tmp"))
    build(bundle_path, tmp_path, name="half")
