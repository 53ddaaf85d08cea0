"""Which approximate kind `auto` gives a catalogue: all that fit are built and timed in one run, the quickest is taken.

Legend: `Q` timed queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from longtail.index.construct.recall import Calibration
from longtail.index.manifests import KindTrial
from longtail.index.search.searcher import Searcher

MARGIN = 1.25
"""Times as many queries a second as the first kind that another must answer to be taken: a close call, or a timing
that was disturbed, is no reason to do without the rows themselves."""
_TIMED = 120
"""Queries, over all places on the dials alike."""
_ROUNDS = 5


def rates(
    searchers: Sequence[Searcher], calibration: Calibration, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Queries per CPU second of searchers that are asked one query at a time, for as many results as recall is told of.

    CPU time is told, not the clock's; they take turns, and the quickest of a query's turns counts: what runs beside
    slows none of them more.

    Args:
        searchers: over the same labels.
        calibration: has the queries.
        clock: tells seconds of this process's CPU time.
    """
    places = np.linspace(0, len(calibration.queries_QE) - 1, min(_TIMED, len(calibration.queries_QE)))
    queries_QE = calibration.queries_QE[places.astype(np.int64)]
    seconds_SQ = np.full((len(searchers), len(queries_QE)), np.inf)
    for _ in range(_ROUNDS):
        for place, searcher in enumerate(searchers):
            for query in range(len(queries_QE)):
                started = clock()
                searcher.search(queries_QE[query : query + 1], calibration.k)
                seconds_SQ[place, query] = min(seconds_SQ[place, query], clock() - started)
    return [len(queries_QE) / float(seconds) for seconds in seconds_SQ.sum(axis=1)]


def choose(trials: Sequence[KindTrial]) -> int:
    """The place of the kind to take: the first, unless others are quicker by `MARGIN`; then the quickest of them.

    Args:
        trials: the plainest first; those that recall too little have no rate.
    """
    speeds = [trial.queries_per_second or 0.0 for trial in trials]
    quickest = max(range(len(speeds)), key=speeds.__getitem__)
    return quickest if speeds[quickest] >= MARGIN * speeds[0] else 0
