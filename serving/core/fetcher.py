"""Mirror the releases of an object store in a directory.

If the store is slow, inconsistent or gone, the local releases stay in service, even after a restart. A local pointer
moves only after every file of the release that it names was downloaded and verified.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from time import monotonic

from longtail.bundle.remote import downloading
from longtail.bundle.store import replace_file
from longtail.index.release.pointers import Pointers
from longtail.index.release.releases import EXPERIMENTS_FILE, LocalReleases, RemoteReleases
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_STATUS, _LOCK = ".fetched.json", ".fetcher.lock"
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 60.0


class Backoff:
    """Decides when a failed action is retried: at growing intervals, up to a minute."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Allow a retry at once."""
        self._failures, self._until = 0, 0.0

    def failed(self) -> None:
        """Note a failure, and double the waiting time."""
        wait = min(_FIRST_RETRY_SECONDS * 2**self._failures, _LONGEST_RETRY_SECONDS)
        self._failures, self._until = self._failures + 1, self._clock() + wait

    @property
    def waits(self) -> bool:
        """Whether it is too early for a retry."""
        return self._failures > 0 and self._clock() < self._until


class ReleaseFetcher:
    """Fetches a URL's releases for all processes of this host.

    One process fetches at a time; when it ends, another takes over.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = settings.releases_directory
        self._remote: RemoteReleases | None = None
        self._lock: TextIOWrapper | None = None
        self._last_pointers = Pointers()
        self._fetched: set[str] = set()
        """Names fetched since the store's pointers last changed; a reused name comes with changed pointers."""
        self._backoff = Backoff()
        self._logged: dict[str, str] = {}

    def drop(self, name: str, inode: int | None) -> None:
        """Delete a damaged copy, so that it is fetched again.

        Args:
            inode: inode of the damaged copy; another worker's new copy has another inode and stays.
        """
        path = self._directory / name
        # If another process holds the lock, it is replacing the copy; if not, the next attempt deletes it.
        with suppress(OSError), downloading(self._directory, wait=False):
            if path.stat().st_ino == inode:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def problem(self) -> str | None:
        """Why the published release is not served: the end of a sentence."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            problem: str | None = json.loads((self._directory / _STATUS).read_bytes())["problem"]
            return problem
        return None

    def check(self, *, again: bool = False) -> bool:
        """Check the store once, and fetch new releases; returns whether the local pointers have changed.

        Raises nothing: errors are logged and reported by `problem`.

        Args:
            again: retry failed downloads at once, instead of at growing intervals.
        """
        moved = False
        # No error may end the thread, as the next check may succeed.
        try:
            if self._is_alone():
                problem, moved = self._fetch(again)
                if problem != self.problem or not (self._directory / _STATUS).exists():
                    replace_file(self._directory / _STATUS, json.dumps({"problem": problem}).encode())
        except Exception as error:
            self._log("", error)
        return moved

    def _is_alone(self) -> bool:
        """Return whether this process is the one that fetches; the lock ends with the process."""
        # Tried at every check, so that another process takes over when this one's holder ends.
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

    def _fetch(self, again: bool) -> tuple[str | None, bool]:
        """Fetch the published releases; returns the problem, if any, and whether a pointer has moved."""
        url, here = str(self._settings.releases), LocalReleases(self._directory)
        # An error of the store, or wrong content, must not stop the service.
        try:
            remote = self._remote = self._remote or RemoteReleases(url)
            remote_pointers = remote.pointers()
            if remote_pointers.current is None and here.pointers().current is not None:
                # No command unpublishes a release without naming another, so this must be a wrong or an emptied store.
                self._log("", f"{url} names none")
                return f"at {url}, is not there, the one before is served", False
            experiments = remote.store.read(EXPERIMENTS_FILE)
        except Exception as error:
            self._log("", error)
            return f"at {url}, cannot be looked for", False
        self._logged.pop("", None)
        if remote_pointers != self._last_pointers or again:
            self._backoff.reset()
        if remote_pointers != self._last_pointers:
            self._last_pointers, self._fetched = remote_pointers, set()
        names = {name for name in (remote_pointers.current, remote_pointers.staged) if name is not None}
        self._fetched = {name for name in self._fetched if (self._directory / name).is_dir()}
        if not self._backoff.waits:
            results = [self._try(remote, name) for name in sorted(names - self._fetched)]
            if not all(results):
                self._backoff.failed()
        remote.write_copy(EXPERIMENTS_FILE, experiments)
        # Pointers move only to releases that are here; the others keep their old value.
        local_names = {None, *self._fetched}
        with here.change_pointers() as (now, write):
            after = remote_pointers if remote_pointers.current in local_names else now
            staged = remote_pointers.staged if remote_pointers.staged in local_names else now.staged
            after = after.model_copy(update={"staged": staged, "deleting": (), "by": now.by})
            if moved := after != now:
                write(after)
        if remote_pointers.current not in local_names:
            return f"{remote_pointers.current}, cannot be fetched, the one before is served", moved
        # The release before stays, because a rollback may need it at once.
        remote.drop_copies({*names, *remote_pointers.history[-2:]}, remote_pointers.history)
        return None, moved

    def _try(self, remote: RemoteReleases, name: str) -> bool:
        # One release that cannot be fetched must not keep others from being fetched.
        try:
            remote.fetch(name)
        except Exception as error:
            self._log(name, error)
            return False
        self._fetched.add(name)
        self._logged.pop(name, None)
        return True

    def _log(self, name: str, error: Exception | str) -> None:
        """Log an error once per name."""
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        if self._logged.get(name) != message:
            logger.error("%s cannot be fetched: %s", name or "what is published", message)
        self._logged[name] = message
