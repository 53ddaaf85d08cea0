"""Follows experiments.toml: reads it when it changes, and loads the releases that its arms name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from longtail.serving.core.experiments import (
    FILE,
    LARGEST_FILE,
    Arm,
    Experiment,
    ExperimentsError,
    parse_experiments,
)
from longtail.serving.core.queries import SearchOptions
from longtail.serving.core.retriever import Retriever
from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError, NotReadyError

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 30.0


class ExperimentFollower:
    """Has the service run the experiment of the file.

    A file that cannot be used leaves the one before in force; without a file, no experiment runs. The units of an arm
    whose release or settings cannot be had get the default; its release is tried again. The log and the verdict say so.

    Args:
        root: directory of releases.
        service: answers by the experiment.
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
        self._experiment: Experiment | None = None
        self._refused: str | None = None
        self._failures: dict[str, tuple[str, float]] = {}
        """Why releases could not be loaded, and when they are tried again."""
        self._unavailable: dict[str, str] = {}
        self._checking = threading.Lock()

    def check(self, *, again: bool = False) -> None:
        """Look at the file and at what its arms need. Never fails.

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
            experiment = parse_experiments(content, self._service.settings)
        except ExperimentsError as error:
            self._refuse(error.message)
            self._content = content
            return
        if experiment != self._experiment:
            arms = () if experiment is None else experiment.arms
            shares = ", ".join(f"{arm.name} {arm.share:g}" for arm in arms)
            logger.info("no experiment runs" if experiment is None else f"experiment {experiment.run}: {shares}")
        self._experiment, self._content, self._refused = experiment, content, None

    def _refuse(self, message: str) -> None:
        if message != self._refused:
            in_force = "no experiment runs" if self._experiment is None else f"{self._experiment.name} goes on"
            logger.error("%s refused, %s: %s", self._path, in_force, message)
        self._refused = message

    def _apply(self) -> None:
        """Raises NotReadyError before the first release."""
        self._service.retriever()
        arms = () if self._experiment is None else self._experiment.arms
        names = frozenset(arm.release for arm in arms if arm.release is not None)
        loaded = self._service.beside(names)
        for name in sorted(names - loaded.keys()):
            self._load_release(name, names)
        unavailable = {arm.name: why for arm in arms if (why := self._trouble_of(arm)) is not None}
        for arm, why in unavailable.items():
            if self._unavailable.get(arm) != why:
                logger.error("arm %s cannot answer, its units get the default: %s", arm, why)
        self._unavailable = unavailable
        self._service.monitoring.figures.set_trouble("experiments", self._trouble())
        if self._experiment is None:
            self._service.experiment = None
        else:
            self._service.experiment = replace(self._experiment, unavailable=unavailable)

    def _load_release(self, name: str, names: frozenset[str]) -> None:
        if name in self._failures and self._clock() < self._failures[name][1]:
            return
        try:
            self._service.beside(names, self._load(name))
        # Whatever is wrong with a release, those in service must go on.
        except Exception as error:
            self._failures[name] = f"{type(error).__name__}: {error}", self._clock() + _RETRY_SECONDS
        else:
            self._failures.pop(name, None)
            logger.info("release %s is loaded for an arm", name)

    def _trouble_of(self, arm: Arm) -> str | None:
        """Say why an arm cannot answer; None: it can."""
        if arm.release in self._failures:
            return f"release {arm.release}: {self._failures[arm.release][0]}"
        try:
            self._service.retriever(arm.release).check_options(SearchOptions(**arm.settings))
        except InvalidRequestError as error:
            return f"{error.field}: {error.message}" if error.field else error.message
        return None

    def _trouble(self) -> str | None:
        """Say what the verdict does."""
        if self._refused is not None:
            return "experiments.toml cannot be used, and the one before is in force. The log says what is wrong."
        if self._unavailable:
            return (
                f"Arms cannot answer ({', '.join(self._unavailable)}): their units get the default. The log says why."
            )
        return None
