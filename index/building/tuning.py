"""Build an index and choose its search parameters by measured recall.

The build starts with the cheapest parameters, and tries more costly ones until recall reaches the target at every dial
point. Then it finds the least sufficient parameters of each dial point and depth.

Legend: `L` labels, `S` searchers, `Q` queries, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from longtail.bundle import Bundle
from longtail.index.building.filtered import tune_filtered
from longtail.index.building.training import ROWS_PER_HEAD_LIST, bytes_per_label, make_index
from longtail.index.manifests import (
    CollectionRecord,
    FilteredSearch,
    Kind,
    RecallAt,
    SearchParams,
    SearchParamsAt,
    Trial,
)
from longtail.index.recall import Calibration, Progress, check_floor, derived_dial_points, spread_rows
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.search.gpu import check_gpu
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec

TARGET = 0.99
"""Recall at which the build stops looking for better parameters; a floor above it becomes the target."""
_NPROBE = [2**power for power in range(1, 12)]
_FINER_NPROBE = sorted({round(2 ** (power / 4)) for power in range(4, 45)})
"""Numbers of lists to try, and those for kinds without other parameters."""
_K_FACTORS: dict[Kind, tuple[int, ...]] = {"ivf_sq": (1, 2), "ivf_fastscan": (1, 2, 4, 8)}
_FREQUENT = 1_000
"""Most frequent labels whose recall is also measured alone."""
_TIMED, _ROUNDS = 120, 5
"""Timed queries, spread evenly over the dial points, and how often each is timed."""
MARGIN = 1.25
"""Factor by which another kind must exceed the first kind's queries per second to be chosen: a small or disturbed
difference does not justify giving up uncompressed rows."""


@dataclass(frozen=True)
class TunedIndex:
    """An index in memory, or a Milvus collection, with its measurements; the fields of `ReleaseManifest`."""

    kind: Kind
    dim: int
    index: FaissIndex | None
    chosen: Trial
    trials: list[Trial]
    recall_k: int
    recall_queries: int
    seconds: float
    recall: list[RecallAt]
    """Served recall at every dial point, at the largest depth."""
    params_at: list[SearchParamsAt] = field(default_factory=list)
    kinds: list[Trial] = field(default_factory=list)
    filtered: FilteredSearch | None = None
    collection: CollectionRecord | None = None

    def searcher(self, bundle: Bundle) -> Searcher:
        """Create the searcher of a release of this index, which FAISS must hold."""
        assert self.index is not None
        return Searcher(
            bundle, self.index, self.chosen.params, self.filtered.params if self.filtered else (), self.params_at
        )


@dataclass(frozen=True)
class _Candidate:
    """A kind of index at its first parameters with enough recall, else with most recall."""

    index: FaissIndex
    chosen: Trial
    trials: list[Trial]


def tune_index(bundle: Bundle, spec: IndexSpec, progress: Progress, like: FaissIndex | None = None) -> TunedIndex:
    """Build an index over a bundle's labels whose recall suffices at every λ and μ.

    On large catalogues `auto` builds every kind that fits, over the same lists, and chooses the fastest. With `like`,
    an earlier release's index, the same kind is filled over the same lists, and nothing is clustered. Raises SpecError,
    DeviceError, or RecallFloorError where the best parameters stay below the floor.
    """
    if spec.device == "gpu":
        check_gpu()
    started = time.perf_counter()
    rows_LE = bundle.rows()
    labels = len(rows_LE)
    specs = spec.candidates(labels) if like is None else [replace(spec, text=like.kind)]
    names = ", ".join(candidate.kind(labels) for candidate in specs)
    progress(f"exact answers for the recall of {names} over {labels:,} labels")
    calibration = Calibration(bundle, rows_LE)
    target = max(TARGET, spec.recall_floor)
    candidates: list[_Candidate] = []
    lists = like if like is not None and like.has_lists else None
    for candidate in specs:
        progress(f"train and fill {candidate.kind(labels)}")
        index = make_index(candidate, bundle, rows_LE, calibration, like=lists)
        lists = lists or index
        # With the same lists codes recall no more than exact rows did, so their trials start there.
        exact = candidates[0].chosen if candidates else None
        candidates.append(_try_params(bundle, calibration, index, target, exact, progress))
    first = candidates[0]
    check_floor(first.chosen.lowest, spec, calibration, len(first.trials), "Use --spec flat")
    kinds = _compare_kinds(bundle, calibration, target, candidates, progress) if len(candidates) > 1 else []
    best = candidates[choose_kind(kinds) if kinds else 0]
    index, params, params_at, filtered = best.index, best.chosen.params, list[SearchParamsAt](), None
    if index.has_lists:
        params_at = tune_dial_params(bundle, index, params, calibration, progress, target)
        if dial_points := derived_dial_points(bundle):
            # Derived priors are measured alone, up to all lists: a request without them keeps its cheaper parameters.
            k_factor = max(_K_FACTORS.get(index.kind, (1,)))
            most = SearchParams(nprobe=index.list_count, k_factor=k_factor, head=index.head_lists > 0)
            derived = Calibration(bundle, rows_LE, dial_points=dial_points)
            params_at += tune_dial_params(bundle, index, most, derived, progress, (1 + spec.recall_floor) / 2)
            check_floor(min(params_at, key=lambda point: point.recall), spec, derived, 1, "Use --spec flat")
        filtered = tune_filtered(bundle, rows_LE, Searcher(bundle, index, params, (), params_at), spec, progress)
    served = [point.model_dump(exclude={"k", "params"}) for point in params_at if point.k == calibration.k]
    return TunedIndex(
        kind=index.kind,
        dim=rows_LE.shape[1],
        index=index,
        chosen=best.chosen,
        params_at=params_at,
        trials=[trial for candidate in candidates for trial in candidate.trials],
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        recall=[RecallAt(**point) for point in served] or best.chosen.recall,
        kinds=kinds,
        filtered=filtered,
        seconds=time.perf_counter() - started,
    )


def _try_params(
    bundle: Bundle, calibration: Calibration, index: FaissIndex, target: float, exact: Trial | None, progress: Progress
) -> _Candidate:
    """Try parameters, cheapest first, until recall suffices; `exact` is the chosen trial of uncompressed rows."""
    nprobe, goal = (1, target) if exact is None else (exact.params.nprobe, min(target, exact.lowest.recall))
    trials: list[Trial] = []
    for params in list_search_params(index):
        if params.nprobe < nprobe:
            continue
        recall, rate = calibration.measure(Searcher(bundle, index, params))
        trials.append(Trial(kind=index.kind, params=params, recall=recall, queries_per_second=round(rate, 1)))
        progress(f"{params.words}: lowest recall {trials[-1].lowest.recall:.4f}")
        if trials[-1].lowest.recall >= goal:
            break
    return _Candidate(index, max(trials, key=lambda trial: trial.lowest.recall), trials)


def list_search_params(index: FaissIndex) -> Iterator[SearchParams]:
    """Yield parameters to try on an index, roughly cheapest first, up to every list."""
    if not index.has_lists:
        yield SearchParams()
        return
    all_nprobe = _FINER_NPROBE if index.kind == "ivf_flat" else _NPROBE
    all_params = [
        SearchParams(nprobe=nprobe, k_factor=k_factor, head=head)
        for k_factor in _K_FACTORS.get(index.kind, (1,))
        for nprobe in sorted({min(nprobe, index.list_count) for nprobe in all_nprobe})
        for head in ((False, True) if index.head_lists else (False,))
    ]
    # A list of the head holds more labels than another list.
    head_cost = index.head_lists * ROWS_PER_HEAD_LIST * index.list_count / index.labels
    yield from sorted(all_params, key=lambda params: (params.nprobe + head_cost * params.head) * params.k_factor)


def tune_dial_params(
    bundle: Bundle,
    index: FaissIndex,
    most: SearchParams,
    calibration: Calibration,
    progress: Progress,
    target: float,
) -> list[SearchParamsAt]:
    """Find the least sufficient parameters of each dial point and depth, at most those given.

    Recall suffices at the target, or at the recall of the given parameters if that is below the target. The most
    frequent labels must reach this recall on their own as well: time must not be saved at their expense.
    """
    cheaper = [params for params in list_search_params(index) if params.maximum(most) == most != params]
    searcher = Searcher(bundle, index, most)
    frequent_L = np.zeros(index.labels, np.bool_)
    frequent_L[np.argsort(-bundle.labels.log_pi, kind="stable")[: min(_FREQUENT, index.labels // 10)]] = True
    params_at: list[SearchParamsAt] = []
    for k in calibration.depths:
        enough = calibration.measure(searcher.with_params(most), k)[0]
        least: dict[int, SearchParamsAt] = {}
        for params in (*cheaper, most):
            rows_QK, hits_QK = calibration.search(searcher.with_params(params), k)
            frequent = (
                calibration.measure_labels(frequent_L, rows_QK, hits_QK) if params != most else [1.0] * len(enough)
            )
            for i, point in enumerate(calibration.recall(hits_QK)):
                if i not in least and min(point.recall, frequent[i]) >= min(target, enough[i].recall):
                    least[i] = SearchParamsAt(**dict(point), k=k, params=params)
            if len(least) == len(enough):
                break
        of_k = [least[i] for i in range(len(enough))]
        progress(f"for the best {k}: " + "; ".join(f"{point.params.words} at {point.coordinates}" for point in of_k))
        params_at += of_k
    return params_at


def choose_kind(trials: Sequence[Trial]) -> int:
    """Choose the fastest kind if it beats the first by `MARGIN`, otherwise the first."""
    speeds = [trial.queries_per_second or 0.0 for trial in trials]
    fastest = max(range(len(speeds)), key=speeds.__getitem__)
    return fastest if speeds[fastest] >= MARGIN * speeds[0] else 0


def _compare_kinds(
    bundle: Bundle, calibration: Calibration, target: float, candidates: Sequence[_Candidate], progress: Progress
) -> list[Trial]:
    """Return one trial per kind, with speeds of the kinds whose recall suffices.

    Recall suffices if it reaches the target, or the recall of the simplest kind.
    """
    least = min(target, candidates[0].chosen.lowest.recall)
    timed = [candidate for candidate in candidates if candidate.chosen.lowest.recall >= least]
    progress(f"queries per second of {', '.join(candidate.index.kind for candidate in timed)}")
    searchers = [Searcher(bundle, candidate.index, candidate.chosen.params) for candidate in timed]
    rates = measure_rates(searchers, calibration)
    speeds = {candidate.index.kind: round(rate, 1) for candidate, rate in zip(timed, rates, strict=True)}
    return [
        candidate.chosen.model_copy(
            update={
                "queries_per_second": speeds.get(candidate.index.kind),
                "bytes_per_label": bytes_per_label(candidate.index),
            }
        )
        for candidate in candidates
    ]


def measure_rates(
    searchers: Sequence[Searcher], calibration: Calibration, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Measure the queries per CPU second of searchers, one query at a time.

    Every query asks for `calibration.k` results. The searchers take turns, and the fastest of a query's rounds counts,
    so that other load on the machine affects all searchers alike.
    """
    queries_QE = calibration.queries_QE[spread_rows(len(calibration.queries_QE), _TIMED)]
    seconds_SQ = np.full((len(searchers), len(queries_QE)), np.inf)
    for _ in range(_ROUNDS):
        # In turn for each round, so that other load on the machine slows all kinds alike.
        for i, searcher in enumerate(searchers):
            for query in range(len(queries_QE)):
                started = clock()
                searcher.search(queries_QE[query : query + 1], calibration.k)
                seconds_SQ[i, query] = min(seconds_SQ[i, query], clock() - started)
    return [len(queries_QE) / float(seconds) for seconds in seconds_SQ.sum(axis=1)]
