"""Which releases were verified whole and have not been written to since, so that no start reads every byte again.

A file that is written, replaced or copied has another time or inode, and then its release is verified like one that
nobody knows. What leaves neither, a disk that forgets, only reading finds: a service reads what it opened on the
strength of a record again while it answers. Times of change are not looked at: a bundle's files are hard links, and
change with every link that comes or goes.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from longtail.bundle import remove_stale, replace_file

_DIRECTORY, _OPENING = "verified", ".opening"
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
        found = {}
        for folder, _, names in os.walk(self._release, followlinks=True):
            for path in (Path(folder, name) for name in names):
                # Of a link to nowhere, what there is.
                status = path.stat() if path.exists() else path.lstat()
                place = path.relative_to(self._release).as_posix()
                found[place] = [status.st_size, status.st_ino, status.st_mtime_ns]
        return found

    def holds(self) -> bool:
        """Whether the release was verified as it lies there now, and no process has ended while it opened it so."""
        known = self._read()
        if known.get("version") != _VERSION or not known.get("files"):
            return False
        if self._ended_while_opening():
            self.forget()
            return False
        return bool(known["files"] == self.stamps())

    @property
    def due(self) -> bool:
        """Whether the release is trusted by a record so old that a service should read it again."""
        read_at = self._read().get("read_at")
        return read_at is not None and not 0 <= time.time() - read_at < _READ_AGAIN_SECONDS

    @property
    def damage(self) -> str | None:
        """What `note_damage` said."""
        return self._read().get("damage")

    def note(self, stamps: Stamps, began: float) -> None:
        """The release was verified whole.

        Args:
            stamps: of before.
            began: when they were taken, seconds since 1970.
        """
        newest = max((written for _, _, written in stamps.values()), default=0) / 1e9
        # Whatever is written from now on has another time than one in the future.
        if newest > began or began - newest >= _SETTLED_SECONDS:
            self._write({"version": _VERSION, "read_at": began, "files": stamps})
        else:
            self.forget()

    def note_damage(self, message: str) -> None:
        """The release is not what was verified."""
        self.forget()
        self._write({"version": _VERSION, "damage": message})

    def forget(self) -> None:
        """Nothing is known of the release."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """What ends the process in here, as a damaged file that is mapped may, ends the trust in the record, too."""
        with ExitStack() as stack:
            with suppress(OSError):
                mark = self._file.with_name(f".{self._release.name}.{uuid4().hex}{_OPENING}")
                stack.callback(mark.unlink, missing_ok=True)
                # The lock goes with the process, however it ends.
                fcntl.flock(stack.enter_context(mark.open("w")), fcntl.LOCK_EX)
            yield

    @contextmanager
    def alone(self, *, wait: bool = False) -> Iterator[bool]:
        """Whether no other process is in here for this release; where the directory takes no lock, nobody can tell.

        Args:
            wait: until it is so.
        """
        with ExitStack() as stack:
            alone = True
            try:
                self._file.parent.mkdir(exist_ok=True)
                lock = stack.enter_context(self._file.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            except OSError:
                pass
            yield alone

    def _ended_while_opening(self) -> bool:
        ended = False
        # Of so many digits: another release's name may begin with this one's and a dot.
        for path in self._file.parent.glob(f".{glob.escape(self._release.name)}.{'?' * 32}{_OPENING}"):
            with suppress(OSError), path.open() as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                ended = True
        return ended

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: Mapping[str, Any]) -> None:
        # On a full disk the record is not written: the release is then verified at every start.
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            remove_stale(self._file.parent)
            replace_file(self._file, json.dumps(known).encode())
            for other in self._file.parent.iterdir():
                if not other.name.startswith(".") and not (self._release.parent / other.stem).is_dir():
                    other.unlink(missing_ok=True)
