"""Keep releases in a directory; `RemoteReleases` has the same methods for an object store."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtail.bundle.store import refuse_existing, remove_stale, replace_file
from longtail.index.errors import LongtailIndexError, ReleaseNotFoundError
from longtail.index.release.pointers import Move, Pointers
from longtail.index.release.release import CURRENT, check_name

_LOCK = ".lock"


class LocalReleases:
    """The releases in a directory; a directory that does not exist yet holds none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def names(self) -> list[str]:
        """Get every release's name, sorted."""
        if not self.directory.is_dir():
            return []
        return sorted(path.name for path in self.directory.iterdir() if path.is_dir() and not path.name.startswith("."))

    def pointers(self) -> Pointers:
        """Read `CURRENT`; raises ReleaseCorruptError, or OSError where it cannot be read."""
        try:
            content = (self.directory / CURRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return Pointers()
        return Pointers.parse(content, str(self.directory / CURRENT))

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """Read `CURRENT` to change it, after waiting for other writers; raises ReleaseNotFoundError."""
        if not self.directory.is_dir():
            raise ReleaseNotFoundError(f"{self}: expected a directory of releases, found none")
        with (self.directory / _LOCK).open("w") as lock:
            # The system drops this lock when the process dies. The lock file must stay: two files would be two locks.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.pointers(), lambda after: replace_file(self.directory / CURRENT, after.content())

    def fetch(self, name: str) -> Path:
        """Get the directory of a release; raises ReleaseNameError or ReleaseNotFoundError."""
        path = self.directory / check_name(name)
        if not path.is_dir():
            raise ReleaseNotFoundError.of(name, self.names(), str(self))
        return path

    @contextmanager
    def manifests(self, name: str) -> Iterator[Path]:
        """Yield the directory of a release; raises ReleaseNameError or ReleaseNotFoundError."""
        yield self.fetch(name)

    def refuse_existing(self, name: str) -> None:
        """Raise BundleExistsError if there is a release of that name."""
        refuse_existing(self.directory / name)

    def pull(self, file: str) -> None:
        """Do nothing: a small file of the releases directory is already local."""

    def complete(self, name: str) -> None:
        """Do nothing: a written release is already in its final place."""

    def upload(self, path: Path) -> None:
        """Raise LongtailIndexError: a directory is no target for uploads."""
        raise LongtailIndexError(f"upload of {path.name}: expected the URL of an object store, received {self}")

    def delete(self, name: str) -> None:
        """Delete a release if it exists."""
        # The rename hides it in one step, so that no reader sees a half-deleted release.
        hidden = self.directory / f".{name}.{os.getpid()}.pruned.tmp"
        with suppress(FileNotFoundError):  # a prune that was killed, or another one, has deleted it already
            (self.directory / name).rename(hidden)
            shutil.rmtree(hidden)

    def abandoned(self) -> list[str]:
        """Delete the hidden leftovers of killed builds; returns no names, as no release is involved."""
        remove_stale(self.directory)
        return []
