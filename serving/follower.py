"""Follows CURRENT: loads what is published beside what is served, and swaps when it has answered a query."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from index import Releases
from serving.encoder import Encoder
from serving.retriever import Retriever
from serving.service import Service, one_openmp_thread

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 60.0


def load_release(releases: Releases, name: str) -> Retriever:
    """Open a release, verify every file and answer a first query from it.

    Raises:
        BundleError, UnservableReleaseError, OSError or an error of the index package: what is wrong with it.
    """
    release = releases.open(name)
    manifest = release.bundle.manifest
    encoder = Encoder(release.bundle.query_tower, manifest.query_features, release.bundle.vocabularies, manifest.dim)
    retriever = Retriever(
        name=release.name,
        created_at=release.created_at,
        bundle=release.bundle,
        searcher=release.searcher,
        encoder=encoder,
    )
    retriever.warm()
    return retriever


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str | None
    message: str
    attempts: int
    retry_at: float


class ReleaseFollower:
    """Polls CURRENT in a thread of its own.

    A release that cannot be loaded leaves the one in service alone. It is tried again, ever less often up
    to once a minute, or at once when CURRENT names another; its error is logged once, and every attempt
    is counted.

    Args:
        root: the directory of releases.
        service: gets every release that loads.
        load: how a release is opened, for tests.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        root: Path,
        service: Service,
        *,
        load: Callable[[Releases, str], Retriever] = load_release,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._releases = Releases(root)
        self._service = service
        self._load = load
        self._clock = clock
        self._served: str | None = None
        self._failure: _Failure | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="release-follower", daemon=True)

    def start(self) -> None:
        """Begin to follow; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following; waits for a load that is under way."""
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Look at CURRENT once, and load what it names unless that is served already."""
        name: str | None = None
        try:
            name = self._releases.current()
            if name is None or name == self._served:
                self._failure = None
                return
            if self._too_early(name):
                return
            started = self._clock()
            retriever = self._load(self._releases, name)
        # Whatever is wrong with a release, the one in service must go on.
        except Exception as error:
            if not self._too_early(name):
                self._refuse(name, f"{type(error).__name__}: {error}")
            return
        self._service.serve(retriever)
        self._served, self._failure = name, None
        logger.info("serving release %s, loaded and verified in %.1f s", name, self._clock() - started)

    def _too_early(self, name: str | None) -> bool:
        failure = self._failure
        return failure is not None and failure.name == name and self._clock() < failure.retry_at

    def _refuse(self, name: str | None, message: str) -> None:
        before = self._failure if self._failure is not None and self._failure.name == name else None
        attempts = 1 if before is None else before.attempts + 1
        wait = min(_FIRST_RETRY_SECONDS * 2 ** (attempts - 1), _LONGEST_RETRY_SECONDS)
        self._failure = _Failure(name, message, attempts, self._clock() + wait)
        self._service.monitor.release_refused()
        if before is None or before.message != message:
            logger.error(
                "release %s refused, %s stays in service: %s", name or "in CURRENT", self._served or "nothing", message
            )

    def _follow(self) -> None:
        one_openmp_thread()
        while not self._stopping.is_set():
            self.check()
            self._stopping.wait(self._service.settings.poll_seconds)
