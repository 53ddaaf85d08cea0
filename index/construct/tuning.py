"""Build an index and choose its search effort by measured recall.

The build starts with the cheapest effort and raises it until recall reaches the target at every place on the dials.

Legend: `L` labels, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from longtail.bundle import Bundle
from longtail.index.construct.filtered import tune_filtered
from longtail.index.construct.recall import Calibration, Progress, derived_dial_points
from longtail.index.construct.settings import (
    TARGET,
    efforts_at,
    efforts_of,
    rates,
    trial_at,
)
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.training import by_reach, bytes_per_label, make_index
from longtail.index.errors import RecallFloorError
from longtail.index.manifests import (
    CollectionRecord,
    Device,
    Effort,
    EffortAt,
    FilteredSearch,
    Kind,
    RecallAt,
    Trial,
)
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.search.gpu import check_device
from longtail.index.search.searcher import Searcher

MARGIN = 1.25
"""Factor by which another kind must exceed the first kind's queries per second to be chosen: a small or disturbed
difference does not justify giving up uncompressed rows."""


@dataclass(frozen=True)
class TunedIndex:
    """An index in memory, or a Milvus collection, at the chosen setting, with its measurements.

    The fields are those of `ReleaseManifest`.
    """

    kind: Kind
    dim: int
    index: FaissIndex | None
    chosen: Trial
    efforts: list[EffortAt]
    trials: list[Trial]
    recall_k: int
    recall_queries: int
    seconds: float
    bytes_per_label: float | None
    kinds: list[Trial] = field(default_factory=list)
    filtered: FilteredSearch | None = None
    collection: CollectionRecord | None = None

    @property
    def recall(self) -> list[RecallAt]:
        """Return the served recall at every dial point, at the largest depth."""
        served = [at for at in self.efforts if at.k == self.recall_k]
        return [RecallAt(**at.model_dump(exclude={"k", "effort"})) for at in served] or self.chosen.recall

    def searcher(self, bundle: Bundle) -> Searcher:
        """Create the searcher of a release of this index, which FAISS must hold."""
        assert self.index is not None
        filtered = self.filtered.efforts if self.filtered else ()
        return Searcher(bundle, self.index, self.chosen.effort, filtered, self.efforts)


@dataclass(frozen=True)
class _Tuned:
    """A kind of index at its first setting with enough recall, or at the one with the most."""

    index: FaissIndex
    bytes: float
    chosen: Trial
    trials: list[Trial]


def tune_index(
    bundle: Bundle, spec: IndexSpec, device: Device, progress: Progress, like: FaissIndex | None = None
) -> TunedIndex:
    """Build an index over a bundle's labels whose recall suffices at every λ and μ.

    Settings are tried cheapest first. On large catalogues `auto` builds every kind that fits, over the same lists, and
    chooses the fastest. With `like`, the index of an earlier release, the same kind is filled over the same lists, and
    nothing is clustered. Raises SpecError, DeviceError, or RecallFloorError where the best setting stays below the
    floor.
    """
    check_device(device)
    started = time.perf_counter()
    rows_LE = bundle.rows()
    labels = len(rows_LE)
    candidates = spec.candidates(labels, device) if like is None else [replace(spec, text=like.kind)]
    names = ", ".join(candidate.kind(labels) for candidate in candidates)
    progress(f"exact answers for the recall of {names} over {labels:,} labels")
    calibration = Calibration(bundle, rows_LE)
    order_L = by_reach(bundle, rows_LE, calibration)
    target = max(TARGET, spec.recall_floor)
    tried: list[_Tuned] = []
    first = like if like is not None and like.has_lists else None
    for candidate in candidates:
        kind, plainer = candidate.kind(labels), tried[0] if tried else None
        progress(f"train and fill {kind}")
        index = make_index(candidate, rows_LE, device, order_L, bundle.augmentation.extra_dims, like=first)
        first = first or index
        # With the same probes codes recall no more than exact rows did, so their trials start there.
        least, sought = Effort(), target
        if plainer is not None:
            least, sought = plainer.chosen.effort, min(target, plainer.chosen.lowest.recall)
        best: Trial | None = None
        trials: list[Trial] = []
        for effort in (effort for effort in efforts_of(index) if effort.probes >= least.probes):
            trials.append(trial_at(bundle, calibration, index, effort))
            lowest = trials[-1].lowest.recall
            progress(f"{effort.words}: lowest recall {lowest:.4f}")
            if best is None or lowest > best.lowest.recall:
                best = trials[-1]
            if lowest >= sought:
                break
        assert best is not None
        tried.append(_Tuned(index, bytes_per_label(index), best, trials))
    check_floor(tried[0].chosen.lowest, spec, calibration, len(tried[0].trials), "Use --spec flat")
    kinds = _timed(bundle, calibration, target, tried, progress) if len(tried) > 1 else []
    taken = tried[choose(kinds) if kinds else 0]
    trials = [trial for each in tried for trial in each.trials]
    efforts = efforts_at(bundle, taken.index, taken.chosen, calibration, progress, target)
    if taken.index.has_lists and (dial_points := derived_dial_points(bundle)):
        # Derived priors are measured apart, up to all lists, so that a request without them needs no harder effort.
        every_list = Effort(probes=taken.index.index.nlist)
        hardest = reduce(Effort.harder, efforts_of(taken.index), every_list)
        of_derived, at_all = (
            Calibration(bundle, rows_LE, dial_points=dial_points),
            taken.chosen.model_copy(update={"effort": hardest}),
        )
        goal = (1 + spec.recall_floor) / 2
        efforts += efforts_at(bundle, taken.index, at_all, of_derived, progress, goal)
        check_floor(min(efforts, key=lambda at: at.recall), spec, of_derived, 1, "Use --spec flat")
    filtered = None
    if taken.index.kind != "flat":
        filtered = tune_filtered(bundle, rows_LE, taken.index, taken.chosen.effort, efforts, spec, progress)
    return TunedIndex(
        kind=taken.index.kind,
        dim=rows_LE.shape[1],
        index=taken.index,
        chosen=taken.chosen,
        efforts=efforts,
        trials=trials,
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        seconds=time.perf_counter() - started,
        bytes_per_label=taken.bytes,
        kinds=kinds,
        filtered=filtered,
    )


def check_floor(lowest: RecallAt, spec: IndexSpec, calibration: Calibration, trials: int, remedy: str) -> None:
    """Raise RecallFloorError if the lowest recall of the best setting is below the spec's floor."""
    if lowest.recall < spec.recall_floor:
        raise RecallFloorError(
            f"index spec {spec.text!r}: expected recall@{calibration.k} >= {spec.recall_floor} against exact search at "
            f"every place on the dials, measured {lowest.recall:.4f} at {lowest.where} with the best of {trials} "
            f"settings; nothing was written. {remedy}, or lower --recall-floor"
        )


