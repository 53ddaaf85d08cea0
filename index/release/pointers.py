"""Which release serves, which did, and which gets shadow traffic: one small file, `CURRENT`, beside the releases.

It says all at once and is replaced in one step, so a reader or a crash never sees a part. In a directory writers take
turns through a lock that the system releases when a process dies. At an object store a writer replaces the version that
it has read, by ETag, and comes too late if somebody else has replaced it meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Literal, Protocol
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from longtail.bundle import replace_file
from longtail.bundle.objects import ObjectStore, Version
from longtail.index.errors import (
    LongtailIndexError,
    PublishedMeanwhileError,
    ReleaseCorruptError,
    ReleaseNotFoundError,
)
from longtail.index.release.release import CURRENT, check_name

_LOCK = ".lock"
_PROBE = f"{CURRENT}.probe"
_LONGEST_HISTORY = 100

Name = Annotated[str, AfterValidator(check_name)]


class Pointers(BaseModel):
    """The content of `CURRENT`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    current: Name | None = None
    """The release that serves."""
    history: tuple[Name, ...] = ()
    """Releases published up to and including it, oldest first; the last hundred."""
    forced: Name | None = None
    """A release that was published by force, or gone back to: a service takes it although it refuses what clients
    send."""
    staged: Name | None = None
    """The release that gets shadow traffic."""
    deleting: tuple[Name, ...] = ()
    """Releases that a prune deletes from an object store: not to be published any more."""
    by: str = ""
    """Host, process and a name of its own of who wrote this, so that no two writers write the same."""

    @classmethod
    def parse(cls, content: bytes, place: str) -> Pointers:
        """Read the content of a place; raises ReleaseCorruptError where it is not what was written."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ReleaseCorruptError(
                f"{place}: expected what is published, as JSON of version 1, found {content[:40]!r}… "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']})"
            ) from error

    def content(self) -> bytes:
        """What is written of it."""
        by = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}"
        written = self.model_copy(update={"by": by, "history": self.history[-_LONGEST_HISTORY:]})
        return (written.model_dump_json(indent=2, exclude_defaults=True) + "\n").encode()


Move = Callable[[Pointers], None]
"""Writes what is pointed to from now on."""


class PointerStore(Protocol):
    """Where `CURRENT` is."""

    def read(self) -> Pointers:
        """Read it; raises ReleaseCorruptError, or OSError where it cannot be read."""

    def turn(self) -> AbstractContextManager[tuple[Pointers, Move]]:
        """Read it to change it, with nobody else changing it in between.

        Raises:
            ReleaseNotFoundError: there is no such directory.
            PublishedMeanwhileError: on moving: somebody else has.
            LongtailIndexError: on moving: the store cannot keep two from doing so at once.
            OSError: it cannot be read, or written.
        """


class PointerFile:
    """`CURRENT` in a directory of releases.

    Args:
        root: the directory; without one nothing is published.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self) -> Pointers:
        """As `PointerStore.read`."""
        try:
            content = (self._root / CURRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return Pointers()
        return Pointers.parse(content, str(self._root / CURRENT))

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """As `PointerStore.turn`; waits for others."""
        if not self._root.is_dir():
            raise ReleaseNotFoundError(f"{self._root}: expected a directory of releases, found none")
        with (self._root / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read(), lambda after: replace_file(self._root / CURRENT, after.content())


class PointerObject:
    """`CURRENT` at an object store.

    Args:
        store: of the releases.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self) -> Pointers:
        """As `PointerStore.read`, by one request."""
        return self._parsed(self._store.read_version(CURRENT))

    @contextmanager
    def turn(self) -> Iterator[tuple[Pointers, Move]]:
        """As `PointerStore.turn`; waits for nobody, and the second to move is refused."""
        found = self._store.read_version(CURRENT)

        def move(after: Pointers) -> None:
            self._check_store()
            content = after.content()
            written = (
                self._store.create(CURRENT, content)
                if found is None
                else self._store.replace(CURRENT, content, found.tag)
            )
            if not written:
                raise PublishedMeanwhileError(
                    f"{self._store.url}: somebody else has changed what is published meanwhile; nothing was changed, "
                    "look at it and run this again"
                )

        yield self._parsed(found), move

    def _parsed(self, found: Version | None) -> Pointers:
        return Pointers() if found is None else Pointers.parse(found.content, f"{self._store.url}/{CURRENT}")

    def _check_store(self) -> None:
        """Refuse a store that ignores conditions of a write: two could publish at once."""
        content = uuid4().hex.encode()
        self._store.create(_PROBE, content)
        refused = not self._store.create(_PROBE, content[::-1]) and not self._store.replace(
            _PROBE,
            content[::-1],
            {"e_tag": '"0"', "version": "1"},  # S3 and Azure compare the one, GCS the other
        )
        if not refused:
            raise LongtailIndexError(
                f"{self._store.url}: the object store must refuse to overwrite an object on condition (If-None-Match, "
                "If-Match); this one overwrote a test object. Nothing was published."
            )
