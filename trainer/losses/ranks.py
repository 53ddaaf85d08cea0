"""What mining within a sample of negatives amounts to among all of them [Re19 Lemma 2; METHODS §3].

Legend: `B` sampled negatives of a row, `J` all of them, L − 1.
"""

from __future__ import annotations

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from longtail.bundle.arrays import Float64


def theta_of_all(theta_B: Float64, others: int, *, replace: bool = False) -> Float64:
    """θ over all negatives that ϑ over a uniform sample of them amounts to, float64 [J] [Re19 Lemma 2].

    θ_j = Σ_i ϑ_i · P(the sample's i-th highest is the j-th highest of all). At least i of B draws are among the best j
    with a hypergeometric probability (binomial with replacement); what j adds to that of j − 1 is wanted. |θ|₁ = |ϑ|₁,
    and without replacement θ is non-increasing where ϑ is.

    Args:
        theta_B: ϑ of every rank of the sample, float64 [B].
        others: J, the negatives there are to draw from.
        replace: draws are with replacement: a label may come twice, and another is missed for it.

    Example:
        >>> theta_of_all(np.array([2.0, 0.0]), 4).round(3)  # the best of 2 of 4
        array([1.   , 0.667, 0.333, 0.   ])
    """
    draws = len(theta_B)
    if draws > others and not replace:
        raise ValueError(f"theta_of_all: expected at most {others} draws without replacement, received {draws}")
    best_J1, fewer_B = np.arange(others + 1)[:, None], np.arange(draws)
    if replace:
        among_JB = stats.binom.sf(fewer_B, draws, best_J1 / others)
    else:
        among_JB = stats.hypergeom.sf(fewer_B, others, best_J1, draws)
    theta_J: Float64 = np.diff(among_JB, axis=0) @ theta_B
    return theta_J
