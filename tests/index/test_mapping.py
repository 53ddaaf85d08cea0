"""Indexes are mapped: shared by processes, usable after their files are gone, and refused when damaged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import FileRecord
from longtail.bundle.store import file_sha256
from longtail.index import IndexSpec, Release, ReleaseCorruptError, ReleaseManifest, build, open_releases
from longtail.index.release import index_files
from longtail.index.search.faiss_index import FaissIndex
from tests.index.conftest import KINDS

ROOT = Path(__file__).parents[2]
SMAPS = Path("/proc/self/smaps")

SEARCHING = """
import sys
from pathlib import Path
import numpy as np
from longtail.index import open_releases
release = open_releases(Path(sys.argv[1])).open(sys.argv[2])
queries = release.bundle.augmentation.queries(np.array(release.bundle.calibration_queries), 0.5)
release.searcher.search(queries, 300)
print("searched", flush=True)
sys.stdin.readline()
kilobytes = {}
for line in Path("/proc/self/smaps").read_text().splitlines():
    word, *rest = line.split()
    if not word.endswith(":"):
        mapped = rest[4].endswith((".faiss", ".rows.npy")) if len(rest) > 4 else False
    elif mapped and rest[-1] == "kB":
        kilobytes[word] = kilobytes.get(word, 0) + int(rest[0])
print(kilobytes["Rss:"], kilobytes["Pss:"], kilobytes["Private_Dirty:"])
"""


def search(release: Release) -> np.ndarray:
    queries = release.bundle.augmentation.queries(release.bundle.calibration_queries, 0.5)
    return release.searcher.search(queries, 20)[1]


@pytest.mark.process
@pytest.mark.skipif(not SMAPS.exists(), reason="reads /proc/PID/smaps")
@pytest.mark.parametrize("spec", [pytest.param("ivf_sq", marks=pytest.mark.nightly), "ivf_flat"])
def test_two_processes_share_the_pages(spec: str, opened: Callable[[str], Release]) -> None:
    path = opened(spec).path
    command = [sys.executable, "-c", SEARCHING, str(path.parent), path.name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as running:
        processes = [running.enter_context(subprocess.Popen(command, cwd=ROOT, **pipes)) for _ in range(2)]  # type: ignore[call-overload]
        for process in processes:
            assert process.stdout.readline() == "searched\n"
        first, _ = processes[0].communicate("\n")
    rss, pss, dirty = map(int, first.split())
    size = sum(file.stat().st_size for file in (path / "index").glob("*.faiss")) // 1024
    assert rss > 0.9 * size
    assert pss < 0.7 * rss
    assert dirty == 0


@pytest.mark.parametrize("spec", KINDS)
def test_a_mapped_index_answers_as_a_copy_of_it(
    spec: str, opened: Callable[[str], Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = opened(spec)
    releases = open_releases(release.path.parent)
    assert np.array_equal(search(release), search(releases.verify(release.name)))
    # As a FAISS without the flag would.
    monkeypatch.setattr(index_files, "_MAP", 0)
    assert np.array_equal(search(release), search(releases.open(release.name)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["flat", "ivf_flat"])
def test_an_opened_release_answers_after_a_prune(spec: str, bundle_path: Path, tmp_path: Path) -> None:
    for name in ("old", "new"):
        build(bundle_path, tmp_path, spec=IndexSpec(spec), name=name)
    releases = open_releases(tmp_path)
    old = releases.open("old")
    expected = search(releases.verify("old"))
    assert releases.prune(keep=1) == ["old"]
    assert not old.path.exists()
    assert np.array_equal(search(old), expected)


@pytest.mark.parametrize("spec", ["ivf_flat", "ivf_sq", "ivf_fastscan"])
def test_a_truncated_file_is_not_published_even_with_its_checksum(
    spec: str, opened: Callable[[str], Release], tmp_path: Path
) -> None:
    """FAISS's mapping reader may read beyond the end of such a file; the copying one refuses it."""
    release, file = opened(spec), tmp_path / "index.faiss"
    content = (release.path / "index" / "index.faiss").read_bytes()
    for size in range(0, len(content), len(content) // 40):
        file.write_bytes(content[:size])
        with pytest.raises(ReleaseCorruptError, match="cannot read this index"):
            index_files._read_faiss(file, release.searcher.labels, mapped=False)


@pytest.mark.parametrize("spec", KINDS)
def test_mapped_lists_equal_the_index(spec: str, opened: Callable[[str], Release]) -> None:
    index = opened(spec).searcher.index
    if index.has_lists:
        assert not index.lists.flags.owndata
        assert np.array_equal(index.lists, FaissIndex(index.kind, index.factory, index.index).lists)


@pytest.mark.parametrize("file", ["index/lists.npy"])
@pytest.mark.parametrize("change", ["beyond", "below", "shorter", "another type"])
def test_invalid_list_numbers_are_refused(file: str, change: str, bundle_path: Path, tmp_path: Path) -> None:
    build(bundle_path, tmp_path, spec=IndexSpec("ivf_flat"), name="good")
    path = tmp_path / "good" / file
    numbers = np.load(path)
    if change == "another type":
        numbers = numbers.astype(np.int16)
    elif change == "shorter":
        numbers = numbers[:-1]
    else:
        numbers[7] = -1 if change == "below" else 600
    np.save(path, numbers)
    manifest = ReleaseManifest.model_validate_json((tmp_path / "good" / "release.json").read_bytes())
    record = FileRecord(sha256=file_sha256(path), bytes=path.stat().st_size)
    sealed = manifest.model_copy(update={"files": {**manifest.files, file: record}}).sealed()
    (tmp_path / "good" / "release.json").write_text(sealed.model_dump_json())
    with pytest.raises(ReleaseCorruptError, match=rf"{file}: expected int(32|64) \["):
        open_releases(tmp_path).open("good")
