"""Follows experiments.toml: reads it again when it changes, and loads the releases that its arms name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longtail.serving.core.arms import Trial
from longtail.serving.core.experiments import (
    FILE,
    LARGEST_FILE,
    Arm,
    Experiment,
    Experiments,
    ExperimentsError,
    parse_experiments,
)
from longtail.serving.core.queries import SearchOptions
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError, NotReadyError
from longtail.serving.monitoring import Design
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    attempts: int
    retry_at: float


class ExperimentFollower:
    """Has the service run what the file says.

    A file that cannot be used leaves the one before in force: that is said once in the log, and in the figures until it
    can. Where there is no file, no experiment runs. An arm that cannot answer, because its release cannot be loaded or
    the release does not take its settings, leaves its units to the default, which is said likewise; a release is tried
    again, ever less often up to once a minute.

    Args:
        root: the directory of releases.
        service: is told.
        load: opens a release by its name, verified and warm.
        clock: seconds.
    """

    def __init__(
        self, root: Path, service: Service, load: Callable[[str], Retriever], clock: Callable[[], float]
    ) -> None:
        self._path = root / FILE
        self._service = service
        self._load = load
        self._clock = clock
        self._content: bytes | None = None
        self._experiments = Experiments(None)
        self._refused: str | None = None
        self._failures: dict[str, _Failure] = {}
        self._said: dict[str, str] = {}
        self._checking = threading.Lock()

    def check(self, *, again: bool = False) -> None:
        """Look at the file, and at what its arms need, once. Never fails: what is wrong is said.

        Args:
            again: try releases that could not be loaded at once.
        """
        with self._checking:
            if again:
                self._failures.clear()
            self._read()
            with suppress(NotReadyError):  # until the first release is there
                self._apply()

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except FileNotFoundError:
            content = b""
        except OSError as error:
            self._refuse(str(error))
            return
        if content == self._content:
            return
        try:
            experiments = parse_experiments(content, highest_k=highest_k(self._service.settings))
        except ExperimentsError as error:
            self._refuse(error.message)
            self._content = content
            return
        before, self._experiments = self._experiments, experiments
        self._content, self._refused = content, None
        if experiments != before:
            logger.info("%s", _described(experiments, before))

    def _refuse(self, message: str) -> None:
        if message != self._refused:
            running = self._experiments.running
            logger.error(
                "%s refused, %s: %s", self._path, "no experiment runs" if running is None else
                f"{running.name} goes on as before", message,
            )  # fmt: skip
        self._refused = message

    def _apply(self) -> None:
        """Have the service run the experiment, as far as its arms can answer; raises NotReadyError before a release."""
        self._service.retriever()
        experiment = self._experiments.running
        unavailable: dict[str, str] = {}
        if experiment is not None:
            unavailable = self._unavailable(experiment)
        else:
            self._service.beside(frozenset())
        for name, why in unavailable.items():
            if self._said.get(name) != why:
                logger.error("arm %s cannot answer, its units get the default: %s", name, why)
        self._said = unavailable
        trial = None if experiment is None else Trial(experiment, unavailable)
        design = None if trial is None else trial.experiment.design(trial.unavailable)
        self._service.monitoring.figures.comparison.compare(Design(design, self._experiments.others, self._refused))
        self._service.monitoring.figures.set_trouble("experiments", self._trouble())
        if self._service.trial != trial:
            self._service.trial = trial

    def _trouble(self) -> str | None:
        """What the verdict says."""
        if self._refused is not None:
            return (
                "experiments.toml cannot be used, and the one before is in force. The log says what is wrong with it."
            )
        if self._said:
            arms = ", ".join(self._said)
            return f"An arm of the experiment cannot answer ({arms}): its units get the default. The log says why."
        return None

    def _unavailable(self, experiment: Experiment) -> dict[str, str]:
        """Arms that cannot answer, and why."""
        names = frozenset(arm.release for arm in experiment.arms if arm.release is not None)
        loaded = self._service.beside(names)
        self._failures = {name: failure for name, failure in self._failures.items() if name in names}
        for name in sorted(names - loaded.keys()):
            self._load_release(name, names)
        return {arm.name: why for arm in experiment.arms if (why := self._trouble_of(arm)) is not None}

    def _trouble_of(self, arm: Arm) -> str | None:
        if arm.release is not None and arm.release in self._failures:
            return f"release {arm.release}: {self._failures[arm.release].message}"
        try:
            self._service.retriever(arm.release).check_options(SearchOptions(**arm.settings))
        except InvalidRequestError as error:
            return f"{error.field}: {error.message}" if error.field else error.message
        return None

    def _load_release(self, name: str, names: frozenset[str]) -> None:
        failure = self._failures.get(name)
        if failure is not None and self._clock() < failure.retry_at:
            return
        started = self._clock()
        try:
            self._service.beside(names, self._load(name))
        # Whatever is wrong with a release, those in service must go on.
        except Exception as error:
            attempts = 1 if failure is None else failure.attempts + 1
            wait = min(_FIRST_RETRY_SECONDS * 2 ** (attempts - 1), _LONGEST_RETRY_SECONDS)
            self._failures[name] = _Failure(f"{type(error).__name__}: {error}", attempts, self._clock() + wait)
            return
        self._failures.pop(name, None)
        logger.info("release %s is loaded for an arm, in %.1f s", name, self._clock() - started)


def highest_k(settings: Settings) -> int:
    """Labels that an arm may give a query: as many as each query of the largest request may ask for."""
    return max(1, min(settings.max_k, settings.max_total_k // settings.max_queries))


def _described(experiments: Experiments, before: Experiments) -> str:
    running = experiments.running
    if running is None:
        return "no experiment runs" if before.running is None else f"experiment {before.running.name} has ended"
    shares = ", ".join(f"{arm.name} {arm.share:g}" for arm in running.arms)
    same = before.running is not None and before.running.run == running.run
    begins = "" if same else ", begins"
    return f"experiment {running.name}, run {running.run}{begins}: {shares}, traffic {running.traffic:g}"
