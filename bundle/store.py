"""Write directories and small files atomically, and hash files.

Every write goes to a hidden temporary sibling, which is flushed to disk and then renamed. A crash at any instant leaves
the target absent (or unchanged) and at worst a hidden `.NAME.*.tmp` sibling, which the next write to the same target
removes.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.bundle.errors import BundleExistsError


@contextmanager
def atomic_directory(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` if the block ends without an exception; creates parents.

    Raises BundleExistsError if `target` exists, before the block or at its end, unless `replace` is set.
    """
    if not replace:
        refuse_existing(target)
    with working_directory(target) as working:
        yield working
        # Content must be on disk before its name: a power cut could otherwise leave a complete name without content.
        for folder, _, files in os.walk(working):
            for name in (*files, "."):
                fsync_path(Path(folder, name))
        if replace:
            shutil.rmtree(target, ignore_errors=True)
        try:
            os.rename(working, target)
        except OSError as error:
            # Another process has created the target since the check above.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                refuse_existing(target)
            raise
        # The new name is durable only once its parent directory is on disk.
        fsync_path(target.parent)


@contextmanager
def working_directory(target: Path) -> Iterator[Path]:
    """Yield an empty hidden sibling of `target`; after a crash, the next call removes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target.parent, f".{glob.escape(target.name)}.*.tmp")
    # The process id in the name tells `remove_stale` whether the writer still runs.
    working = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".tmp", dir=target.parent))
    working.chmod(0o755)  # mkdtemp gives 0700, which a service of another user could not read
    try:
        yield working
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(working)


def remove_stale(parent: Path, pattern: str = ".*.tmp") -> None:
    """Delete temporary siblings in `parent` whose process is gone."""
    for stale in parent.glob(pattern):
        if _is_running(stale):
            continue
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def refuse_existing(target: Path) -> None:
    """Raise BundleExistsError if `target` exists."""
    if target.exists() or target.is_symlink():
        raise BundleExistsError(
            f"{target} already exists: expected a path that is free; nothing was changed; choose another, or delete it"
        )


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a small file in one step: readers see either the old or the new content."""
    handle, working = tempfile.mkstemp(prefix=f".{path.name}.{os.getpid()}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(working, mode)  # mkstemp gives 0600
        os.replace(working, path)
    # After Ctrl-C, too, no working file may stay.
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(working)
        raise
    fsync_path(path.parent)


def link_or_copy(file: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system cannot link; raises FileNotFoundError."""
    # A link to a symbolic link would break with the path that it names.
    file = file.resolve()
    with suppress(OSError):
        os.link(file, target)
        return
    shutil.copyfile(file, target)


def file_sha256(path: Path) -> str:
    """Compute the hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Flush one file or directory entry to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_running(working: Path) -> bool:
    """Return whether the process that created a temporary directory still runs."""
    process_id = working.name.removesuffix(".tmp").split(".")[-2]
    if not process_id.isdigit():
        return False
    try:
        os.kill(int(process_id), 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:  # the process runs as another user
        return True
    return True