def choose(trials: Sequence[Trial]) -> int:
    """Choose the fastest kind if it beats the first by `MARGIN`, otherwise the first."""
    speeds = [trial.queries_per_second or 0.0 for trial in trials]
    quickest = max(range(len(speeds)), key=speeds.__getitem__)
    return quickest if speeds[quickest] >= MARGIN * speeds[0] else 0


def _timed(
    bundle: Bundle, calibration: Calibration, target: float, tried: Sequence[_Tuned], progress: Progress
) -> list[Trial]:
    """Return one trial per kind, with speeds of the kinds whose recall suffices.

    Recall suffices if it reaches the target, or the recall of the simplest kind.
    """
    least = min(target, tried[0].chosen.lowest.recall)
    enough = [tuned for tuned in tried if tuned.chosen.lowest.recall >= least]
    progress(f"queries per second of {', '.join(tuned.index.kind for tuned in enough)}")
    searchers = [Searcher(bundle, tuned.index, tuned.chosen.effort) for tuned in enough]
    found = zip(enough, rates(searchers, calibration), strict=True)
    speeds = {tuned.index.kind: round(speed, 1) for tuned, speed in found}
    return [
        tuned.chosen.model_copy(
            update={"queries_per_second": speeds.get(tuned.index.kind), "bytes_per_label": tuned.bytes}
        )
        for tuned in tried
    ]
