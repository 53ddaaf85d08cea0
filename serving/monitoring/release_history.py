"""Which release served when, in a small file that every worker may write, replaced in one step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from longtail.bundle import replace_file

logger = logging.getLogger(__name__)
_LONGEST = 100
_Seconds = Annotated[float, Field(ge=0, le=1e11)]


@dataclass(frozen=True, slots=True)
class ReleaseInterval:
    """A time that one release was in service, in seconds since 1970; `until` is None of the one in service."""

    name: str
    since: _Seconds
    until: _Seconds | None = None


_INTERVALS = TypeAdapter(list[ReleaseInterval])


class ReleaseHistory:
    """The last 100 intervals that releases were in service, oldest first.

    Args:
        path: of the file; one that cannot be read counts as empty, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, name: str, now: float) -> None:
        """Note that `name` is in service from `now` on; of several workers, or clocks, the earliest says when."""
        intervals = self.read()
        if intervals and intervals[-1].name == name:
            if intervals[-1].since <= now:
                return
            del intervals[-1]
        elif intervals:
            intervals[-1] = replace(intervals[-1], until=now)
        intervals = [*intervals, ReleaseInterval(name, now)][-_LONGEST:]
        replace_file(self._path, _INTERVALS.dump_json(intervals))

    def read(self) -> list[ReleaseInterval]:
        """Return all intervals, oldest first."""
        try:
            return _INTERVALS.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError as error:
            logger.warning("%s: expected a list of releases and times, started again: %s", self._path, error)
            return []
