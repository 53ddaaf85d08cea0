"""Give DuckDB file systems whose files several threads may read at once. Needs the extra `remote`."""

from __future__ import annotations

import threading
from typing import IO, Any

from fsspec import AbstractFileSystem

_METHODS = ("exists", "glob", "info", "isdir", "isfile", "ls", "modified", "size")


class SharedFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Wrap a file system for DuckDB, whose threads seek and read in one open file without a lock."""

    cachable = False

    def __init__(self, system: AbstractFileSystem) -> None:
        super().__init__()
        self.protocol, self._system = system.protocol, system
        for name in _METHODS:
            setattr(self, name, getattr(system, name))

    def open(self, path: str, mode: str = "rb", **options: Any) -> SharedFile:
        """Open a file to read."""
        return SharedFile(self._system.open(path, mode, **options))


class SharedFile:
    """Keep a place for every thread that reads one file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._lock, self._own = file, threading.Lock(), threading.local()

    def seek(self, place: int) -> int:
        """Go to a place, in bytes from the beginning."""
        self._own.place = place
        return place

    def tell(self) -> int:
        """Return the thread's place."""
        return getattr(self._own, "place", 0)

    def read(self, size: int = -1) -> bytes:
        """Read on from the thread's place."""
        place = self.tell()
        with self._lock:
            self._file.seek(place)
            content = self._file.read(size)
        self._own.place = place + len(content)
        return content

    def close(self) -> None:
        """Close the file."""
        self._file.close()
