"""Compute augmented rows and queries, whose product is T · s(x, y) [METHODS §6].

`s = f + λ·log ν + μ·log π + Σ_j w_j·r_j`, f = u·v/T + b, ν the implied noise of training, π the label frequency, r_j
the priors of a release. A label's row is `[v, κ·log ν, κ_b·b, κ_p·log π, κ_j·r_j …]`; a query is
`[u, λ·T/κ, T/κ_b, μ·T/κ_p, w_j·T/κ_j …]`. Where ν is π, one coordinate holds both, and a query has λ + μ there. Offline
evaluation, the index build and the service all use these two functions, so the served scores are the measured ones. The
κ cancel in the product; they only scale the added coordinates, which matters to a quantiser.

Legend: `L` labels, `B` queries, `D` embedding dimensions, `P` priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longtail.bundle.arrays import Float32

_ROUNDING = 1e-6
"""Relative spread of a column that float32 rounding alone may produce; such a column counts as constant."""
SPREAD = 2.0
"""Spread of an added coordinate relative to a typical embedding coordinate, so that lists also split by log ν."""


@dataclass(frozen=True)
class Augmentation:
    """The constants that label rows and queries must share.

    Args:
        temperature: T > 0; logits are `u·v / T + b`.
        kappa: scale of the log ν coordinate, > 0.
        kappa_bias: scale of the bias coordinate, > 0; None for a model without label bias.
        kappa_popularity: scale of the log π coordinate, > 0; None where log ν is log π, and one coordinate holds both.
        kappa_priors: scale of every prior's coordinate, > 0 each.
    """

    temperature: float
    kappa: float
    kappa_bias: float | None = None
    kappa_popularity: float | None = None
    kappa_priors: tuple[float, ...] = ()

    @cached_property
    def extra_dims(self) -> int:
        """Return the number of coordinates added to an embedding: log ν, and if present bias, log π, priors."""
        return 1 + (self.kappa_bias is not None) + (self.kappa_popularity is not None) + len(self.kappa_priors)

    def rows(
        self,
        embeddings_LD: Float32,
        log_pn_L: Float32,
        bias_L: Float32 | None,
        log_popularity_L: Float32 | None = None,
        priors_LP: Float32 | None = None,
    ) -> Float32:
        """Compute augmented label rows, float32 [L, D + extra_dims].

        Args:
            log_pn_L: log ν of every label, nats.
            bias_L: biases in logits; ignored by a model without label bias.
            log_popularity_L: log π of every label, nats; ignored where log ν is log π.
        """
        # `queries` writes the coordinates in the same order.
        columns = [embeddings_LD, self.kappa * log_pn_L[:, None]]
        if self.kappa_bias is not None:
            if bias_L is None:
                raise ValueError("Augmentation.rows: expected label biases, received None")
            columns.append(self.kappa_bias * bias_L[:, None])
        if self.kappa_popularity is not None:
            if log_popularity_L is None:
                raise ValueError("Augmentation.rows: expected log π of the labels, received None")
            columns.append(self.kappa_popularity * log_popularity_L[:, None])
        if self.kappa_priors:
            if priors_LP is None:
                raise ValueError("Augmentation.rows: expected the labels' priors, received None")
            columns.append(np.asarray(self.kappa_priors, np.float32) * priors_LP)
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def queries(
        self,
        queries_BD: Float32,
        bias_removal: float | Float32,
        popularity: float | Float32 = 0.0,
        priors: Float32 | Sequence[float] | None = None,
        bias: float | Float32 = 1.0,
    ) -> Float32:
        """Compute augmented queries, float32 [B, D + extra_dims].

        Args:
            bias_removal: λ, one for all queries, or one for each, shape [B].
            popularity: μ, one for all queries, or one for each, shape [B].
            priors: weights of the priors, float32, one row for all queries [P], or one for each [B, P]; None: 0.
            bias: weight of the labels' bias b, one for all queries, or one for each, shape [B].
        """
        noise, prior = np.asarray(bias_removal, np.float32), np.asarray(popularity, np.float32)
        queries_BE = np.empty((len(queries_BD), queries_BD.shape[1] + self.extra_dims), np.float32)
        dim = queries_BD.shape[1]
        queries_BE[:, :dim] = queries_BD
        # The factors T/κ cancel κ in the rows: the inner product is T·(u·v/T + b + λ·log ν + μ·log π + Σ w·r). Without
        # a coordinate for log π, log ν is log π, so λ and μ add up.
        queries_BE[:, dim] = (noise + prior if self.kappa_popularity is None else noise) * (
            self.temperature / self.kappa
        )
        if self.kappa_bias is not None:
            queries_BE[:, dim + 1] = np.asarray(bias, np.float32) * (self.temperature / self.kappa_bias)
        if self.kappa_popularity is not None:
            queries_BE[:, dim + 1 + (self.kappa_bias is not None)] = prior * (self.temperature / self.kappa_popularity)
        if self.kappa_priors:
            scales_P = np.float32(self.temperature) / np.asarray(self.kappa_priors, np.float32)
            queries_BE[:, -len(self.kappa_priors) :] = (
                0.0 if priors is None else np.asarray(priors, np.float32) * scales_P
            )
        return queries_BE

    @classmethod
    def fitted(
        cls,
        temperature: float,
        embeddings_LD: Float32,
        log_pn_L: Float32,
        bias_L: Float32 | None,
        log_popularity_L: Float32 | None = None,
    ) -> Augmentation:
        """Fit κ for twice the spread of an embedding coordinate.

        Labels in one list of an inverted file then differ little in log ν; exact search does not depend on κ. A
        coordinate that is the same for every label, such as log ν of uniform noise, changes no order, and its κ is 1.
        The arguments are those of `rows`.
        """
        return cls(
            temperature,
            fitted_scale(embeddings_LD, log_pn_L),
            None if bias_L is None else fitted_scale(embeddings_LD, bias_L),
            None if log_popularity_L is None else fitted_scale(embeddings_LD, log_popularity_L),
        )


def fitted_scale(embeddings_LD: Float32, column_L: Float32) -> float:
    """Compute κ for twice the spread of an embedding coordinate; 1 for a constant column."""
    deviation = float(np.std(column_L, dtype=np.float64))
    if deviation <= _ROUNDING * float(np.abs(column_L).max()):
        return 1.0
    return SPREAD * (float(np.sqrt(np.mean(np.var(embeddings_LD, axis=0, dtype=np.float64)))) or 1.0) / deviation
