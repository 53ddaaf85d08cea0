"""Give DuckDB file systems whose files several threads may read at once. Needs the extra `remote`."""

from __future__ import annotations

import threading
from typing import IO, Any

from fsspec import AbstractFileSystem

_METHODS = ("exists", "glob", "info", "isdir", "isfile", "ls", "modified", "size")


class SharedFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Wrap a file system for DuckDB's threads, which share open files."""

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
    """File object with one read position per thread."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._lock, self._thread = file, threading.Lock(), threading.local()

    def seek(self, position: int) -> int:
        """Set the thread's position, in bytes."""
        self._thread.position = position
        return position

    def tell(self) -> int:
        """Return the thread's position."""
        return getattr(self._thread, "position", 0)

    def read(self, size: int = -1) -> bytes:
        """Read from the thread's position."""
        position = self.tell()
        with self._lock:
            self._file.seek(position)
            content = self._file.read(size)
        self._thread.position = position + len(content)
        return content

    def close(self) -> None:
        """Close the file."""
        self._file.close()
