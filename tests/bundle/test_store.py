import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtail.bundle import BundleExistsError
from longtail.bundle.store import atomic_directory, remove_stale, replace_file

WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from longtail.bundle.store import atomic_directory
with atomic_directory(Path(sys.argv[1])) as working:
    (working / "half.bin").write_bytes(b"half of it")
    print("writing", flush=True)
    time.sleep(60)
"""


def write(target: Path, content: bytes = b"whole", *, then: Callable[[], object] = lambda: None) -> None:
    with atomic_directory(target) as working:
        (working / "file").write_bytes(content)
        then()


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def start_writer(tmp_path: Path) -> Callable[[], "subprocess.Popen[str]"]:
    """Starts a process that is in the middle of writing `tmp_path / "target"`."""

    def start() -> subprocess.Popen[str]:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITE_AND_WAIT, str(tmp_path / "target")], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.stdout.close()
        return writer

    return start


def kill(writer: "subprocess.Popen[str]") -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()


def test_directory_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "parents" / "target"

    with atomic_directory(target) as working:
        (working / "sub").mkdir()
        (working / "sub" / "file").write_bytes(b"content")
        assert not target.exists()

    assert (target / "sub" / "file").read_bytes() == b"content"
    assert names(target.parent) == ["target"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_exception_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "target", then=lambda: 1 / 0)

    assert names(tmp_path) == []


@pytest.mark.process
def test_a_killed_writer_leaves_no_target_and_the_next_write_cleans_up(
    tmp_path: Path, start_writer: Callable[[], "subprocess.Popen[str]"]
) -> None:
    kill(start_writer())

    (leftover,) = names(tmp_path)
    assert leftover.startswith(".target.")
    assert leftover.endswith(".tmp")

    write(tmp_path / "target")
    assert names(tmp_path) == ["target"]


@pytest.mark.process
def test_directory_of_a_running_writer_stays(
    tmp_path: Path, start_writer: Callable[[], "subprocess.Popen[str]"]
) -> None:
    writer = start_writer()
    try:
        (working,) = names(tmp_path)
        write(tmp_path / "target")
        assert (tmp_path / working / "half.bin").read_bytes() == b"half of it"
    finally:
        kill(writer)

    assert (tmp_path / "target" / "file").read_bytes() == b"whole"


def test_stale_files_and_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.999999999.x.tmp").mkdir()
    (tmp_path / ".a.999999999.x.tmp" / "file").touch()
    (tmp_path / ".CURRENT.abc.tmp").touch()
    (tmp_path / f".b.{os.getpid()}.x.tmp").mkdir()
    (tmp_path / "kept.tmp").touch()

    remove_stale(tmp_path)

    assert names(tmp_path) == [f".b.{os.getpid()}.x.tmp", "kept.tmp"]


@pytest.mark.parametrize("existing", ["file", "directory", "dangling link"])
def test_existing_target_is_refused_unchanged(tmp_path: Path, existing: str) -> None:
    target = tmp_path / "target"
    if existing == "file":
        target.write_bytes(b"mine")
    elif existing == "directory":
        target.mkdir()
    else:
        target.symlink_to("nowhere")
    before = target.lstat()

    with pytest.raises(
        BundleExistsError, match=f"{target} already exists: .*nothing was changed; choose another, or delete it"
    ):
        write(target)

    assert target.lstat() == before
    assert names(tmp_path) == ["target"]


def test_concurrent_target_wins(tmp_path: Path) -> None:
    target = tmp_path / "target"

    with pytest.raises(BundleExistsError):
        write(target, b"late", then=lambda: write(target, b"first"))

    assert (target / "file").read_bytes() == b"first"
    assert names(tmp_path) == ["target"]


def test_full_disk_while_writing_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "target", then=no_space)

    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_full_disk_while_flushing_leaves_no_files(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, step, no_space)

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "target")

    assert names(tmp_path) == []


def test_every_file_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name), fsync(handle))
    )
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))

    write(tmp_path / "target")

    assert events.index("file") < events.index("rename")
    assert events[-1] == tmp_path.name


def test_a_small_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    pointer = tmp_path / "CURRENT"

    replace_file(pointer, b"one")
    held_open = pointer.open("rb")
    replace_file(pointer, b"two")

    with held_open:
        assert held_open.read() == b"one"
    assert pointer.read_bytes() == b"two"
    assert pointer.stat().st_mode & 0o777 == 0o644
    assert names(tmp_path) == ["CURRENT"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_replacement_keeps_the_content(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = tmp_path / "CURRENT"
    pointer.write_bytes(b"old")
    monkeypatch.setattr(os, step, no_space)

    with pytest.raises(OSError, match="No space left"):
        replace_file(pointer, b"new")

    assert pointer.read_bytes() == b"old"
    assert names(tmp_path) == ["CURRENT"]
