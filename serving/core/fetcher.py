"""Keeps a directory like what is published at an object store, so that the service follows it like any other.

The store may be slow, torn or gone: what is here is served on, after a restart too. A pointer moves here only when the
release that it names is here, every file of it what was written.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from time import monotonic

from longtail.bundle import replace_file
from longtail.bundle.cache import Cache
from longtail.index.release.pointers import PointerFiles, Pointers
from longtail.index.release.remote import RemoteReleases
from longtail.index.release.verified import Verified
from longtail.serving.core.experiments import FILE, ExperimentsError, parse_experiments
from longtail.serving.settings import Settings
from longtail.state import SoleProcess

logger = logging.getLogger(__name__)

_STATUS, _LOCK = ".fetched.json", ".fetcher.lock"
_LAST_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 2.0, 60.0


class ReleaseFetcher:
    """Of the processes on this host that serve a URL, one fetches for all, and another when it ends.

    Args:
        settings: of the model; `releases` is a URL.
        moved: called when what is pointed to here has changed.
    """

    def __init__(self, settings: Settings, moved: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._moved = moved
        self._url = str(settings.releases)
        self._directory = settings.releases_directory
        self._remote: RemoteReleases | None = None
        self._sole = SoleProcess(self._directory / _LOCK)
        self._seen = Pointers()
        self._fetched: set[str] = set()
        """Of what was seen last; a name that is given anew comes with another pointer."""
        self._failed: dict[str, tuple[int, float]] = {}
        """How often each could not be fetched, and when it is tried again."""
        self._told: dict[str, str] = {}
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
        """Stop fetching; what a store holds up is left to end with the process."""
        with self._waking:
            self._stopping = True
            self._waking.notify_all()
        self._thread.join(_LAST_SECONDS)
        self._sole.let_go()

    def look(self) -> None:
        """Look at the store now, also at what could not be fetched; returns then, or when that takes some seconds."""
        with self._waking:
            looks, self._asked = self._looks, True
            self._waking.notify_all()
            self._waking.wait_for(lambda: self._looks > looks, _PATIENCE_SECONDS)

    @property
    def problem(self) -> str | None:
        """What keeps this host from what is published, as the one that fetches has found it: an end to `The published
        release, …`.
        """
        try:
            problem: str | None = json.loads((self._directory / _STATUS).read_bytes())["problem"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return problem

    def check(self) -> None:
        """Look at the store once, and fetch what it says; never fails, what is wrong is logged and in `problem`."""
        try:
            if self._sole.claim():
                self._note(self._fetch())
        # The next look may find it well.
        except Exception as error:
            self._tell("", f"{type(error).__name__}: {error}")

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

    def _fetch(self) -> str | None:
        """Fetch what is published; what keeps this host from it."""
        try:
            remote = self._remote = self._remote or RemoteReleases(
                self._url, Cache(self._settings.cache), self._settings.cache_bytes
            )
            there = remote.pointers.read()
            if there.current is None and self._kept():
                # Nobody takes a release back without naming another: it is another store, or an empty one.
                self._tell("", f"{self._url} names none")
                return f"at {self._url}, is not there, the one before is served"
            remote.pull(FILE)
        # Whatever is wrong with the store or with what it says, the service goes on.
        except Exception as error:
            self._tell("", f"{type(error).__name__}: {error}")
            return f"at {self._url}, cannot be looked for"
        self._told.pop("", None)
        if there != self._seen:
            self._seen = there
            self._fetched.clear()
            self._failed.clear()
        asked = [name for name in (there.current, there.staged, *self._arms()) if name is not None]
        here = {name for name in asked if self._have(remote, name, asked)}
        self._point(there, here)
        if there.current is not None and there.current not in here:
            return f"{there.current}, cannot be fetched, the one before is served"
        return None

    def _have(self, remote: RemoteReleases, name: str, needed: Iterable[str]) -> bool:
        verified = Verified(self._directory / name, self._settings.state_directory)
        damaged = verified.damage is not None
        if name in self._fetched and not damaged and (self._directory / name).is_dir():
            return True
        attempts, retry_at = self._failed.get(name, (0, 0.0))
        if monotonic() < retry_at:
            return False
        try:
            remote.fetch(name, [*needed, *self._kept()], anew=damaged)
        # As above.
        except Exception as error:
            self._tell(name, f"{type(error).__name__}: {error}")
            wait = min(_FIRST_RETRY_SECONDS * 2**attempts, _LONGEST_RETRY_SECONDS)
            self._failed[name] = attempts + 1, monotonic() + wait
            return False
        self._failed.pop(name, None)
        self._fetched.add(name)
        if damaged:
            verified.forget()
            logger.info("release %s, which was damaged here, is fetched anew", name)
        self._told.pop(name, None)
        return True

    def _kept(self) -> list[str]:
        """What is pointed to here."""
        now = PointerFiles(self._directory).read()
        return [name for name in (now.current, now.staged) if name is not None]

    def _point(self, there: Pointers, here: set[str]) -> None:
        """Point here to what is pointed to there, as far as it is here."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with PointerFiles(self._directory).turn() as (now, move):
            after = there if there.current in {None, *here} else now
            staged = there.staged if there.staged in {None, *here} else now.staged
            after = after.model_copy(update={"staged": staged, "deleting": ()})
            if after == now:
                return
            move(after)
        self._moved()

    def _arms(self) -> list[str | None]:
        """Releases of the experiment that runs."""
        with suppress(OSError, ExperimentsError):
            content = (self._directory / FILE).read_bytes()
            running = parse_experiments(content, self._settings)
            return [] if running is None else [arm.release for arm in running.arms]
        return []

    def _note(self, problem: str | None) -> None:
        if problem != self.problem or not (self._directory / _STATUS).exists():
            replace_file(self._directory / _STATUS, json.dumps({"problem": problem}).encode())

    def _tell(self, name: str, message: str) -> None:
        """Log what is wrong, once."""
        if self._told.get(name) != message:
            logger.error("%s cannot be fetched: %s", name or "what is published", message)
        self._told[name] = message
