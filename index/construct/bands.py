"""Build the bands of an index and choose, by measurement, how large the head and how hard the search.

One approximate index over all rows loses recall as λ grows, because log p_n changes the rows' norms. Within
a band of similar popularity it varies little, so the most frequent labels go to an exact head and the rest to
an approximate tail; every query searches both. The build starts with the cheapest setting, looks harder, then
widens the head, until recall reaches the target at every λ.

Legend: `L` labels, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import faiss
import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.construct.recall import Calibration
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.train import check_device, train_index
from longtail.index.errors import RecallFloorError
from longtail.index.manifest import Device, Effort, Kind, Trial
from longtail.index.search.band import Band, probes_name
from longtail.index.search.searcher import Searcher

Report = Callable[[str], None]

_TARGET = 0.99
"""Recall at which the build stops looking for better settings; a floor above it becomes the target."""
_HEAD_SHARES = (0.003, 0.01, 0.04, 0.16)
_HEAD_LEAST = 1_000
_PROBES: dict[str, tuple[int, ...]] = {"nprobe": (8, 16, 32, 64, 128, 256), "efSearch": (64, 128, 256, 512), "": (1,)}
_REFINE: dict[Kind, tuple[int, ...]] = {"ivf_pq": (4, 16), "factory": (1, 4, 16)}


@dataclass(frozen=True)
class Construction:
    """An index in memory, its chosen effort, and everything that was tried on the way."""

    kind: Kind
    dim: int
    bands: list[Band]
    chosen: Trial
    trials: list[Trial]
    recall_k: int
    recall_queries: int
    seconds: float


def construct(bundle: Bundle, spec: IndexSpec, device: Device, report: Report) -> Construction:
    """Build, measure and tune.

    Args:
        bundle: whose augmented rows are indexed.
        spec: the kind and the recall floor.
        device: where FAISS trains and adds.
        report: told what is being done, one line each.

    Raises:
        SpecError: the spec does not fit the catalogue, or FAISS refuses it.
        DeviceError: the device is not there.
        RecallFloorError: the best setting stays below the floor.
    """
    check_device(device)
    started = time.perf_counter()
    rows_LE = bundle.rows()
    kind = spec.kind(len(rows_LE))
    report(f"exact answers for the recall of {kind} over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE)
    settings = _settings(bundle, spec, rows_LE, calibration, device, report)
    chosen, bands = next(settings)
    trials = [chosen]
    target = max(_TARGET, spec.recall_floor)
    while chosen.lowest.recall < target and (tried := next(settings, None)):
        trials.append(tried[0])
        if tried[0].lowest.recall > chosen.lowest.recall:
            chosen, bands = tried
    lowest = chosen.lowest
    if lowest.recall < spec.recall_floor:
        raise RecallFloorError(
            f"index spec {spec.text!r}: expected recall@{calibration.k} >= {spec.recall_floor} against exact search at "
            f"every λ, measured {lowest.recall:.4f} at λ = {lowest.bias_removal:g} with the best of {len(trials)} "
            "settings; nothing was written. Use --spec flat, or lower --recall-floor",
            bias_removal=lowest.bias_removal,
            recall=lowest.recall,
            floor=spec.recall_floor,
        )
    seconds = time.perf_counter() - started
    return Construction(kind, rows_LE.shape[1], bands, chosen, trials, calibration.k, calibration.queries, seconds)


def _settings(
    bundle: Bundle, spec: IndexSpec, rows_LE: Float32, calibration: Calibration, device: Device, report: Report
) -> Iterator[tuple[Trial, list[Band]]]:
    """Measured settings and their bands, cheapest first."""
    kind = spec.kind(len(rows_LE))
    by_popularity_L = np.argsort(-bundle.labels.log_pn, kind="stable")
    for head in _heads(kind, len(rows_LE)):
        report(f"train and fill {kind}" + (f", exact head of {head:,} labels" if head else ""))
        bands = _bands(spec, rows_LE, by_popularity_L, head, device)
        for effort in _efforts(bands[-1]):
            recall, rate = calibration.measure(Searcher(bundle, bands, effort))
            trial = Trial(head=head, effort=effort, recall=recall, queries_per_second=round(rate, 1))
            report(f"probes {effort.probes}, refine {effort.refine}: lowest recall {trial.lowest.recall:.4f}")
            yield trial, bands


def _heads(kind: Kind, labels: int) -> list[int]:
    """Head sizes to try, smallest first; 0 where all labels share one index."""
    if kind in ("flat", "factory"):
        return [0]
    least = min(_HEAD_LEAST, labels // 10)
    return sorted({max(least, int(labels * share)) for share in _HEAD_SHARES})


def _efforts(band: Band) -> Iterator[Effort]:
    """Efforts to try on the approximate band, cheapest first; none beyond looking everywhere."""
    name = probes_name(band.index)
    everywhere = faiss.try_extract_index_ivf(band.index).nlist if name == "nprobe" else len(band.rows_N)
    depths = sorted({min(probes, everywhere) for probes in _PROBES[name]})
    for refine in _REFINE.get(band.kind, (1,)):
        for probes in depths:
            yield Effort(probes=probes, refine=refine)


def _bands(spec: IndexSpec, rows_LE: Float32, by_popularity_L: Int64, head: int, device: Device) -> list[Band]:
    """The exact head, if any, and the rest as the spec asks; label rows ascend within a band."""
    labels = len(rows_LE)

    def band(name: str, spec: IndexSpec, rows_N: Int64) -> Band:
        factory, width = spec.factory(len(rows_N), rows_LE.shape[1])
        kind = spec.kind(labels)
        return Band(name, kind, factory, train_index(factory, width, rows_LE[rows_N], device), rows_N)

    if not head:
        return [band("all", spec, np.arange(labels, dtype=np.int64))]
    # An approximate `auto` keeps its kind when its tail alone would be small enough for flat.
    tail_spec = IndexSpec(spec.kind(labels), spec.recall_floor)
    return [
        band("head", IndexSpec("flat"), np.sort(by_popularity_L[:head])),
        band("tail", tail_spec, np.sort(by_popularity_L[head:])),
    ]
