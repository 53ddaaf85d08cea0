"""Keeps a directory like what is published at an object store, so that the service follows it like any other.

The store may be slow, torn or gone: what is here is served on, after a restart too. A pointer moves here only when the
release that it names is here, every file of it verified.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from io import TextIOWrapper
from time import monotonic

from longtail.bundle import replace_file
from longtail.bundle.remote import downloading
from longtail.index.release.local import LocalReleases
from longtail.index.release.pointers import Pointers
from longtail.index.release.releases import EXPERIMENTS_FILE
from longtail.index.release.remote import RemoteReleases
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_STATUS, _LOCK = ".fetched.json", ".fetcher.lock"
_LAST_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 60.0


class ReleaseFetcher:
    """Of the processes on this host that serve a URL, one fetches for all, and another when it ends.

    Args:
        settings: `releases` is a URL.
        moved: called when what is pointed to here has changed.
    """

    def __init__(self, settings: Settings, moved: Callable[[], None] = lambda: None) -> None:
        self._settings, self._moved = settings, moved
        self._directory = settings.releases_directory
        self._remote: RemoteReleases | None = None
        self._lock: TextIOWrapper | None = None
        self._seen = Pointers()
        self._fetched: set[str] = set()
        """Of what was seen last; a name that is given again comes with another pointer."""
        self._failed: dict[str, tuple[int, float]] = {}
        """How often each release could not be fetched, and when it is tried again."""
        self._logged: dict[str, str] = {}
        self._stopping = False
        self._waking = threading.Condition()
        self._looks, self._asked = 0, False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._follow,), name="release-fetcher", daemon=True
        )

    def start(self) -> None:
        """Begin to fetch; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop fetching; a call that a store holds up ends with the process."""
        with self._waking:
            self._stopping = True
            self._waking.notify_all()
        self._thread.join(_LAST_SECONDS)
        if self._lock is not None:
            self._lock.close()

    def look(self) -> None:
        """Look at the store now, also at what could not be fetched; returns then, or after some seconds."""
        with self._waking:
            looks, self._asked = self._looks, True
            self._waking.notify_all()
            self._waking.wait_for(lambda: self._looks > looks, _PATIENCE_SECONDS)

    def drop(self, name: str, inode: int | None) -> None:
        """Delete a damaged copy, to be fetched again, unless another worker has replaced the one of this inode."""
        path = self._directory / name
        with (
            suppress(OSError),
            downloading(self._directory, wait=False),
        ):  # who holds it replaces the copy, or comes again
            if path.stat().st_ino == inode:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def problem(self) -> str | None:
        """What keeps this host from what is published: an end to `The published release, …`."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            problem: str | None = json.loads((self._directory / _STATUS).read_bytes())["problem"]
            return problem
        return None

    def check(self) -> None:
        """Look at the store once, and fetch what it says; never fails, what is wrong is logged and in `problem`."""
        # The next look may find it well.
        try:
            if not self._is_alone():
                return
            problem = self._fetch()
            if problem != self.problem or not (self._directory / _STATUS).exists():
                replace_file(self._directory / _STATUS, json.dumps({"problem": problem}).encode())
        except Exception as error:
            self._log("", error)

    def _follow(self) -> None:
        while True:
            with self._waking:
                if self._stopping:
                    return
                if self._asked:
                    self._asked = False
                    self._failed.clear()
            self.check()
            with self._waking:
                self._looks += 1
                self._waking.notify_all()
                self._waking.wait_for(lambda: self._stopping or self._asked, self._settings.poll_seconds)

    def _is_alone(self) -> bool:
        """Whether this process is the one that fetches; the lock goes with the process."""
        if self._lock is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = (self._directory / _LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def _fetch(self) -> str | None:
        """Fetch what is published; returns what keeps this host from it."""
        url, here = str(self._settings.releases), LocalReleases(self._directory)
        # Whatever is wrong with the store or with what it says, the service goes on.
        try:
            remote = self._remote = self._remote or RemoteReleases(url, self._settings.cache)
            there = remote.pointers()
            if there.current is None and here.pointers().current is not None:
                # Nobody takes a release back without naming another: it is another store, or an empty one.
                self._log("", f"{url} names none")
                return f"at {url}, is not there, the one before is served"
            experiments = remote.store.read(EXPERIMENTS_FILE)
        except Exception as error:
            self._log("", error)
            return f"at {url}, cannot be looked for"
        self._logged.pop("", None)
        if there != self._seen:
            self._seen = there
            self._fetched.clear()
            self._failed.clear()
        wanted = {name for name in (there.current, there.staged) if name is not None}
        fetched = {name for name in sorted(wanted) if self._has(remote, name)}
        remote.keep(EXPERIMENTS_FILE, experiments)
        with here.turn() as (now, move):
            after = there if there.current in {None, *fetched} else now
            after = after.model_copy(
                update={
                    "staged": there.staged if there.staged in {None, *fetched} else now.staged,
                    "deleting": (),
                    "by": now.by,
                }
            )
            if moves := after != now:
                move(after)
        if moves:
            self._moved()
        if there.current is not None and there.current not in fetched:
            return f"{there.current}, cannot be fetched, the one before is served"
        remote.drop_copies({*wanted, *there.history[-2:]}, there.history)
        return None

    def _has(self, remote: RemoteReleases, name: str) -> bool:
        if name in self._fetched and (self._directory / name).is_dir():
            return True
        attempts, retry_at = self._failed.get(name, (0, 0.0))
        if monotonic() < retry_at:
            return False
        # As above.
        try:
            remote.fetch(name)
        except Exception as error:
            self._log(name, error)
            wait = min(_FIRST_RETRY_SECONDS * 2**attempts, _LONGEST_RETRY_SECONDS)
            self._failed[name] = attempts + 1, monotonic() + wait
            return False
        self._fetched.add(name)
        self._failed.pop(name, None)
        self._logged.pop(name, None)
        return True

    def _log(self, name: str, error: Exception | str) -> None:
        """Log what is wrong, once."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if self._logged.get(name) != message:
            logger.error("%s cannot be fetched: %s", name or "what is published", message)
        self._logged[name] = message
