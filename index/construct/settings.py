"""Measure settings of an index: the efforts to try, the recall of each, and the least that suffices.

Legend: `L` labels, `Q` timed queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from longtail.bundle import Bundle
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.construct.training import ROWS_PER_HEAD_LIST
from longtail.index.manifests import Effort, EffortAt, Kind, Trial
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.search.searcher import Searcher

TARGET = 0.99
"""Recall at which the build stops looking for better settings; a floor above it becomes the target."""
_PROBES = [2**power for power in range(1, 12)]
_CLOSER = sorted({round(2 ** (power / 4)) for power in range(4, 45)})
"""Numbers of lists to try, and those for kinds whose only setting is the number of lists."""
_REFINE: dict[Kind, tuple[int, ...]] = {"ivf_sq": (1, 2), "ivf_fastscan": (1, 2, 4, 8)}
_FREQUENT = 1_000
"""Most frequent labels whose recall is also measured alone."""
_TIMED = 120
"""Timed queries, spread evenly over the places on the dials."""
_ROUNDS = 5


def efforts_of(index: FaissIndex) -> Iterator[Effort]:
    """Yield the efforts to try on an index, roughly cheapest first, up to visiting every list."""
    if not index.has_lists:
        yield Effort()
        return
    probes_tried = _CLOSER if index.kind == "ivf_flat" else _PROBES
    depths = sorted({min(probes, index.index.nlist) for probes in probes_tried})
    efforts = [
        Effort(probes=probes, refine=refine, head=head)
        for refine in _REFINE.get(index.kind, (1,))
        for probes in depths
        for head in ((False, True) if index.head_lists else (False,))
    ]
    # A list of the head holds more labels than another one.
    of_head = index.head_lists * ROWS_PER_HEAD_LIST * index.list_count / index.labels
    yield from sorted(efforts, key=lambda effort: (effort.probes + of_head * effort.head) * effort.refine)


def trial_at(bundle: Bundle, calibration: Calibration, index: FaissIndex, effort: Effort) -> Trial:
    """Measure recall and speed of an index at one effort."""
    recall, rate = calibration.measure(Searcher(bundle, index, effort))
    return Trial(kind=index.kind, effort=effort, recall=recall, queries_per_second=round(rate, 1))


def efforts_at(
    bundle: Bundle,
    index: FaissIndex,
    chosen: Trial,
    calibration: Calibration,
    progress: Progress,
    target: float = TARGET,
) -> list[EffortAt]:
    """Find the least effort of each place and depth with sufficient recall.

    Sufficient is the target, or the recall of the chosen effort if that stays below the target. The most frequent
    labels must reach it alone, too, where they are among the answers: time must not be saved at their expense.
    """
    if not index.has_lists:
        return []
    most = chosen.effort
    lesser = [
        effort
        for effort in efforts_of(index)
        if most.probes >= effort.probes and most.refine >= effort.refine and most.head >= effort.head and effort != most
    ]
    searcher = Searcher(bundle, index, most)
    frequent_L = np.zeros(index.labels, np.bool_)
    frequent_L[np.argsort(-bundle.labels.log_pi, kind="stable")[: min(_FREQUENT, index.labels // 10)]] = True
    efforts: list[EffortAt] = []
    for k in calibration.depths:
        enough = calibration.measure(searcher.at(most), k)[0]
        least: dict[int, EffortAt] = {}
        for effort in (*lesser, most):
            rows_QK, hits_QK = calibration.found(searcher.at(effort), k)
            of_frequent = calibration.recall_of(frequent_L, rows_QK, hits_QK) if effort != most else [1.0] * len(enough)
            for point, recall in enumerate(calibration.recall(hits_QK)):
                if point not in least and min(recall.recall, of_frequent[point]) >= min(target, enough[point].recall):
                    least[point] = EffortAt(**dict(recall), k=k, effort=effort)
            if len(least) == len(enough):
                break
        efforts += [least[point] for point in range(len(enough))]
        progress(f"for the best {k}: " + "; ".join(f"{at.effort.words} at {at.where}" for at in efforts if at.k == k))
    return efforts


def rates(
    searchers: Sequence[Searcher], calibration: Calibration, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Measure the queries per CPU second of searchers, one query at a time.

    Every query asks for `calibration.k` results. The searchers take turns, and the fastest of a query's rounds counts,
    so that other load on the machine affects all searchers alike.
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
