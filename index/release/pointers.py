"""Record in the file `CURRENT` which releases serve, served before, and get shadow traffic.

The file is replaced in one step, so neither a reader nor a crash ever sees a part of a change. In a directory, writers
take turns through a lock that the system releases when a process dies. At an object store, a writer replaces exactly
the version that it has read, by ETag, and fails if another writer was faster.
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
    """Releases published up to and including `current`, oldest first; the last hundred."""
    forced: Name | None = None
    """A release published by force or by rollback: a service loads it even if it refuses requests of present
    clients."""
    is_held: bool = False
    """Whether `rollback` chose `current`: nothing is published by itself until the next publish."""
    staged: Name | None = None
    """The release that gets shadow traffic."""
    deleting: tuple[Name, ...] = ()
    """Releases that a prune is deleting from an object store; they must not be published any more."""
    by: str = ""
    """Host, process and a random number of the writer, so that no two writes have the same content."""

    @classmethod
    def parse(cls, content: bytes, source: str) -> Pointers:
        """Parse the content of `CURRENT`; raises ReleaseCorruptError."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ReleaseCorruptError(
                f"{source}: expected what is published, as JSON of version 1, found {content[:40]!r}… "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']})"
            ) from error

    def content(self) -> bytes:
        """Return the bytes to write, with a new `by`."""
        # Equal contents would have equal ETags, and a lost race could pass for a win.
        by = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex}"
        written = self.model_copy(update={"by": by, "history": self.history[-_LONGEST_HISTORY:]})
        return (written.model_dump_json(indent=2, exclude_defaults=True) + "\n").encode()


WritePointers = Callable[[Pointers], None]
"""Function that replaces `CURRENT`."""
