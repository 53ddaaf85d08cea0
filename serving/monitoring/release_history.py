"""Which release served when: a small file that every worker may write, replaced in one step."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from longtail.bundle import replace_file

logger = logging.getLogger(__name__)
_LONGEST = 100
_Seconds = Annotated[float, Field(ge=0, le=1e11)]


@dataclass(frozen=True, slots=True)
class ReleaseInterval:
    """A time that one release was in service.

    Attributes:
        name: the release's.
        since, until: seconds since 1970; `until` is None of the one in service.
    """

    name: str
    since: _Seconds
    until: _Seconds | None


_INTERVALS = TypeAdapter(list[ReleaseInterval])


class ReleaseHistory:
    """The last 100 intervals that releases were in service, oldest first.

    Args:
        path: of the file; one that cannot be read is put aside as `NAME.aside`, and the history is started empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, name: str, now: float) -> bool:
        """`name` is in service from `now` on; False if it was already: of several workers the first says when."""
        intervals = self.read()
        if intervals and intervals[-1].name == name:
            return False
        if intervals:
            intervals[-1] = replace(intervals[-1], until=now)
        intervals = [*intervals, ReleaseInterval(name, now, None)][-_LONGEST:]
        replace_file(self._path, json.dumps([asdict(interval) for interval in intervals]).encode())
        return True

    def read(self) -> list[ReleaseInterval]:
        """All intervals, oldest first."""
        try:
            return _INTERVALS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            aside = self._path.with_name(f"{self._path.name}.aside")
            logger.warning(
                "%s: expected a list of releases and times: %s; put aside as %s", self._path, error, aside.name
            )
            with suppress(FileNotFoundError):
                os.replace(self._path, aside)
            return []
