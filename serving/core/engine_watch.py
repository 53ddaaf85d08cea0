"""Watches the server that holds the index, where FAISS does not: asks it again when it did not answer, and says so."""

from __future__ import annotations

import logging
from contextlib import suppress

from longtail.index import LongtailIndexError
from longtail.serving.core.service import Service

logger = logging.getLogger(__name__)


class EngineWatch:
    """Of one service; its searches find out by themselves, and this that all is well again where nobody searches.

    Args:
        service: whose release in service is looked at.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._problem: str | None = None

    def look(self) -> None:
        """Where the server did not answer, ask whether it does by now. Never fails: what is wrong is said."""
        served = self._service.served
        engine = None if served is None else served.engine
        if engine is not None and engine.problem is not None:
            with suppress(LongtailIndexError):
                engine.probe()
        problem = None if engine is None else engine.problem
        if problem == self._problem:
            return
        told = f"The server that holds the index does not answer: {problem}."
        self._service.monitoring.figures.set_trouble("engine", problem and told)
        if problem is None:
            logger.info("the server that holds the index answers again")
        elif self._problem is None:
            logger.error("%s", told)
        self._problem = problem
