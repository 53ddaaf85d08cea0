"""Long-tail profiles: which rows of a data set to keep so that its label counts fall as in the literature.

Legend: `N` rows, `L` labels that have rows.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Float64, Int64


def profile(labels_N: npt.NDArray[Any], kind: Literal["exp", "step"], *, ratio: float = 100.0, seed: int = 0) -> Int64:
    """Rows that stay when labels are down-sampled to a long tail [R21 §5.1].

    Labels are ranked by their rows, most first, and by label where they have as many. Of the label at rank i
    (from 0) `floor(n · s_i)` rows stay, drawn without replacement:

    - `exp`: s_i = ratio^(−i / (L − 1)) [Cui et al. 2019].
    - `step`: s_i = 1 for the first ⌊L / 2⌋ ranks, 1 / ratio for the others [Cao et al. 2019].

    n is the largest whole number for which every label has the rows, so on balanced data the first label keeps
    all, as in CIFAR-LT. The largest kept count is `ratio` times the smallest where n is a multiple of it, and
    otherwise more, by less than the factor 1 + 1 / (smallest kept count).

    Args:
        labels_N: one label per row, integers or text.
        ratio: largest over smallest probability of a label, at least 1.
        seed: which rows stay; the counts do not depend on it.
    """
    _, of_row_N, counts_L = np.unique(labels_N, return_inverse=True, return_counts=True)
    if len(counts_L) < 2 or not ratio >= 1:
        raise ValueError(f"profile: expected two labels and ratio >= 1, received {len(counts_L)} and {ratio}")
    ranked_L = np.argsort(-counts_L, kind="stable")
    shares_L = _shares(kind, len(counts_L), ratio)
    most = _floor(np.min(counts_L[ranked_L] / shares_L))
    kept_L = np.empty(len(counts_L), np.int64)
    kept_L[ranked_L] = _floor(most * shares_L)
    if kept_L.min() < 1:
        raise ValueError(f"profile: expected rows for a largest count of {ratio:g} or more, found {most}")
    shuffled_N = np.random.default_rng(seed).permutation(len(of_row_N))
    by_label_N = shuffled_N[np.argsort(of_row_N[shuffled_N], kind="stable")]
    place_N = np.arange(len(by_label_N)) - np.repeat(np.cumsum(counts_L) - counts_L, counts_L)
    kept: Int64 = np.sort(by_label_N[place_N < np.repeat(kept_L, counts_L)])
    return kept


def _shares(kind: str, labels: int, ratio: float) -> Float64:
    """What every rank keeps beside the first, float64 [L]."""
    ranks_L = np.arange(labels)
    if kind == "exp":
        shares_L: Float64 = ratio ** (-ranks_L / (labels - 1))
    elif kind == "step":
        shares_L = np.where(ranks_L < labels // 2, 1.0, 1 / ratio)
    else:
        raise ValueError(f"profile: expected kind exp or step, received {kind!r}")
    return shares_L


def _floor(numbers: Any) -> Any:
    """Whole part, and the next whole number where float64 is short of it by rounding."""
    return np.floor(numbers * (1 + 1e-12)).astype(np.int64)
