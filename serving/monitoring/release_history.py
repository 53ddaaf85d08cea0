"""Which release served when: a small file that every worker may write, replaced in one step; or what replicas share."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from longtail.bundle import replace_file
from longtail.serving.monitoring.baseline import Baseline, load_baseline, save_baseline
from longtail.serving.monitoring.release_figures import WINDOWED
from longtail.state import Interval, ReplicaStore

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


class Beginnings:
    """Releases that went into service, until a history has them: one that replicas share may be away. Thread-safe.

    Args:
        history: is told of them, in their order.
    """

    def __init__(self, history: ReleaseHistory | SharedHistory) -> None:
        self._history = history
        self._unsaid: deque[tuple[str, float]] = deque()
        self._lock = threading.Lock()

    def add(self, name: str, now: float) -> None:
        """`name` went into service at `now`."""
        self._unsaid.append((name, now))

    def say(self) -> bool:
        """Whether the last of them was another for the history; raises StoreError, OSError, and it stays to be said."""
        is_another = False
        with self._lock:
            while self._unsaid:
                is_another = self._history.begin(*self._unsaid[0])
                self._unsaid.popleft()
        return is_another


class SharedHistory:
    """The last 100 intervals that releases were in service on any of the replicas that share a database.

    Args:
        store: what the replicas share.
        replica: this one's name.
        root: of the directories of releases, each with its baseline.
        own: what it kept before it shared; taken over where nobody has begun a release yet.
    """

    def __init__(self, store: ReplicaStore, replica: str, root: Path, own: ReleaseHistory) -> None:
        self._store = store
        self._replica = replica
        self._root = root
        self._own = own

    def begin(self, name: str, now: float) -> bool:
        """As `ReleaseHistory.begin`, of this replica; raises StoreError."""
        return self._store.begin(
            self._replica,
            Interval(name, now, baseline=self._baseline(name)),
            WINDOWED,
            lambda: [Interval(one.name, one.since, one.until, self._baseline(one.name)) for one in self._own.read()],
        )

    def read(self) -> list[ReleaseInterval]:
        """All intervals, oldest first; raises StoreError."""
        return [ReleaseInterval(one.release, one.since, one.until) for one in self._store.intervals()]

    def take_baselines(self) -> None:
        """Put the baselines of releases that only others have served beside what is known of them; raises StoreError,
        OSError.
        """
        for one in self._store.intervals():
            directory = self._root / one.release
            if one.baseline is not None and directory.is_dir() and load_baseline(directory) is None:
                with suppress(ValueError, TypeError):
                    save_baseline(directory, Baseline.from_json(json.loads(one.baseline)))

    def _baseline(self, name: str) -> str | None:
        baseline = load_baseline(self._root / name)
        return None if baseline is None else json.dumps(baseline.to_json())
