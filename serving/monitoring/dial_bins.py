"""What queries asked of the dials, in bins of 0.05: a mean hides that half of them ask for 0 and half for 1.

Legend: `B` queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.bundle.arrays import Array, Float32

LOWEST, HIGHEST, WIDTH = -1.0, 2.0, 0.05
DIAL_BINS = 61
"""Around −1, −0.95, …, 2; what lies beyond counts in the bin at that end."""


def dial_bins(bias_removal_B: Float32, popularity_B: Float32) -> Array:
    """The bin of every λ, 0 … DIAL_BINS − 1, then DIAL_BINS + that of every μ, int [2·B].

    Args:
        bias_removal_B, popularity_B: finite.
    """
    if len(bias_removal_B) == 1:
        # A tenth of the time that arrays take, of the queries that come alone.
        of_one = (
            min(max(float(weights[0] - LOWEST) / WIDTH, 0), DIAL_BINS - 1) for weights in (bias_removal_B, popularity_B)
        )
        return np.array([int(place + 0.5) + dial * DIAL_BINS for dial, place in enumerate(of_one)])
    weights = np.concatenate([bias_removal_B, popularity_B])
    # np.clip takes five times as long of a few numbers.
    places = (np.minimum(np.maximum((weights - LOWEST) / WIDTH, 0), DIAL_BINS - 1) + 0.5).astype(np.intp)
    places[len(bias_removal_B) :] += DIAL_BINS
    return places


def dial_json(counts: Array) -> list[dict[str, Any]]:
    """The bins that have queries, by what was asked for, ascending.

    Args:
        counts: queries per bin, [DIAL_BINS].
    """
    filled = np.flatnonzero(counts)
    return [{"at": round(LOWEST + WIDTH * int(place), 2), "queries": int(counts[place])} for place in filled]
