"""Follow published and staged releases and experiments.toml.

A release that CURRENT names is loaded while the present one serves, and replaces it after answering a query. A staged
release is loaded for shadow traffic. Where releases are at a URL, the fetcher keeps local copies, which are followed.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

from longtail.bundle import BundleCorruptError
from longtail.index import LongtailIndexError, ReleaseCorruptError, ReleaseMismatchError, Releases, open_releases
from longtail.index.release.pointers import Pointers
from longtail.index.release.releases import EXPERIMENTS_FILE
from longtail.serving.allocator import give_back_memory
from longtail.serving.core.experiments import Experiment, ExperimentsError, parse_experiments
from longtail.serving.core.fetcher import Backoff, ReleaseFetcher
from longtail.serving.core.loader import load_release
from longtail.serving.core.queue import use_one_openmp_thread
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import (
    InvalidRequestError,
    NotReadyError,
    RefusedReleaseError,
    ServingError,
    UnknownReleaseError,
)
from longtail.state import StoreError

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS, _LAST_SECONDS = 5.0, 1.0
_LABELS_SECONDS, _COUNT_SECONDS = 0.1, 0.5
"""Interval for reading label changes of other workers; this worker's own changes take effect at once."""
_DAMAGE = (ReleaseCorruptError, ReleaseMismatchError, BundleCorruptError)


