"""Put other rows into an index: its cells stay where they were trained, so that nothing is clustered again.

Legend: `L` labels of the new bundle, `N` labels of a band, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import faiss
import numpy as np
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Array, Float32, Int64
from longtail.index.construct.bands import bytes_per_label
from longtail.index.construct.filtered import tune_filtered
from longtail.index.construct.recall import Calibration, Progress
from longtail.index.construct.settings import TARGET, at_least, curve_of, efforts_at, efforts_of, trial_at
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.tuning import TunedIndex, check_floor
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import Effort
from longtail.index.search.band import CODED, Band, pad
from longtail.index.search.cells import TOLD_CELLS, add_to_cells

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
        """By labels' ids and embeddings; embeddings of the same width."""
        found = pc.index_in(bundle.labels.ids, value_set=before.labels.ids).fill_null(NEW)
        before_L: Int64 = found.to_numpy(zero_copy_only=False).astype(np.int64)
        there_L = before_L != NEW
        moved_L = np.zeros(len(before_L), np.bool_)
        moved_L[there_L] = (bundle.embeddings[there_L] != before.embeddings[before_L[there_L]]).any(axis=1)
        return cls(before_L, moved_L, len(before.labels.ids) - int(there_L.sum()))

    @property
    def added(self) -> int:
        """Labels that were not there."""
        return int(np.count_nonzero(self.before_L == NEW))

    @property
    def moved(self) -> int:
        """Labels that were embedded anew."""
        return int(np.count_nonzero(self.moved_L))


def refill_index(
    bundle: Bundle,
    spec: IndexSpec,
    bands: Sequence[Band],
    effort: Effort,
    progress: Progress,
    changes: Changes | None = None,
) -> TunedIndex:
    """The same index over new rows: cells stay, and labels go to where their rows belong now.

    Effort begins where the index stands, and grows until recall reaches the floor.

    Args:
        bundle: whose augmented rows are indexed; coordinates as before.
        spec: what the index was built to, with its recall floor.
        bands: of the index, read into memory of their own; their content is replaced.
        effort: the index's.
        progress: told what is being done, one line at a time.
        changes: which labels differ from the index's; others stay in their cells, and new ones go to the last band.
            None: the labels are the same, and every cell is found anew.

    Raises:
        LongtailIndexError: no label of a band is left.
        RecallFloorError: the best effort stays below the floor.
    """
    started = time.perf_counter()
    rows_LE = bundle.rows()
    # Copies, for a band remembers what it has read of its index.
    held = [(replace(band), None) for band in bands] if changes is None else _carried(bands, changes)
    bands = [band for band, _ in held]
    head = sum(len(band.rows_N) for band in bands[:-1])
    progress(f"exact answers for the recall over {len(rows_LE):,} labels")
    calibration = Calibration(bundle, rows_LE) if changes is None else Calibration(bundle, rows_LE, _QUERIES)
    for band, cells_N in held:
        progress(f"fill {band.name}")
        _fill(band, pad(rows_LE[band.rows_N], band.index.d), cells_N)
    progress("recall")
    efforts = [effort, *(more for more in efforts_of(bands[-1]) if more != effort and at_least(more, effort))]
    trials = []
    for tried in efforts:
        trials.append(trial_at(bundle, calibration, bands, tried, head))
        progress(f"probes {tried.probes}, refine {tried.refine}: lowest recall {trials[-1].lowest.recall:.4f}")
        if trials[-1].lowest.recall >= spec.recall_floor:
            break
    chosen = max(trials, key=lambda trial: trial.lowest.recall)
    check_floor(chosen.lowest, spec, calibration, len(trials), "build the index again")
    kind, size = bands[-1].kind, bytes_per_label(bands[-1])
    return TunedIndex(
        kind=kind,
        dim=rows_LE.shape[1],
        bands=bands,
        chosen=chosen,
        efforts=efforts_at(bundle, bands, chosen, trials, calibration, progress, max(TARGET, spec.recall_floor)),
        trials=trials,
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        seconds=time.perf_counter() - started,
        bytes_per_label=size,
        curve=curve_of(bundle, bands, chosen, trials, calibration, size),
        filtered=None if kind == "flat" else tune_filtered(bundle, rows_LE, bands, chosen.effort, spec, progress),
    )


def imbalance_of(band: Band) -> float | None:
    """How unevenly the C cells of an inverted file are filled: C·Σ (n / N)² of n of N labels each; None of other kinds.

    It is 1 where all hold alike, and about as many times the labels of even cells are visited by a search of a few.
    """
    return float(band.index.invlists.imbalance_factor()) if isinstance(band.index, faiss.IndexIVF) else None


def _carried(bands: Sequence[Band], changes: Changes) -> list[tuple[Band, Int64]]:
    """The bands with the rows that labels have now, and the cell of each; `NEW` where it is to be found.

    Raises:
        LongtailIndexError: a band would be empty.
    """
    before = sum(len(band.rows_N) for band in bands)
    place_of, cell_of = np.empty(before, np.int64), np.full(before, NEW)
    for place, band in enumerate(bands):
        place_of[band.rows_N] = place
        if isinstance(band.index, faiss.IndexIVF):
            cell_of[band.rows_N] = band.cells.of_ids
    there_L = changes.before_L != NEW
    place_L, cell_L = np.full(len(there_L), len(bands) - 1), np.full(len(there_L), NEW)
    place_L[there_L] = place_of[changes.before_L[there_L]]
    stays_L = there_L & ~changes.moved_L
    cell_L[stays_L] = cell_of[changes.before_L[stays_L]]
    held = []
    for place, band in enumerate(bands):
        rows_N = np.flatnonzero(place_L == place)
        if not rows_N.size:
            raise LongtailIndexError(
                f"update: expected labels of the index's {band.name} among the bundle's, found none of its "
                f"{len(band.rows_N):,}: build the index again"
            )
        held.append((replace(band, rows_N=rows_N), cell_L[rows_N]))
    return held


def _fill(band: Band, rows_NE: Float32, cells_N: Int64 | None) -> None:
    """Replace a band's content by rows, those whose cell is known without looking for it."""
    index = band.index
    index.reset()
    if band.kind in CODED:
        # Within what old rows spanned, codes would cut off those that moved most: the ones that a new prior lifts.
        index.train(rows_NE)
    if cells_N is None or band.kind not in TOLD_CELLS:
        index.add(rows_NE)
        return
    sought_N = np.flatnonzero(cells_N == NEW)
    if sought_N.size:
        cells_N[sought_N] = index.quantizer.search(rows_NE[sought_N], 1)[1][:, 0]
    add_to_cells(index, rows_NE, cells_N)
