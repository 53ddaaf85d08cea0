"""Build an index and choose its settings by measured recall: how large the exact head, how hard the search.

One approximate index over all rows loses recall as λ and μ grow, because log ν and log π change the rows' norms.
Within a band of similar popularity they vary little, so the most frequent labels go to an exact head and the rest to
an approximate tail; every query searches both. With priors the head holds what any corner of their weights lifts most.
The build starts with the cheapest setting, looks harder, then widens the head, until recall reaches the target
everywhere.

Legend: `L` labels, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import faiss

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32
from longtail.index.construct.bands import by_reach, make_bands
from longtail.index.construct.filtered import tune_filtered
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import RecallFloorError
from longtail.index.manifests import Device, Effort, EffortAt, FilteredSearch, Kind, RecallAt, Trial
from longtail.index.search.band import CODED, Band, pad, probes_name
from longtail.index.search.gpu import check_device
from longtail.index.search.searcher import Searcher

_TARGET = 0.99
"""Recall at which the build stops looking for better settings; a floor above it becomes the target."""
_HEAD_SHARES = (0.003, 0.01, 0.04, 0.16)
_HEAD_LEAST = 1_000
_PROBES: dict[str, tuple[int, ...]] = {"nprobe": (8, 16, 32, 64, 128, 256), "efSearch": (64, 128, 256, 512), "": (1,)}
_REFINE: dict[Kind, tuple[int, ...]] = {
    "ivf_sq": (1, 2),
    "ivf_fastscan": (1, 2, 4, 8),
    "ivf_pq": (4, 16),
    "factory": (1, 4, 16),
}


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
        filtered: what search under filters takes and recalls; None of an exact index.
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
    filtered: FilteredSearch | None = None

    @property
    def recall(self) -> list[RecallAt]:
        """Recall of what is served, at every place on the dials and the largest depth."""
        served = [at for at in self.efforts if at.k == self.recall_k]
        return [RecallAt(**at.model_dump(exclude={"k", "effort"})) for at in served] or self.chosen.recall

    def searcher(self, bundle: Bundle) -> Searcher:
        """A searcher as a release of this index has it."""
        filtered = self.filtered.efforts if self.filtered else ()
        return Searcher(bundle, self.bands, self.chosen.effort, filtered, self.efforts)


def tune_index(bundle: Bundle, spec: IndexSpec, device: Device, progress: Progress) -> TunedIndex:
    """Build an index over a bundle's labels, cheapest setting first, until its recall suffices at every λ and μ.

    Args:
        bundle: whose augmented rows are indexed.
        spec: the kind and the recall floor.
        device: where FAISS trains and adds.
        progress: told what is being done, one line at a time.

    Raises:
        SpecError: the spec does not fit the catalogue, or FAISS refuses it.
        DeviceError: the device is not there.
        RecallFloorError: the best setting stays below the floor.
    """
    check_device(device)
    started = time.perf_counter()
    rows_LE = bundle.rows()
    kind = spec.kind(len(rows_LE))
    progress(f"exact answers for the recall of {kind} over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE)
    settings = _settings(bundle, spec, rows_LE, calibration, device, progress)
    chosen, bands = next(settings)
    trials = [chosen]
    target = max(_TARGET, spec.recall_floor)
    while chosen.lowest.recall < target and (tried := next(settings, None)):
        trials.append(tried[0])
        if tried[0].lowest.recall > chosen.lowest.recall:
            chosen, bands = tried
    _check_floor(chosen.lowest, spec, calibration, len(trials), "Use --spec flat")
    efforts = _efforts_at(bundle, bands, chosen, trials, calibration, progress)
    filtered = None if kind == "flat" else tune_filtered(bundle, rows_LE, bands, chosen.effort, spec, progress)
    seconds = time.perf_counter() - started
    return TunedIndex(
        kind, rows_LE.shape[1], bands, chosen, efforts, trials, calibration.k, calibration.queries, seconds, filtered
    )


def refill_index(
    bundle: Bundle, spec: IndexSpec, bands: Sequence[Band], effort: Effort, head: int, progress: Progress
) -> TunedIndex:
    """The same index over new rows: cells stay, every label goes to where its row belongs now.

    Effort begins where the index stands, and grows until recall reaches the floor.

    Args:
        bundle: whose augmented rows are indexed; coordinates as before.
        spec: what the index was built to, with its recall floor.
        bands: of the index, read into memory of their own; their content is replaced.
        effort: the index's.
        head: labels in its exact head.
        progress: told what is being done, one line at a time.

    Raises:
        RecallFloorError: the best effort stays below the floor.
    """
    started = time.perf_counter()
    rows_LE = bundle.rows()
    progress(f"exact answers for the recall over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE)
    for band in bands:
        progress(f"fill {band.name}")
        rows_NE = pad(rows_LE[band.rows_N], band.index.d)
        band.index.reset()
        if band.kind in CODED:
            # Within what old rows spanned, codes would cut off those that moved most: the ones that a new prior lifts.
            band.index.train(rows_NE)
        band.index.add(rows_NE)
    efforts = [effort, *(more for more in _efforts(bands[-1]) if more != effort and _at_least(more, effort))]
    trials = []
    for tried in efforts:
        recall, rate = calibration.measure(Searcher(bundle, bands, tried))
        trials.append(Trial(head=head, effort=tried, recall=recall, queries_per_second=round(rate, 1)))
        if trials[-1].lowest.recall >= spec.recall_floor:
            break
    chosen = max(trials, key=lambda trial: trial.lowest.recall)
    _check_floor(chosen.lowest, spec, calibration, len(trials), "build the index again")
    efforts_at = _efforts_at(bundle, bands, chosen, trials, calibration, progress)
    kind = spec.kind(len(rows_LE))
    filtered = None if kind == "flat" else tune_filtered(bundle, rows_LE, bands, chosen.effort, spec, progress)
    seconds = time.perf_counter() - started
    return TunedIndex(
        kind,
        rows_LE.shape[1],
        list(bands),
        chosen,
        efforts_at,
        trials,
        calibration.k,
        calibration.queries,
        seconds,
        filtered,
    )


def _check_floor(lowest: RecallAt, spec: IndexSpec, calibration: Calibration, trials: int, remedy: str) -> None:
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


def _settings(
    bundle: Bundle, spec: IndexSpec, rows_LE: Float32, calibration: Calibration, device: Device, progress: Progress
) -> Iterator[tuple[Trial, list[Band]]]:
    """Measured settings and their bands, cheapest first."""
    kind = spec.kind(len(rows_LE))
    by_reach_L = by_reach(bundle, rows_LE, calibration)
    for head in _heads(kind, len(rows_LE)):
        progress(f"train and fill {kind}" + (f", exact head of {head:,} labels" if head else ""))
        bands = make_bands(spec, rows_LE, by_reach_L, head, device)
        for effort in _efforts(bands[-1]):
            recall, rate = calibration.measure(Searcher(bundle, bands, effort))
            trial = Trial(head=head, effort=effort, recall=recall, queries_per_second=round(rate, 1))
            progress(f"probes {effort.probes}, refine {effort.refine}: lowest recall {trial.lowest.recall:.4f}")
            yield trial, bands


def _heads(kind: Kind, labels: int) -> list[int]:
    """Head sizes to try, smallest first; 0 where all labels share one index."""
    if kind in ("flat", "factory"):
        return [0]
    least = min(_HEAD_LEAST, labels // 10)
    return sorted({max(least, int(labels * share)) for share in _HEAD_SHARES})


def _efforts(band: Band) -> Iterator[Effort]:
    """Efforts to try on the approximate band, about cheapest first; none beyond looking everywhere."""
    name = probes_name(band.index)
    everywhere = faiss.try_extract_index_ivf(band.index).nlist if name == "nprobe" else len(band.rows_N)
    depths = sorted({min(probes, everywhere) for probes in _PROBES[name]})
    efforts = [Effort(probes=probes, refine=refine) for refine in _REFINE.get(band.kind, (1,)) for probes in depths]
    yield from sorted(efforts, key=lambda effort: effort.probes * effort.refine)


def _at_least(more: Effort, effort: Effort) -> bool:
    return more.probes >= effort.probes and more.refine >= effort.refine


def _efforts_at(
    bundle: Bundle,
    bands: Sequence[Band],
    chosen: Trial,
    trials: Sequence[Trial],
    calibration: Calibration,
    progress: Progress,
) -> list[EffortAt]:
    """The least effort of each place and depth that reaches the target there, or as much as the chosen one does."""
    if bands[-1].kind == "factory":  # its wrappers take no effort per search
        return []
    most = chosen.effort
    lesser = [effort for effort in _efforts(bands[-1]) if _at_least(most, effort) and effort != most]
    tried = {(trial.effort, calibration.k): trial.recall for trial in trials if trial.head == chosen.head}
    efforts: list[EffortAt] = []
    for k in calibration.depths if lesser else ():
        measured = {
            effort: tried.get((effort, k)) or calibration.measure(Searcher(bundle, bands, effort), k)[0]
            for effort in (*lesser, most)
        }
        for place, enough in enumerate(measured[most]):
            target = min(_TARGET, enough.recall)
            least = next(effort for effort, recalls in measured.items() if recalls[place].recall >= target)
            efforts.append(EffortAt(**dict(measured[least][place]), k=k, effort=least))
        probes = ", ".join(f"{at.effort.probes} at {at.where}" for at in efforts if at.k == k)
        progress(f"probes for the best {k}: {probes}")
    return efforts
