"""Put other rows into an index: its lists stay where they were trained, so that nothing is clustered again.

Legend: `L` labels of the new bundle, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Self

import faiss
import numpy as np
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Array, Float32, Int64
from longtail.index.construct.filtered import tune_filtered
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.construct.settings import TARGET, at_least, curve_of, efforts_at, efforts_of, trial_at
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.training import add_to_lists, by_reach, bytes_per_label, head_of
from longtail.index.construct.tuning import TunedIndex, check_floor, head_sizes
from longtail.index.manifests import Effort
from longtail.index.search.faiss_index import ASSIGNABLE, CODED, FaissIndex, pad

NEW = -1
"""Row before of a label that was not there."""
_QUERIES = 50
"""Of an update, whose time goes into measuring: a quarter of a build's, 5,000 results at each place on the dials."""


@dataclass(frozen=True)
class Changes:
    """How the labels of a bundle differ from those that an index holds.

    Attributes:
        before_L: int64 [L], the row that every label had; `NEW` of one that was not there.
        moved_L: bool [L], labels that were there with another embedding.
        removed: labels that are not there any more.
    """

    before_L: Int64
    moved_L: Array
    removed: int

    @classmethod
    def between(cls, before: Bundle, bundle: Bundle) -> Self:
        """Compare labels' ids and embeddings of the same width."""
        found = pc.index_in(bundle.labels.ids, value_set=before.labels.ids).fill_null(NEW)
        before_L: Int64 = found.to_numpy(zero_copy_only=False).astype(np.int64)
        there_L = before_L != NEW
        moved_L = np.zeros(len(before_L), np.bool_)
        moved_L[there_L] = (bundle.embeddings[there_L] != before.embeddings[before_L[there_L]]).any(axis=1)
        return cls(before_L, moved_L, len(before.labels.ids) - int(there_L.sum()))

    @property
    def added(self) -> int:
        """Number of labels that were not there."""
        return int(np.count_nonzero(self.before_L == NEW))

    @property
    def moved(self) -> int:
        """Number of labels that were embedded again."""
        return int(np.count_nonzero(self.moved_L))


def refill_index(
    bundle: Bundle,
    spec: IndexSpec,
    index: FaissIndex,
    effort: Effort,
    progress: Progress,
    changes: Changes | None = None,
) -> TunedIndex:
    """Fill an index with new rows: lists and head stay, and labels go to where their rows belong now.

    Effort begins where the index stands, and grows until recall reaches the floor. Labels without changes stay in their
    lists, and new ones are not of the head; with changes None every list is found again.
    """
    started = time.perf_counter()
    rows_LE = bundle.rows()
    progress(f"exact answers for the recall over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE) if changes is None else Calibration(bundle, rows_LE, _QUERIES)
    lists_L, in_head_L = np.full(len(rows_LE), NEW), np.zeros(len(rows_LE), np.bool_)
    before_L = np.arange(len(rows_LE)) if changes is None else changes.before_L
    if index.head is not None:
        in_head_L = np.isin(before_L, index.head.rows_H)
    if changes is not None and index.has_lists:
        stays_L = (before_L != NEW) & ~changes.moved_L
        lists_L[stays_L] = index.lists[before_L[stays_L]]
    order_L = by_reach(bundle, rows_LE, calibration)
    head = head_of(rows_LE, order_L[in_head_L[order_L]])
    progress("fill the index")
    # Every query scores the first rows of the head exactly: their codes are never used, and may be clipped.
    exact = np.empty(0, np.int64) if head is None else head.rows_H[: head_sizes(len(rows_LE))[0]]
    outside = np.setdiff1d(order_L, exact)
    _fill(index, pad(rows_LE, index.index.d), outside, None if changes is None else lists_L)
    index = replace(index, head=head, stored_lists_L=None)  # a copy: the old one remembers what it has read
    progress("recall")
    trials = []
    for tried in [effort, *(more for more in efforts_of(index) if more != effort and at_least(more, effort))]:
        trials.append(trial_at(bundle, calibration, index, tried))
        progress(f"probes {tried.probes}, refine {tried.refine}: lowest recall {trials[-1].lowest.recall:.4f}")
        if trials[-1].lowest.recall >= spec.recall_floor:
            break
    chosen = max(trials, key=lambda trial: trial.lowest.recall)
    check_floor(chosen.lowest, spec, calibration, len(trials), "build the index again")
    size = bytes_per_label(index)
    filtered = None if index.kind == "flat" else tune_filtered(bundle, rows_LE, index, chosen.effort, spec, progress)
    return TunedIndex(
        kind=index.kind,
        dim=rows_LE.shape[1],
        index=index,
        chosen=chosen,
        efforts=efforts_at(bundle, index, chosen, trials, calibration, progress, max(TARGET, spec.recall_floor)),
        trials=trials,
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        seconds=time.perf_counter() - started,
        bytes_per_label=size,
        curve=curve_of(bundle, index, chosen, trials, calibration, size),
        filtered=filtered,
    )


def imbalance_of(index: FaissIndex) -> float | None:
    """Compute how unevenly the C lists are filled: C·Σ (n / L)² of n of L labels each; None without lists.

    It is 1 where all hold alike, and about as many times the labels of even lists are visited by a search of a few.
    """
    return float(index.index.invlists.imbalance_factor()) if isinstance(index.index, faiss.IndexIVF) else None


def _fill(index: FaissIndex, rows_LE: Float32, training: Int64, lists_L: Int64 | None) -> None:
    """Replace the content by rows, those whose list is known without looking for it; `NEW` of the others."""
    held = index.index
    held.reset()
    if index.kind in CODED:
        # Within what old rows spanned, codes would cut off those that moved most: the ones that a new prior lifts.
        held.train(rows_LE[training])
    if lists_L is None or index.kind not in ASSIGNABLE:
        held.add(rows_LE)
        return
    sought = np.flatnonzero(lists_L == NEW)
    if sought.size:
        lists_L[sought] = held.quantizer.search(rows_LE[sought], 1)[1][:, 0]
    add_to_lists(held, rows_LE, lists_L)
