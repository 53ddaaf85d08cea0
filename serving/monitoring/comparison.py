"""The experiment that runs, as the figures of one worker know it: what it is, and its report over all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longtail.bundle.arrays import Array
from longtail.serving.monitoring.experiments import Design, experiments_json
from longtail.serving.monitoring.feedback_store import FeedbackStore
from longtail.serving.monitoring.release_figures import ReleaseFigures


class Comparison:
    """Compares the arms of the experiment that runs. Thread-safe.

    Args:
        store: counts answers and feedback by arm.
        figures_of: of a release that is counted, by its name; None: of the one in service.
    """

    def __init__(self, store: FeedbackStore, figures_of: Callable[[str | None], ReleaseFigures | None]) -> None:
        self._store = store
        self._figures_of = figures_of
        self._design = Design(None)

    @property
    def releases(self) -> set[str]:
        """That arms name."""
        return self._design.releases

    def compare(self, design: Design) -> None:
        """Compare this from now on; counts by label of other runs are deleted."""
        before, self._design = self._design, design
        if before.run != design.run:
            for release in (None, *design.releases, *before.releases):
                figures = self._figures_of(release)
                if figures is not None:
                    figures.forget_arms(design.run)

    def report(self) -> dict[str, Any]:
        """As GET /v1/experiments shows it, but for the request's id; raises StoreError if it cannot be read."""
        design = self._design
        counts = {} if design.run is None else self._store.arms(design.run)
        return experiments_json(design, counts, self._exposures_of)

    def _exposures_of(self, run: str, arm: dict[str, Any]) -> tuple[ReleaseFigures, Array] | None:
        """How often an arm answered each label of the release that it answers from now."""
        figures = self._figures_of(arm["release"])
        return None if figures is None else (figures, figures.exposures_of(run, arm["name"]))