class ReleaseFollower:
    """Polls CURRENT in one thread, label changes in another.

    If a release cannot be loaded, the one in service stays. Loading is retried at growing intervals of at most a
    minute, or at once when CURRENT names another release. An error is logged once, and every attempt is counted.

    Args:
        load: opens a release; None: `load_release` with the service's settings. Tests pass their own.
        clock: returns seconds; tests pass their own.
    """

    def __init__(
        self,
        root: Path,
        service: Service,
        *,
        load: Callable[[Releases, str], Retriever] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._releases = open_releases(root, milvus=service.settings.milvus_server)
        self._service = service
        self._load = load or partial(
            load_release,
            device=service.settings.device,
            max_new_labels=service.settings.max_new_labels,
            state=service.settings.state_directory,
        )
        self._clock = clock
        self._engine_problem: str | None = None
        self.experiments = ExperimentFollower(root, service)
        self._waking, self._fetch_requested, self._looked = threading.Event(), threading.Event(), threading.Event()
        self._fetcher = None if isinstance(service.settings.releases, Path) else ReleaseFetcher(service.settings)
        self._served: str | None = None
        self._directory: int | None = None
        """Inode of the directory that the served release was loaded from; a new copy has another inode."""
        self._staged: tuple[str | None, str | None] = None, None
        """Names of the staged and of the served release at the last check."""
        self._failure: tuple[str | None, str] | None = None
        """Name of the last refused release and the reason; None after CURRENT changes."""
        self._backoff = Backoff(clock)
        self._pointers: Pointers | None = None
        self._trouble: str | None = None
        self._checking = threading.Lock()
        self._stopping = threading.Event()
        follow = {"release-follower": self._follow, "label-follower": self._follow_labels}
        if self._fetcher is not None:
            follow["release-fetcher"] = partial(self._follow_store, self._fetcher)
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in follow.items()]

    def start(self) -> None:
        """Start the threads; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop following; waits for a running load, and some seconds for a database."""
        self._stopping.set()
        self._waking.set()
        self._fetch_requested.set()
        releases, labels, *stores = self._threads
        releases.join()
        labels.join(_PATIENCE_SECONDS)
        for store in stores:  # daemon threads: a hanging call to the object store ends with the process
            store.join(_LAST_SECONDS)

    def check(self) -> None:
        """Check CURRENT and STAGED once, and load what is new."""
        with self._checking:
            self._check()
            self._check_staged()
        self._ask_engine()

    def reload(self) -> bool:
        """Check CURRENT now, also for a release that was refused before.

        Returns:
            True if another release is served afterwards.

        Raises:
            RefusedReleaseError: CURRENT names a release that cannot be served.
        """
        before = self._served
        if self._fetcher is not None:
            # The fetcher downloads what the store names now; CURRENT is read after it.
            self._looked.clear()
            self._fetch_requested.set()
            self._looked.wait(_PATIENCE_SECONDS)
        with self._checking:
            self._failure = None
            self._check()
            if self._failure is not None:
                raise RefusedReleaseError(
                    f"expected CURRENT to name a release that can be served, found {self._failure[0] or 'none'}; "
                    f"the log says why not; {self._served or 'nothing'} stays in service"
                )
            return self._served != before

    def _check(self) -> None:
        name, directory = None, None
        try:
            now = self._releases.pointers()
            if now != self._pointers:  # a new publication, perhaps of the same release by force: try again
                self._pointers, self._failure = now, None
            name = now.current
            if name is None or (name == self._served and not self._is_fetched_again(name)):
                self._failure = None
                self._set_problem(None if self._fetcher is None else self._fetcher.problem)
                return
            if self._too_early(name):
                return
            started = self._clock()
            # Before the load: a copy that is replaced meanwhile has another inode, and is loaded again.
            directory = self._find_inode(name)
            retriever = self._load(self._releases, name)
            self._service.serve(retriever, forced=now.forced == name)
        # No error of a new release may stop the one in service.
        except Exception as error:
            if name is not None and self._fetcher is not None and isinstance(error, _DAMAGE):
                self._fetcher.drop(name, directory)
            if not self._too_early(name):
                self._refuse(name, f"{type(error).__name__}: {error}")
            return
        self._served, self._directory, self._failure = name, directory, None
        # Now that the old release is unreferenced: collect it, and return its memory to the system.
        _freeze()
        give_back_memory()
        logger.info("serving release %s, loaded in %.1f s", name, self._clock() - started)

    def _is_fetched_again(self, name: str) -> bool:
        """Check whether the local copy was replaced under its name."""
        return self._fetcher is not None and self._find_inode(name) not in (None, self._directory)

    def _find_inode(self, name: str) -> int | None:
        with suppress(OSError):
            return (self._releases.root / name).stat().st_ino
        return None

    def _check_staged(self) -> None:
        """Load the staged release; a failed load is retried when STAGED or CURRENT changes."""
        name: str | None = None
        try:
            name = self._releases.staged()
            # Shadow traffic compares with the served release, so a swap begins it again.
            if (name, self._served) == self._staged or self._served is None:
                return
            retriever = None if name in (None, self._served) else self._load(self._releases, name)
            self._service.stage(retriever)
            if retriever is not None:
                logger.info("release %s gets shadow traffic of %s", name, self._served)
        # No client is served by the staged release, so its errors are only logged.
        except Exception as error:
            logger.error(
                "staged release %s gets no shadow traffic: %s: %s", name or "in STAGED", type(error).__name__, error
            )
            self._service.stage(None)
        self._staged = name, self._served

    def _ask_engine(self) -> None:
        """Probe the index's server after a failure."""
        served = self._service.current
        engine = None if served is None else served.engine
        if engine is not None and engine.problem is not None:
            with suppress(LongtailIndexError):
                engine.probe()
        problem = None if engine is None else engine.problem
        if problem == self._engine_problem:
            return
        sentence = f"The server that holds the index does not answer: {problem}."
        self._service.monitoring.set_trouble("engine", problem and sentence)
        if problem is None:
            logger.info("the server that holds the index answers again")
        elif self._engine_problem is None:
            logger.error("%s", sentence)
        self._engine_problem = problem

    def _too_early(self, name: str | None) -> bool:
        return self._failure is not None and self._failure[0] == name and self._backoff.waits

    def _refuse(self, name: str | None, message: str) -> None:
        before, self._failure = self._failure, (name, message)
        if before is None or before[0] != name:
            self._backoff.reset()
        self._backoff.failed()
        self._service.monitoring.count("release_load_failures")
        self._set_problem(
            f"{name or 'a CURRENT that names none'}, could not be loaded, "
            f"{'none' if self._served is None else 'the one before'} is served"
        )
        if before != self._failure:
            logger.error(
                "release %s refused, %s stays in service: %s", name or "in CURRENT", self._served or "nothing", message
            )

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._service.release_problem:
            self._service.set_release_problem(problem)

    def _follow(self) -> None:
        use_one_openmp_thread()
        while not self._stopping.is_set():
            self.check()
            self.experiments.check()
            self._read_problems()
            # With or without a release, because /readyz of all workers waits for this.
            self._service.monitoring.slot.end_start()
            self._waking.wait(self._service.settings.poll_seconds)
            self._waking.clear()

    def _read_problems(self) -> None:
        problem = None
        with suppress(OSError):  # no file: nothing failed
            problem = self._service.settings.refresh_problem.read_text(encoding="utf-8")
        self._service.monitoring.set_trouble("refresh", problem)
        self._service.monitoring.set_trouble("clock", self._service.clock_problem())

    def _follow_store(self, fetcher: ReleaseFetcher) -> None:
        while not self._stopping.is_set():
            again = self._fetch_requested.is_set()
            self._fetch_requested.clear()
            if fetcher.check(again=again):
                self._waking.set()
            if again:
                self._looked.set()
            self._fetch_requested.wait(self._service.settings.poll_seconds)

    def _follow_labels(self) -> None:
        use_one_openmp_thread()
        counted = monotonic()
        while not self._stopping.is_set():
            self._read_changes()
            if monotonic() - counted >= _COUNT_SECONDS:  # here, because this thread wakes anyway
                self._service.monitoring.flush()
                counted = monotonic()
            self._stopping.wait(min(_LABELS_SECONDS, self._service.settings.poll_seconds))

    def _read_changes(self) -> None:
        try:
            self._service.read_changes()
            if self._trouble is not None:
                self._trouble = None
                self._service.set_unreadable(False)
        # On any error of the state or the label tower, the labels known so far stay in service.
        except Exception as error:
            if self._trouble != str(error):
                kind = "" if isinstance(error, (StoreError, ServingError)) else f"{type(error).__name__}: "
                logger.error("label changes cannot be read: %s%s", kind, error)
                self._service.set_unreadable(True)
            self._trouble = str(error)


