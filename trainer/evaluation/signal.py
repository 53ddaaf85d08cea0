"""The signal-to-noise ratio of the gradient of negative sampling, which noise decides [BM20 §4, Theorem 2].

Legend: `X` queries, `L` labels.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle.arrays import Float64


def signal_to_noise(data_XL: Float64, noise_XL: Float64) -> float:
    """η = 1/Tr[Cov[ĝ, ĝ] H⁻¹] at the optimum of family `logistic` with one negative of weight 1 [BM20 eq. 12, 15].

    `1/η = N Σ_x (L − 2 Σ_y α_xy)` with `α_xy = p_D p_n/(p_D + p_n)`, of a model that can give every pair any score and
    a loss that is summed over N = X pairs. Largest where p_n = p_D, where Σ_y α is ½ for every x; and even then only
    L/(L − 1) times what noise has that never meets the data. `overlap` is the part that differs.

    Example:
        >>> even, skewed = np.full((1, 2), 0.5), np.array([[0.9, 0.1]])
        >>> signal_to_noise(even, even), round(signal_to_noise(even, skewed), 3)
        (1.0, 0.84)
    """
    queries, labels = data_XL.shape
    return 1 / float(queries**2 * (labels - overlap(data_XL, noise_XL).mean()))


def overlap(data_XL: Float64, noise_XL: Float64) -> Float64:
    """2 Σ_y α_xy of every query, float64 [X]: 1 where p_n = p_D, 0 where they never meet [BM20 eq. 16].

    It is also twice the share of pairs that a trained discriminator takes for noise, E_{y∼p_D} σ(−f_y).
    """
    if data_XL.shape != noise_XL.shape:
        raise ValueError(f"overlap: expected p_n of shape {data_XL.shape}, received {noise_XL.shape}")
    total_XL = data_XL + noise_XL
    overlap_X: Float64 = 2 * (data_XL * noise_XL / np.where(total_XL > 0, total_XL, 1)).sum(axis=1)
    return overlap_X
