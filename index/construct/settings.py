"""Settings of an index: what efforts there are, what each recalls, and which is the least that suffices.

Legend: `L` labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import faiss
import numpy as np

from longtail.bundle import Bundle
from longtail.index.construct.choice import rates
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.manifests import Effort, EffortAt, Kind, KindTrial, Trial
from longtail.index.search.band import SCANNED_PER_CANDIDATE, Band, probes_name
from longtail.index.search.joined import JoinedBands
from longtail.index.search.searcher import Searcher

TARGET = 0.99
"""Recall at which the build stops looking for better settings; a floor above it becomes the target."""
_PROBES: dict[str, tuple[int, ...]] = {
    "nprobe": (2, 4, 8, 16, 32, 64, 128, 256),
    "efSearch": (64, 128, 256, 512),
    "": (1,),
}
_BETWEEN = (3, 6, 12, 24, 48, 96, 192)
"""Further cells to visit, where there is nothing else to choose."""
_HEAD_PER_TAIL = 3
"""Rows of a head in the time that it takes for one of a cell: 5 ns and 15 of 65 coordinates."""
_LEAST_HEAD = 100
_MORE = 2
"""Efforts beyond the one that suffices, of which a curve tells what there is still to gain."""
_REFINE: dict[Kind, tuple[int, ...]] = {
    "ivf_sq": (1, 2),
    "ivf_fastscan": (1, 2, 4, 8),
    "ivf_pq": (4, 16),
    "factory": (1, 4, 16),
}


def half_decades(least: int, below: int) -> list[int]:
    """Sizes below a bound, each √10 times the one before, smallest first."""
    sizes: list[int] = []
    while (size := round(least * 10 ** (len(sizes) / 2))) < below:
        sizes.append(size)
    return sizes


def inner_heads(labels: int) -> list[int]:
    """How much of an exact head of so many labels an effort may have scored, besides all, smallest first."""
    return [0, *half_decades(_LEAST_HEAD, labels)]


def efforts_of(band: Band) -> Iterator[Effort]:
    """Efforts to try on the approximate band, about cheapest first; none beyond looking everywhere."""
    name = probes_name(band.index)
    everywhere = faiss.try_extract_index_ivf(band.index).nlist if name == "nprobe" else len(band.rows_N)
    probes_tried = _PROBES[name] + (_BETWEEN if band.kind == "ivf_flat" else ())
    depths = sorted({min(probes, everywhere) for probes in probes_tried})
    efforts = [Effort(probes=probes, refine=refine) for refine in _REFINE.get(band.kind, (1,)) for probes in depths]
    yield from sorted(efforts, key=lambda effort: effort.probes * effort.refine)


def rows_scored(bands: Sequence[Band], effort: Effort) -> float:
    """Rows that a search for one query scores, in rows of the head, which are scored at once, about."""
    tail, head = bands[-1], sum(len(band.rows_N) for band in bands[:-1])
    if not tail.has_cells:
        return head + _HEAD_PER_TAIL * SCANNED_PER_CANDIDATE * effort.probes
    scored = head if effort.head is None else effort.head
    in_cells = effort.probes * effort.refine * (len(tail.rows_N) + head - scored) / float(tail.index.nlist)
    return scored + _HEAD_PER_TAIL * in_cells


def _lesser(bands: Sequence[Band], most: Effort) -> list[Effort]:
    """Efforts that cost less than one that suffices everywhere, cheapest first; with less of the head where it fits."""
    efforts = [effort for effort in efforts_of(bands[-1]) if at_least(most, effort) and effort != most]
    if JoinedBands.fits(bands):
        efforts += [
            effort.model_copy(update={"head": head})
            for effort in efforts_of(bands[-1])
            for head in inner_heads(len(bands[0].rows_N))
        ]
    costs = {effort: rows_scored(bands, effort) for effort in efforts}
    enough = rows_scored(bands, most)
    return sorted((effort for effort in efforts if costs[effort] < enough), key=costs.__getitem__)


def at_least(more: Effort, effort: Effort) -> bool:
    """Whether one effort with the whole head finds all that another finds."""
    return more.probes >= effort.probes and more.refine >= effort.refine


def trial_at(bundle: Bundle, calibration: Calibration, bands: Sequence[Band], effort: Effort, head: int) -> Trial:
    """A setting, measured: bands at an effort, and how many labels their exact head has."""
    recall, rate = calibration.measure(Searcher(bundle, bands, effort))
    return Trial(kind=bands[-1].kind, head=head, effort=effort, recall=recall, queries_per_second=round(rate, 1))


def efforts_at(
    bundle: Bundle,
    bands: Sequence[Band],
    chosen: Trial,
    trials: Sequence[Trial],
    calibration: Calibration,
    progress: Progress,
    target: float = TARGET,
) -> list[EffortAt]:
    """The least effort of each place and depth that reaches the target there, or as much as the chosen one does.

    With less than the whole head, the head's own labels reach it, too, where enough of them are among the answers:
    what is saved is not their recall.
    """
    if bands[-1].kind == "factory":  # its wrappers take no effort per search
        return []
    most = chosen.effort
    lesser = _lesser(bands, most)
    searcher = Searcher(bundle, bands, most, heads=inner_heads(chosen.head))
    tried = {
        (trial.effort, calibration.k): trial.recall
        for trial in trials
        if (trial.kind, trial.head) == (chosen.kind, chosen.head)
    }
    in_head_L = np.zeros(len(bundle.embeddings), np.bool_)
    for band in bands[:-1]:
        in_head_L[band.rows_N] = True
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


def curve_of(
    bundle: Bundle,
    bands: Sequence[Band],
    chosen: Trial,
    trials: Sequence[Trial],
    calibration: Calibration,
    bytes_per_label: float,
) -> list[KindTrial]:
    """What every effort that was tried with the chosen head recalls and how quick it is, and the next two beyond.

    Args:
        bundle: whose labels are indexed.
        bands: of the chosen setting.
        chosen: that setting.
        trials: every setting that was tried, of any kind.
        calibration: measures recall, and has the queries that are timed.
        bytes_per_label: of the kind.
    """
    tried = [trial for trial in trials if (trial.kind, trial.head) == (chosen.kind, chosen.head)]
    if chosen.kind == "factory":  # its wrappers have one effort at a time
        tried = [chosen]
    else:
        known = {trial.effort for trial in tried}
        beyond = [effort for effort in efforts_of(bands[-1]) if at_least(effort, chosen.effort) and effort not in known]
        tried += [trial_at(bundle, calibration, bands, effort, chosen.head) for effort in beyond[:_MORE]]
    searcher = Searcher(bundle, bands, chosen.effort)
    speeds = rates([searcher.at(trial.effort) for trial in tried], calibration)
    return [
        KindTrial(
            kind=bands[-1].kind,
            head=trial.head,
            effort=trial.effort,
            recall=trial.recall,
            queries_per_second=round(speed, 1),
            bytes_per_label=bytes_per_label,
        )
        for trial, speed in zip(tried, speeds, strict=True)
    ]