def _freeze() -> None:
    """Exempt the objects of the loaded release from garbage collection.

    They live as long as the release, and there may be millions of them.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class ExperimentFollower:
    """Follows experiments.toml, and sets the experiment that the service runs.

    If the file cannot be used, the previous experiment stays in force; without a file, no experiment runs. If the
    release of an arm is not loaded or refuses the arm's settings, the units of the arm get the default. The log and the
    verdict report both cases.
    """

    def __init__(self, root: Path, service: Service) -> None:
        self._path = root / EXPERIMENTS_FILE
        self._service = service
        self._content: bytes | None = None
        self._experiment: Experiment | None = None
        self._refused: str | None = None
        self._unavailable: dict[str, str] = {}

    def check(self) -> None:
        """Read the file if it has changed, and set the experiment; raises nothing."""
        try:
            self._read()
        except (OSError, ExperimentsError) as error:
            if isinstance(error, OSError):
                self._content = None
            if str(error) != self._refused:
                in_force = "no experiment runs" if self._experiment is None else f"{self._experiment.name} goes on"
                logger.error("%s refused, %s: %s", self._path, in_force, error)
            self._refused = str(error)
        with suppress(NotReadyError):  # before the first release is loaded
            self._apply()

    def _read(self) -> None:
        content = b""
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
        if content == self._content:
            return
        self._content = content
        experiment = parse_experiments(content, self._service.settings)
        if experiment is not None and experiment != self._experiment:
            shares = ", ".join(f"{name} {arm.share:g}" for name, arm in experiment.arms.items())
            logger.info("experiment %s: %s", experiment.run, shares)
        elif experiment is None and self._experiment is not None:
            logger.info("no experiment runs")
        self._experiment, self._refused = experiment, None

    def _apply(self) -> None:
        unavailable = {}
        for name, arm in ({} if self._experiment is None else self._experiment.arms).items():
            try:
                self._service.retriever(arm.release).check_options(arm)
            except (InvalidRequestError, UnknownReleaseError) as error:
                unavailable[name] = f"{error.field}: {error.message}" if error.field else error.message
                if self._unavailable.get(name) != unavailable[name]:
                    logger.error("arm %s cannot answer, its units get the default: %s", name, unavailable[name])
        self._unavailable = unavailable
        self._service.searches.experiment = self._experiment and self._experiment.without(frozenset(unavailable))
        trouble = None
        if self._refused is not None:
            trouble = "experiments.toml cannot be used, and the one before is in force. The log says what is wrong."
        elif unavailable:
            trouble = f"Arms cannot answer ({', '.join(unavailable)}): their units get the default. The log says why."
        self._service.monitoring.set_trouble("experiments", trouble)
