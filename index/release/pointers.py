"""Which release serves, which did, and which is asked unseen: as files of a directory, or as an object's revisions.

Of a directory `CURRENT` is the only truth; `HISTORY` holds the names published up to it, oldest first, so that
`rollback` knows where to go. Each is replaced in one step, in an order that leaves every crash in between consistent:
names in HISTORY after CURRENT's last place were never reached. Writers take turns through a lock that the system
releases when a process dies; readers need none.

An object store has no locks, and no two objects change together. There `CURRENT/` holds revisions, each of which says
all: the highest is the truth, and whoever creates the next one first has made it. It was made from the one before, so
a second publisher, who has looked at the same one, is told that it came too late.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from longtail.bundle import replace_file
from longtail.bundle.objects import ObjectStore
from longtail.index.errors import (
    LongtailIndexError,
    PublishedMeanwhileError,
    ReleaseCorruptError,
    ReleaseNotFoundError,
    ReleaseVersionError,
)

CURRENT, HISTORY, FORCED, STAGED = "CURRENT", "HISTORY", "FORCED", "STAGED"
_LOCK = ".lock"
_VERSION = 1
_DIGITS = 12


class Pointers(BaseModel):
    """What is pointed to, all of one moment."""

    model_config = ConfigDict(frozen=True)

    current: str | None = None
    """The release that serves."""
    history: tuple[str, ...] = ()
    """Published up to and including it, oldest first."""
    forced: str | None = None
    """One that was published by force, or gone back to: a service takes it although it refuses what clients send."""
    staged: str | None = None
    """One that a service asks unseen, beside the one that serves."""
    deleting: tuple[str, ...] = ()
    """Being deleted from an object store: not to be published any more."""


Move = Callable[[Pointers], None]
"""Writes what is pointed to from now on."""


class PointerStore(Protocol):
    """Where pointers are."""

    def read(self) -> Pointers:
        """What is pointed to; names as they stand there.

        Raises:
            OSError: it cannot be read.
            ReleaseCorruptError, ReleaseVersionError: it is not what was written, or a newer Longtail's.
        """

    def turn(self) -> AbstractContextManager[tuple[Pointers, Move]]:
        """What is pointed to, and how to change that, with nobody else changing it in between.

        Raises:
            ReleaseNotFoundError: there is no such directory.
            PublishedMeanwhileError: on moving: somebody else has.
            LongtailIndexError: on moving: the store cannot keep two from doing so at once.
            OSError: it cannot be read, or written.
        """


class PointerFiles:
    """The pointers in a directory of releases.

    Args:
        root: the directory; without one nothing is pointed to.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self) -> Pointers:
        """As `PointerStore.read`."""
        current = self._name(CURRENT)
        return Pointers(
            current=current,
            history=tuple(self._history(current)),
            forced=self._name(FORCED),
            staged=self._name(STAGED),
        )

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """As `PointerStore.turn`; waits for others.

        Raises:
            ReleaseNotFoundError: there is no such directory.
        """
        if not self._root.is_dir():
            raise ReleaseNotFoundError(f"{self._root}: expected a directory of releases, found none")
        with (self._root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read(), self.write

    def write(self, after: Pointers) -> None:
        """Write what is pointed to, in an order that every reader and every crash can live with."""
        before = self.read()
        if after.forced != before.forced:
            self._write(FORCED, after.forced)
        if after.current != before.current:
            # Forward HISTORY goes first: until CURRENT follows, the new name stands beyond its place and counts for
            # nothing. Back, what a killed publish left there would count again where it is the name to go back to.
            forward = len(after.history) > len(before.history)
            self._write(HISTORY, *(after if forward else before).history)
            self._write(CURRENT, after.current)
            if not forward:
                self._write(HISTORY, *after.history)
        if after.staged != before.staged:
            self._write(STAGED, after.staged)

    def _name(self, file: str) -> str | None:
        try:
            return (self._root / file).read_bytes().decode("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _history(self, current: str | None) -> list[str]:
        if current is None:
            return []
        names = list(self._lines(HISTORY))
        while names and names[-1] != current:
            names.pop()
        return names or [current]

    def _lines(self, file: str) -> tuple[str, ...]:
        return tuple((self._name(file) or "").split())

    def _write(self, file: str, *names: str | None) -> None:
        if None in names:
            (self._root / file).unlink(missing_ok=True)
        else:
            replace_file(self._root / file, "".join(f"{name}\n" for name in names).encode())


class PointerObjects:
    """The pointers at an object store, as `CURRENT/000000000001.json` and so on.

    Args:
        store: of the releases.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._number, self._content = 0, b""
        """The highest revision that is known; 0 where there is none."""

    def read(self) -> Pointers:
        """As `PointerStore.read`. Once it is known what there is, one request for what may come next.

        Raises:
            StorageError: the store does not answer.
            ReleaseCorruptError, ReleaseVersionError: as its.
        """
        if self._number == 0 and (number := max(map(self._number_of, self._store.files(CURRENT)), default=0)):
            if (content := self._revision(number)) is None:
                raise ReleaseCorruptError(
                    f"{self._store.url}/{self._path(number)}: expected what is listed, found none"
                )
            self._number, self._content = number, content
        while (content := self._revision(self._number + 1)) is not None:
            self._number, self._content = self._number + 1, content
        return self._parsed(self._content) if self._number else Pointers()

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """As `PointerStore.turn`; waits for nobody, and the second to move is refused."""
        now = self.read()
        number = self._number

        def move(after: Pointers) -> None:
            nonlocal number
            self._write(number + 1, after)
            number += 1

        yield now, move

    def _write(self, number: int, pointers: Pointers) -> None:
        self._check_store()
        said = {
            "schema_version": _VERSION,
            **pointers.model_dump(exclude_defaults=True),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "by": f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}",
        }
        if not self._store.create(self._path(number), (json.dumps(said, indent=2) + "\n").encode()):
            raise PublishedMeanwhileError(
                f"{self._store.url}: expected nobody else to change what is published, found that somebody did "
                "meanwhile; nothing was changed, look at it and run this again"
            )

    def _check_store(self) -> None:
        """Refuse a store that would let two publishers write one revision; some ignore the condition."""
        path = self._path(0)
        if not self._store.create(path, b"{}\n") or not self._store.refuses_to_replace(path):
            raise LongtailIndexError(
                f"{self._store.url}: expected a store that refuses to write an object which is there (a conditional "
                "write, If-None-Match), found one that does; two could publish at once, nothing was changed"
            )

    def _revision(self, number: int) -> bytes | None:
        return self._store.read(self._path(number)) if number else None

    def _parsed(self, content: bytes) -> Pointers:
        place = f"{self._store.url}/{self._path(self._number)}"
        try:
            said = json.loads(content)
            if (version := said.pop("schema_version")) != _VERSION:
                raise ReleaseVersionError(
                    f"{place}: schema version {version!r}, this installation reads {_VERSION}: upgrade Longtail"
                )
            return Pointers(**said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReleaseCorruptError(
                f"{place}: expected what is published, found {content[:40]!r}… ({error})"
            ) from error

    @staticmethod
    def _path(number: int) -> str:
        return f"{CURRENT}/{number:0{_DIGITS}}.json"

    @staticmethod
    def _number_of(name: str) -> int:
        stem = name.removesuffix(".json")
        return int(stem) if stem.isdecimal() else 0
