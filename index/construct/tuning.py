"""Build an index and choose its settings by measured recall: how large the exact head, how hard the search.

One approximate index over all rows loses recall as λ and μ grow, because log ν and log π change the rows' norms.
Within a band of similar popularity they vary little, so the most frequent labels go to an exact head and the rest to
an approximate tail; every query searches both. With priors the head holds what any corner of their weights lifts most.
The build chooses the head whose queries score the fewest rows, starts with the cheapest effort, looks harder, then
widens the head, until recall reaches the target everywhere.

Legend: `L` labels, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.construct.bands import KnownCells, by_reach, bytes_per_label, make_bands
from longtail.index.construct.choice import choose, rates
from longtail.index.construct.filtered import tune_filtered
from longtail.index.construct.head import choose_head, head_sizes
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.construct.settings import TARGET, curve_of, efforts_at, efforts_of, trial_at
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import RecallFloorError, SpecError
from longtail.index.manifests import (
    CollectionRecord,
    Device,
    EffortAt,
    FilteredSearch,
    Kind,
    KindTrial,
    Partition,
    RecallAt,
    Trial,
)
from longtail.index.search.band import Band
from longtail.index.search.gpu import check_device
from longtail.index.search.searcher import Searcher


@dataclass(frozen=True)
class TunedIndex:
    """An index in memory whose settings were chosen, and what was measured on the way.

    Attributes:
        kind: kind of the index, or of its tail band.
        dim: coordinates of an augmented row.
        bands: the bands of the chosen setting.
        chosen: the setting that suffices everywhere.
        efforts: the least effort of every place on the dials and depth; empty where there is none less.
        trials: every setting that was tried, in order.
        recall_k: results per query that recall was measured at.
        recall_queries: calibration queries that it was measured with.
        seconds: duration of the whole build.
        bytes_per_label: of the last band's index file; None of a collection.
        kinds: what `auto` had to choose from; empty where it had no choice.
        curve: what less and more effort recalls and how quick it is, of every kind that was built.
        filtered: what search under filters takes and recalls; None of an exact index.
        partition: where the cells come from; None if this build trained them, or there are none.
        collection: where the rows are, in place of bands.
    """

    kind: Kind
    dim: int
    bands: list[Band]
    chosen: Trial
    efforts: list[EffortAt]
    trials: list[Trial]
    recall_k: int
    recall_queries: int
    seconds: float
    bytes_per_label: float | None
    kinds: list[KindTrial] = field(default_factory=list)
    curve: list[KindTrial] = field(default_factory=list)
    filtered: FilteredSearch | None = None
    partition: Partition | None = None
    collection: CollectionRecord | None = None

    @property
    def recall(self) -> list[RecallAt]:
        """Recall of what is served, at every place on the dials and the largest depth."""
        served = [at for at in self.efforts if at.k == self.recall_k]
        return [RecallAt(**at.model_dump(exclude={"k", "effort"})) for at in served] or self.chosen.recall

    def searcher(self, bundle: Bundle) -> Searcher:
        """A searcher as a release of this index has it, if FAISS holds it."""
        filtered = self.filtered.efforts if self.filtered else ()
        return Searcher(bundle, self.bands, self.chosen.effort, filtered, self.efforts)


def tune_index(bundle: Bundle, spec: IndexSpec, device: Device, progress: Progress) -> TunedIndex:
    """Build an index over a bundle's labels, cheapest setting first, until its recall suffices at every λ and μ.

    An `auto` that has a choice builds every kind that fits, over the same cells, and takes the quickest.

    Args:
        bundle: whose augmented rows are indexed.
        spec: the kind, the recall floor and the memory.
        device: where FAISS trains and adds.
        progress: told what is being done, one line at a time.

    Raises:
        SpecError: the spec does not fit the catalogue, FAISS refuses it, or every kind takes too many bytes.
        DeviceError: the device is not there.
        RecallFloorError: the best setting stays below the floor.
    """
    check_device(device)
    started = time.perf_counter()
    rows_LE = bundle.rows()
    candidates = _fitting(spec, device, *rows_LE.shape)
    names = ", ".join(candidate.kind(len(rows_LE)) for candidate in candidates)
    progress(f"exact answers for the recall of {names} over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE)
    site = _Site(bundle, rows_LE, by_reach(bundle, rows_LE, calibration), calibration, device, progress)
    tried: list[_Tuned] = []
    for candidate in candidates:
        tried += _tune(site, candidate, tried[0] if tried else None)
    if not tried:
        raise _too_large(spec, site.bytes)
    check_floor(tried[0].chosen.lowest, spec, calibration, len(tried[0].trials), "Use --spec flat")
    kinds = _timed(site, spec, tried) if len(tried) > 1 else []
    taken = tried[choose(kinds) if kinds else 0]
    trials = [trial for each in tried for trial in each.trials]
    efforts = efforts_at(
        bundle, taken.bands, taken.chosen, trials, calibration, progress, max(TARGET, spec.recall_floor)
    )
    curve = []
    for each in tried:
        curve += curve_of(bundle, each.bands, each.chosen, trials, calibration, site.bytes[each.kind])
    filtered = None
    if taken.kind != "flat":
        filtered = tune_filtered(bundle, rows_LE, taken.bands, taken.chosen.effort, spec, progress)
    return TunedIndex(
        kind=taken.kind,
        dim=rows_LE.shape[1],
        bands=taken.bands,
        chosen=taken.chosen,
        efforts=efforts,
        trials=trials,
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        seconds=time.perf_counter() - started,
        bytes_per_label=site.bytes[taken.kind],
        kinds=kinds,
        curve=curve,
        filtered=filtered,
    )


def check_floor(lowest: RecallAt, spec: IndexSpec, calibration: Calibration, trials: int, remedy: str) -> None:
    """Refuse the best of some settings where its recall is below the spec's floor.

    Raises:
        RecallFloorError: it is.
    """
    if lowest.recall < spec.recall_floor:
        raise RecallFloorError(
            f"index spec {spec.text!r}: expected recall@{calibration.k} >= {spec.recall_floor} against exact search at "
            f"every place on the dials, measured {lowest.recall:.4f} at {lowest.where} with the best of {trials} "
            f"settings; nothing was written. {remedy}, or lower --recall-floor",
            bias_removal=lowest.bias_removal,
            popularity=lowest.popularity,
            recall=lowest.recall,
            floor=spec.recall_floor,
        )


@dataclass(frozen=True)
class _Site:
    """What all settings of one build share.

    Attributes:
        bundle: whose labels are indexed.
        rows_LE: float32, their augmented rows.
        by_reach_L: int64, label rows, those of the head first.
        calibration: measures recall.
        device: where FAISS trains.
        progress: told what is being done.
        cells: once they were trained.
        bytes: bytes per label of every kind that was built.
    """

    bundle: Bundle
    rows_LE: Float32
    by_reach_L: Int64
    calibration: Calibration
    device: Device
    progress: Progress
    cells: list[KnownCells] = field(default_factory=list)
    bytes: dict[Kind, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Tuned:
    """A kind at the setting of it that recalls best, or enough."""

    kind: Kind
    bands: list[Band]
    chosen: Trial
    trials: list[Trial]


def _tune(site: _Site, spec: IndexSpec, plainer: _Tuned | None) -> list[_Tuned]:
    """The kind of a spec, at its cheapest setting that recalls enough; none if it takes too many bytes.

    Codes find no more than the plainer kind did with as large a head and as many probes: they begin there.
    """
    target = max(TARGET, spec.recall_floor)
    if plainer is not None:
        target = min(target, plainer.chosen.lowest.recall)
    best: tuple[Trial, list[Band]] | None = None
    trials = []
    for trial, bands in _settings(site, spec, target, plainer.chosen if plainer else None):
        trials.append(trial)
        if best is None or trial.lowest.recall > best[0].lowest.recall:
            best = trial, bands
        if trial.lowest.recall >= target:
            break
    return [] if best is None else [_Tuned(spec.kind(len(site.rows_LE)), best[1], best[0], trials)]


def _settings(site: _Site, spec: IndexSpec, target: float, least: Trial | None) -> Iterator[tuple[Trial, list[Band]]]:
    """Measured settings and their bands, cheapest first; none of a kind that takes too many bytes."""
    kind = spec.kind(len(site.rows_LE))
    if least is not None:
        heads = [least.head]
    elif kind in ("flat", "factory"):
        heads = [0]
    else:
        heads = head_sizes(len(site.rows_LE), spec.least_labels())
    filled, bands = heads[0], _filled(site, spec, heads[0])
    if spec.bytes_per_label is not None and site.bytes[kind] > spec.bytes_per_label:
        return
    if len(heads) > 1:
        enough = choose_head(site.bundle, bands, heads, site.by_reach_L, site.calibration, target)
        heads = [head for head in heads if head >= enough]
    for head in heads:
        if head != filled:
            filled, bands = head, _filled(site, spec, head)
        for effort in efforts_of(bands[-1]):
            if least is not None and effort.probes < least.effort.probes:
                continue
            trial = trial_at(site.bundle, site.calibration, bands, effort, head)
            site.progress(f"probes {effort.probes}, refine {effort.refine}: lowest recall {trial.lowest.recall:.4f}")
            yield trial, bands


def _filled(site: _Site, spec: IndexSpec, head: int) -> list[Band]:
    """The bands of a head, over cells that were trained for another head or kind if there are any."""
    kind = spec.kind(len(site.rows_LE))
    site.progress(f"train and fill {kind}" + (f", exact head of {head:,} labels" if head else ""))
    known = site.cells[0] if site.cells else None
    bands = make_bands(spec, site.rows_LE, site.by_reach_L, head, site.device, known)
    site.bytes[kind] = bytes_per_label(bands[-1])
    if known is None and (trained := KnownCells.of(bands, site.rows_LE.shape[1])) is not None:
        site.cells.append(trained)
    return bands


def _timed(site: _Site, spec: IndexSpec, tried: Sequence[_Tuned]) -> list[KindTrial]:
    """The kinds that were tried, those timed that recall as much as is looked for, or as the plainest does."""
    least = min(max(TARGET, spec.recall_floor), tried[0].chosen.lowest.recall)
    enough = [tuned for tuned in tried if tuned.chosen.lowest.recall >= least]
    site.progress(f"queries per second of {', '.join(tuned.kind for tuned in enough)}")
    searchers = [Searcher(site.bundle, tuned.bands, tuned.chosen.effort) for tuned in enough]
    speeds = dict(zip([tuned.kind for tuned in enough], rates(searchers, site.calibration), strict=True))
    return [
        KindTrial(
            kind=tuned.kind,
            head=tuned.chosen.head,
            effort=tuned.chosen.effort,
            recall=tuned.chosen.recall,
            queries_per_second=round(speeds[tuned.kind], 1) if tuned.kind in speeds else None,
            bytes_per_label=site.bytes[tuned.kind],
        )
        for tuned in tried
    ]


def _fitting(spec: IndexSpec, device: Device, labels: int, dim: int) -> list[IndexSpec]:
    """The candidates that may fit; an exact index alone where it does.

    Raises:
        SpecError: none does.
    """
    candidates = spec.candidates(labels, device)
    if spec.bytes_per_label is not None:
        least = {candidate.kind(labels): candidate.least_bytes(labels, dim) for candidate in candidates}
        candidates = [candidate for candidate in candidates if least[candidate.kind(labels)] <= spec.bytes_per_label]
        if not candidates:
            raise _too_large(spec, least)
    return candidates[:1] if candidates[0].kind(labels) == "flat" else candidates


def _too_large(spec: IndexSpec, found: Mapping[Kind, float]) -> SpecError:
    taken = ", ".join(f"{kind} {size:g} or more" for kind, size in found.items())
    return SpecError(
        f"index spec {spec.text!r}: expected at most {spec.bytes_per_label:g} bytes per label, received a catalogue of "
        f"which an index takes: {taken}"
    )
