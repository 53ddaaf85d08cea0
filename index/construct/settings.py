"""Measure settings of an index: the efforts to try, the recall of each, and the least that suffices.

Legend: `L` labels, `Q` timed queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from longtail.bundle import Bundle
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.manifests import Effort, EffortAt, Kind, Trial
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.search.searcher import Searcher

TARGET = 0.99
"""Recall at which the build stops looking for better settings; a floor above it becomes the target."""
_PROBES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_BETWEEN = (3, 6, 12, 24, 48, 96, 192)
"""Further numbers of lists to try, for kinds whose only setting is the number of lists."""
_HEAD_PER_LISTS = 3
"""Head rows that are scored in the time of one row of a list: 5 ns against 15 ns with 65 coordinates."""
_LEAST_HEAD = 100
_REFINE: dict[Kind, tuple[int, ...]] = {"ivf_sq": (1, 2), "ivf_fastscan": (1, 2, 4, 8)}
_TIMED = 120
"""Timed queries, spread evenly over the places on the dials."""
_ROUNDS = 5


def half_decades(least: int, below: int) -> list[int]:
    """List sizes below a bound from `least` on, each √10 times the previous one."""
    sizes: list[int] = []
    while (size := round(least * 10 ** (len(sizes) / 2))) < below:
        sizes.append(size)
    return sizes


def efforts_of(index: FaissIndex) -> Iterator[Effort]:
    """Yield the efforts to try on an index, roughly cheapest first, up to visiting every list."""
    if not index.has_lists:
        yield Effort()
        return
    probes_tried = _PROBES + (_BETWEEN if index.kind == "ivf_flat" else ())
    depths = sorted({min(probes, index.index.nlist) for probes in probes_tried})
    efforts = [Effort(probes=probes, refine=refine) for refine in _REFINE.get(index.kind, (1,)) for probes in depths]
    yield from sorted(efforts, key=lambda effort: effort.probes * effort.refine)


def rows_scored(index: FaissIndex, effort: Effort, head: int) -> float:
    """Estimate the cost of a query as an equivalent number of head rows."""
    scored = head if effort.head is None else effort.head
    return scored + _HEAD_PER_LISTS * effort.probes * effort.refine * index.labels / float(index.index.nlist)


def trial_at(bundle: Bundle, calibration: Calibration, index: FaissIndex, effort: Effort) -> Trial:
    """Measure recall and speed of an index with its head at one effort."""
    recall, rate = calibration.measure(Searcher(bundle, index, effort))
    return Trial(kind=index.kind, head=_size(index), effort=effort, recall=recall, queries_per_second=round(rate, 1))


def efforts_at(
    bundle: Bundle,
    index: FaissIndex,
    chosen: Trial,
    trials: Sequence[Trial],
    calibration: Calibration,
    progress: Progress,
    target: float = TARGET,
    *,
    whole_head: bool = False,
) -> list[EffortAt]:
    """Find the least effort of each place and depth with sufficient recall.

    Sufficient is the target, or the recall of the chosen effort if that stays below the target. An effort with less
    than the whole head must also reach sufficient recall for the labels of the whole head alone, where enough of them
    are among the exact answers: time must not be saved at the expense of the most frequent labels.
    """
    if not index.has_lists:
        return []
    most = chosen.effort
    lesser = _lesser(index, most, whole_head)
    searcher = Searcher(bundle, index, most)
    like_chosen = (trial for trial in trials if (trial.kind, trial.head) == (chosen.kind, chosen.head))
    tried = {(trial.effort, calibration.k): trial.recall for trial in like_chosen}
    in_head_L = np.zeros(index.labels, np.bool_)
    if index.head is not None:
        in_head_L[index.head.rows_H] = True
    efforts: list[EffortAt] = []
    for k in calibration.depths if lesser else ():
        enough = tried.get((most, k)) or calibration.measure(searcher.at(most), k)[0]
        least: dict[int, EffortAt] = {}
        for effort in (*lesser, most):
            recalls = enough if effort == most else tried.get((effort, k))
            of_head = [1.0] * len(enough)
            if recalls is None:
                rows_QK, hits_QK = calibration.found(searcher.at(effort), k)
                recalls = calibration.recall(hits_QK)
                if effort.head is not None:
                    of_head = calibration.recall_of(in_head_L, rows_QK, hits_QK)
            for place, recall in enumerate(recalls):
                if place not in least and min(recall.recall, of_head[place]) >= min(target, enough[place].recall):
                    least[place] = EffortAt(**dict(recall), k=k, effort=effort)
            if len(least) == len(enough):
                break
        efforts += [least[place] for place in range(len(enough))]
        progress(f"for the best {k}: " + "; ".join(f"{at.effort.words} at {at.where}" for at in efforts if at.k == k))
    return efforts


def _lesser(index: FaissIndex, most: Effort, whole_head: bool) -> list[Effort]:
    """List the efforts that cost less than one that suffices everywhere, cheapest first.

    For `ivf_flat` some of them score only a part of the head, unless the whole is wanted.
    """
    head = _size(index)
    efforts = [
        effort
        for effort in efforts_of(index)
        if most.probes >= effort.probes and most.refine >= effort.refine and effort != most
    ]
    if head and index.kind == "ivf_flat" and not whole_head:
        sizes = [0, *half_decades(_LEAST_HEAD, head)]
        efforts += [effort.model_copy(update={"head": size}) for effort in efforts_of(index) for size in sizes]
    costs = {effort: rows_scored(index, effort, head) for effort in efforts}
    enough = rows_scored(index, most, head)
    return sorted((effort for effort in efforts if costs[effort] < enough), key=costs.__getitem__)


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


def _size(index: FaissIndex) -> int:
    return 0 if index.head is None else len(index.head)
