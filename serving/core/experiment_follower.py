"""Follows experiments.toml: reads it when it changes, and sees whether its arms can answer."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from pathlib import Path

from longtail.index.release.releases import EXPERIMENTS_FILE
from longtail.serving.core.experiments import Arm, Experiment, ExperimentsError, parse_experiments
from longtail.serving.core.service import Service
from longtail.serving.errors import InvalidRequestError, NotReadyError, UnknownReleaseError
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)


class ExperimentFollower:
    """Has the service run the experiment of the file.

    A file that cannot be used leaves the one before in force; without a file, no experiment runs. The units of an arm
    whose release is not loaded, or does not take its settings, get the default. The log and the verdict say so.
    """

    def __init__(self, root: Path, service: Service) -> None:
        self._path = root / EXPERIMENTS_FILE
        self._service = service
        self._read_last: tuple[bytes, Settings] | None = None
        self._experiment: Experiment | None = None
        self._refused: str | None = None
        self._unavailable: dict[str, str] = {}
        self._checking = threading.Lock()

    def check(self) -> None:
        """Look at the file and at what its arms need. Never fails."""
        with self._checking:
            try:
                self._read()
            except (OSError, ExperimentsError) as error:
                if isinstance(error, OSError):
                    self._read_last = None
                if str(error) != self._refused:
                    in_force = "no experiment runs" if self._experiment is None else f"{self._experiment.name} goes on"
                    logger.error("%s refused, %s: %s", self._path, in_force, error)
                self._refused = str(error)
            with suppress(NotReadyError):  # until the first release is there
                self._apply()

    def _read(self) -> None:
        content, settings = b"", self._service.settings
        with suppress(FileNotFoundError):
            content = self._path.read_bytes()
        if (content, settings) == self._read_last:
            return
        self._read_last = content, settings
        experiment = parse_experiments(content, settings)
        if experiment is not None and experiment != self._experiment:
            shares = ", ".join(f"{name} {arm.share:g}" for name, arm in experiment.arms.items())
            logger.info("experiment %s: %s", experiment.run, shares)
        elif experiment is None and self._experiment is not None:
            logger.info("no experiment runs")
        self._experiment, self._refused = experiment, None

    def _apply(self) -> None:
        self._service.retriever()
        arms = {} if self._experiment is None else self._experiment.arms
        unavailable = {name: why for name, arm in arms.items() if (why := self._trouble_of(arm)) is not None}
        for name, why in unavailable.items():
            if self._unavailable.get(name) != why:
                logger.error("arm %s cannot answer, its units get the default: %s", name, why)
        self._unavailable = unavailable
        self._service.experiment = self._experiment and self._experiment.without(frozenset(unavailable))
        trouble = None
        if self._refused is not None:
            trouble = "experiments.toml cannot be used, and the one before is in force. The log says what is wrong."
        elif unavailable:
            trouble = f"Arms cannot answer ({', '.join(unavailable)}): their units get the default. The log says why."
        self._service.monitoring.figures.set_trouble("experiments", trouble)

    def _trouble_of(self, arm: Arm) -> str | None:
        """Say why an arm cannot answer; None: it can."""
        try:
            self._service.retriever(arm.release).check_options(arm)
        except (InvalidRequestError, UnknownReleaseError) as error:
            return f"{error.field}: {error.message}" if error.field else error.message
        return None
