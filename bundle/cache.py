"""What was downloaded, kept by its sha256, so that no file is downloaded twice and none is used that is not whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.bundle.errors import StorageError
from longtail.bundle.manifest import FileRecord
from longtail.bundle.objects import ObjectStore
from longtail.bundle.store import fsync_path, remove_stale, sha256_of

VARIABLE = "LONGTAIL_CACHE"
_BLOBS, _LOCK = ".blobs", ".cache.lock"
_TRIES = 3
_ORPHAN_SECONDS = 86_400.0
"""How long a file stays that nothing is made of any more: of a download that was cut off, the next goes on from it."""


class Cache:
    """A directory of downloads, which several processes may share; all of it may be deleted when none runs.

    Args:
        root: made if missing; by default what LONGTAIL_CACHE says, or `longtail` in the user's cache directory.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = _default_root() if root is None else root
        self._blobs = self.root / _BLOBS

    def directory(self, url: str) -> Path:
        """The directory of what comes from a URL; it need not be there."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:64]
        return self.root / f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"

    @contextmanager
    def locked(self, url: str) -> Iterator[Path]:
        """The directory of a URL, with no other process in here for it; the lock goes with the process."""
        directory = self.directory(url)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory

    def fetch(self, store: ObjectStore, path: str, record: FileRecord, target: Path) -> None:
        """Have an object as the file `target`: a link to what is here by its sha256, or is downloaded now.

        Args:
            store: where it is.
            path: and its path there.
            record: what it must be.
            target: must not exist; its directory is made.

        Raises:
            StorageError: the store does not answer, or has no such object, or other bytes.
            OSError: the disk is full, or not writable.
        """
        blob = self._blobs / record.sha256
        target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            if not _is(blob, record):
                self._download(store, path, record, blob)
            # Another process may find that nobody needs it.
            with suppress(FileNotFoundError):
                _link(blob, target)
                return
        raise StorageError(f"{blob}: expected a file that stays while it is linked")

    def adopt(self, file: Path, record: FileRecord) -> None:
        """Know a file that was made here and uploaded, which is what `record` says, by its sha256."""
        blob = self._blobs / record.sha256
        if not blob.exists():
            self._blobs.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                os.link(file, blob)

    @property
    def bytes(self) -> int:
        """What it takes of the disk."""
        return sum(status.st_size for _, status in self._files())

    def trim(self, limit: int | None = None) -> None:
        """Delete files that nothing is made of: of downloads that were cut off long ago, or all above `limit` bytes."""
        remove_stale(self._blobs)
        now = time.time()
        total = 0 if limit is None else self.bytes
        for path, status in sorted(self._files(), key=lambda each: each[1].st_mtime):
            over = limit is not None and total > limit
            if status.st_nlink == 1 and (over or now - status.st_mtime > _ORPHAN_SECONDS):
                path.unlink(missing_ok=True)
                total -= status.st_size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        with suppress(FileNotFoundError):
            for entry in os.scandir(self._blobs):
                with suppress(FileNotFoundError):
                    if not entry.name.startswith("."):
                        found.append((Path(entry.path), entry.stat()))
        return found

    def _download(self, store: ObjectStore, path: str, record: FileRecord, blob: Path) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{blob.name}.{os.getpid()}.", suffix=".tmp", dir=self._blobs)
        os.close(handle)
        working = Path(name)
        try:
            # Of a call that fails the store's client has tried again itself.
            store.download(path, working, record.bytes)
            if (found := sha256_of(working)) != record.sha256:
                raise StorageError(f"{store.url}/{path}: expected sha256 {record.sha256}, received bytes of {found}")
            fsync_path(working)
            working.chmod(0o444)
            os.replace(working, blob)
        finally:
            working.unlink(missing_ok=True)


def _default_root() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "longtail"


def _is(blob: Path, record: FileRecord) -> bool:
    """Whether a file is here and still what it was: a disk may have forgotten, and links share what it did."""
    try:
        if blob.stat().st_size == record.bytes and sha256_of(blob) == record.sha256:
            return True
        blob.unlink()
    except FileNotFoundError:
        pass
    return False


def _link(blob: Path, target: Path) -> None:
    """Hard-link, or copy where the file system cannot link."""
    try:
        os.link(blob, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(blob, target)
