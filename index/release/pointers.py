"""Which release serves, which did, and which gets shadow traffic: one small file, `CURRENT`, beside the releases.

It says all at once and is replaced in one step, so a reader or a crash never sees a part. In a directory writers take
turns through a lock that the system releases when a process dies. At an object store a writer replaces the version that
it has read, by ETag, and comes too late if somebody else has replaced it meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from longtail.index.errors import ReleaseCorruptError
from longtail.index.release.release import check_name

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
