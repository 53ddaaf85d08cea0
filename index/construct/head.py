"""How many labels the exact head should hold: all sizes are measured with the smallest one's index.

A label of the head is found whatever the effort; one that is not is found if the smallest head's index finds it. So
one search of that index at each effort tells the recall of every larger head: of an exact answer, what ranks in the
head counts, and of the others what was found. Of the sizes that suffice the one is taken whose queries score the fewest
rows, over all places on the dials alike; where an effort may leave a part of the head to the cells, each place has the
size that is best for it, and the head is as large as the largest of them.

Legend: `L` labels, `Q` queries, `K` results.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Int64
from longtail.index.construct.recall import Calibration
from longtail.index.construct.settings import efforts_of, half_decades, rows_scored
from longtail.index.manifests import Effort
from longtail.index.search.band import Band
from longtail.index.search.joined import HEAD_UP_TO, JoinedBands
from longtail.index.search.searcher import Searcher

_LEAST = 1_000
_MOST_SHARE = 0.16


def head_sizes(labels: int, rest: int = 1) -> list[int]:
    """Sizes of a head to choose from, smallest first; all but the first leave at least `rest` labels out."""
    smallest, most = min(_LEAST, labels // 10), min(int(labels * _MOST_SHARE), labels - rest)
    sizes = [smallest, *half_decades(_LEAST, most)[1:]]
    return [*sizes, most] if most > sizes[-1] else sizes


def choose_head(
    bundle: Bundle,
    bands: Sequence[Band],
    sizes: Sequence[int],
    by_reach_L: Int64,
    calibration: Calibration,
    target: float,
) -> int:
    """The size whose queries score the fewest rows where each place on the dials reaches a recall.

    Where none does at some place, the others decide, or the smallest is taken.

    Args:
        bundle: whose labels are indexed.
        bands: the exact head of the smallest size and the rest.
        sizes: to choose from, smallest first.
        by_reach_L: int64 [L], label rows, those of the head first.
        calibration: has the queries and their exact answers.
        target: recall of the most results that are measured.
    """
    rank_L = np.empty(len(by_reach_L), np.int64)
    rank_L[by_reach_L] = np.arange(len(by_reach_L))
    exact_QK = rank_L[calibration.best_QK]
    least_rows = np.full((len(sizes), len(calibration.places)), np.inf)
    searcher = Searcher(bundle, bands, Effort())
    for effort in efforts_of(bands[-1]):
        found_QK, hits_QK = calibration.found(searcher.at(effort), calibration.k)
        found_QK = rank_L[found_QK]
        for place, size in enumerate(sizes):
            in_head_Q = np.count_nonzero(exact_QK < size, axis=1)
            hits_Q = in_head_Q + np.count_nonzero(hits_QK & (found_QK >= size), axis=1)
            recalls = np.minimum(hits_Q / calibration.k, 1.0).reshape(len(calibration.places), -1).mean(axis=1).round(6)
            rows = size - sizes[0] + rows_scored(bands, effort)
            least_rows[place, recalls >= target] = np.minimum(least_rows[place, recalls >= target], rows)
        if np.isfinite(least_rows).all():
            break
    own = sizes[int(least_rows.argmin(axis=0).max())]  # of a place where none suffices, the smallest
    if JoinedBands.fits(bands) and own <= HEAD_UP_TO:
        return own
    return sizes[int(least_rows.mean(axis=1).argmin())]
