"""Of the processes of a host, the one that does something for all."""

from __future__ import annotations

import fcntl
from io import TextIOWrapper
from pathlib import Path


class SoleProcess:
    """The first process that asks is it, until it lets go or ends; then the next that asks.

    Args:
        path: of a file that they lock; made if need be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIOWrapper | None = None

    @property
    def is_this(self) -> bool:
        """Whether this process is it."""
        return self._lock is not None

    def claim(self) -> bool:
        """Whether this process is it from now on; raises OSError if the file cannot be made."""
        if self._lock is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def let_go(self) -> None:
        """Another may be it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
