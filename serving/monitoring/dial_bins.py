"""What queries asked of the dials, in bins of 0.05: a mean hides that half of them ask for 0 and half for 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.bundle.arrays import Array, Float32

LOWEST, HIGHEST, WIDTH = -1.0, 2.0, 0.05
DIAL_BINS = 61
"""Around −1, −0.95, …, 2; what lies beyond counts in the bin at that end."""


def dial_bins(weights_B: Float32) -> Array:
    """The bin of every λ or μ, 0 … DIAL_BINS − 1, int [B].

    Args:
        weights_B: finite, float32 [B].
    """
    return np.clip(np.rint((weights_B.astype(np.float64) - LOWEST) / WIDTH), 0, DIAL_BINS - 1).astype(np.intp)


def dial_json(counts: Array) -> list[dict[str, Any]]:
    """The bins that have queries, by what was asked for, ascending.

    Args:
        counts: queries per bin, [DIAL_BINS].
    """
    filled = np.flatnonzero(counts)
    return [{"at": round(LOWEST + WIDTH * int(place), 2), "queries": int(counts[place])} for place in filled]
