"""Which releases were verified whole and have not been written to since, so that no start reads every byte again.

A file that is written, replaced or copied has another time or inode, and then its release is verified like one that
nobody knows. What leaves neither, a disk that forgets, only reading finds: a service reads what it opened on the
strength of a record again while it answers. Times of change are not looked at: a bundle's files are hard links, and
change with every link that comes or goes.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from longtail.bundle import replace_file

_DIRECTORY = "verified"
_VERSION = 1
_SETTLED_SECONDS = 1.0
"""Age of the newest file from which on another write would show in its times."""
_READ_AGAIN_SECONDS = 3600.0

Stamps = Mapping[str, list[int]]


class Verified:
    """What is known of one release's files.

    Args:
        release: its directory.
        state: directory of the service that serves it, where the record is kept.
    """

    def __init__(self, release: Path, state: Path) -> None:
        self._release = release
        self._file = state / _DIRECTORY / f"{release.name}.json"

    def stamps(self) -> Stamps:
        """Size, inode and time of modification in ns of every file, by path below the release."""
        files = {path: path.stat() for path in sorted(self._release.rglob("*")) if path.is_file()}
        return {
            path.relative_to(self._release).as_posix(): [status.st_size, status.st_ino, status.st_mtime_ns]
            for path, status in files.items()
        }

    def holds(self) -> bool:
        """Whether the release was verified as it lies there now."""
        known = self._read()
        return known.get("version") == _VERSION and bool(known.get("files")) and known["files"] == self.stamps()

    @property
    def due(self) -> bool:
        """Whether it was read so long ago that a service should read it again."""
        return not 0 <= time.time() - self._read().get("read_at", 0.0) < _READ_AGAIN_SECONDS

    @property
    def damage(self) -> str | None:
        """What `note_damage` said."""
        return self._read().get("damage")

    def note(self, stamps: Stamps) -> None:
        """The release was verified whole after it had these stamps."""
        now, newest = time.time(), max((written for _, _, written in stamps.values()), default=0)
        if now - newest / 1e9 >= _SETTLED_SECONDS:
            self._write({"version": _VERSION, "read_at": now, "files": stamps})
        else:
            self._file.unlink(missing_ok=True)

    def note_damage(self, message: str) -> None:
        """The release is not what was verified."""
        self._write({"version": _VERSION, "damage": message})

    @contextmanager
    def alone(self, *, wait: bool = False) -> Iterator[bool]:
        """Whether no other process is in here for this release.

        Args:
            wait: until it is so; False only where the directory takes no file.
        """
        with ExitStack() as stack:
            try:
                self._file.parent.mkdir(exist_ok=True)
                lock = stack.enter_context(self._file.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except OSError:
                alone = False
            yield alone

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: Mapping[str, Any]) -> None:
        # On a full disk there is no record: the release is then verified at every start.
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, json.dumps(known).encode())
            for other in self._file.parent.iterdir():
                if not other.name.startswith(".") and not (self._release.parent / other.stem).is_dir():
                    other.unlink(missing_ok=True)
