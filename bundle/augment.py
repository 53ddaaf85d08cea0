"""Augmented label rows and queries, whose inner product is T · s(x, y), the score at any λ and μ [METHODS §6].

`s = f + λ·log ν + μ·log π`, f = u·v/T + b, ν the implied noise of training, π the label frequency. A label's row is
`[v, κ·log ν, κ_b·b, κ_p·log π]`; a query is `[u, λ·T/κ, T/κ_b, μ·T/κ_p]`. Where ν is π one coordinate holds both, and a
query has λ + μ there. Offline evaluation, the index build and the service all use these two functions, so what was
measured is what is served. The κ cancel in the product; they only scale the added coordinates, which matters to a
quantiser.

Legend: `L` labels, `B` queries, `D` embedding dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Float32

_ROUNDING = 1e-6
"""Spread of a column, relative to its largest value, up to which float32 rounding may have made it."""


@dataclass(frozen=True)
class Augmentation:
    """The constants that labels' rows and queries must share.

    Args:
        temperature: T > 0; logits are `u·v / T + b`.
        kappa: scale of the log ν coordinate, > 0.
        kappa_bias: scale of the bias coordinate, > 0; None for a model without label bias.
        kappa_popularity: scale of the log π coordinate, > 0; None where log ν is log π, and one coordinate holds both.
    """

    temperature: float
    kappa: float
    kappa_bias: float | None = None
    kappa_popularity: float | None = None

    @property
    def extra_dims(self) -> int:
        """Coordinates added to an embedding: log ν, the bias if there is one, log π if it is another number."""
        return 1 + (self.kappa_bias is not None) + (self.kappa_popularity is not None)

    def rows(
        self, embeddings_LD: Float32, log_pn_L: Float32, bias_L: Float32 | None, log_popularity_L: Float32 | None = None
    ) -> Float32:
        """Label rows, float32 [L, D + extra_dims].

        Args:
            embeddings_LD: label embeddings.
            log_pn_L: log ν of every label, nats.
            bias_L: biases in logits; ignored by a model without label bias.
            log_popularity_L: log π of every label, nats; ignored where log ν is log π.

        Raises:
            ValueError: no biases for a model with label bias, or no log π where it has a coordinate.
        """
        columns = [embeddings_LD, self.kappa * log_pn_L[:, None]]
        if self.kappa_bias is not None:
            if bias_L is None:
                raise ValueError("Augmentation.rows: expected label biases, received None")
            columns.append(self.kappa_bias * bias_L[:, None])
        if self.kappa_popularity is not None:
            if log_popularity_L is None:
                raise ValueError("Augmentation.rows: expected log π of the labels, received None")
            columns.append(self.kappa_popularity * log_popularity_L[:, None])
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def queries(self, queries_BD: Float32, bias_removal: float | Float32, popularity: float | Float32 = 0.0) -> Float32:
        """Query rows, float32 [B, D + extra_dims].

        Args:
            queries_BD: query tower outputs.
            bias_removal: λ, one for all queries or one each, shape [B].
            popularity: μ, one for all queries or one each, shape [B].
        """
        noise, prior = np.asarray(bias_removal, np.float32), np.asarray(popularity, np.float32)
        queries_BE = np.empty((len(queries_BD), queries_BD.shape[1] + self.extra_dims), np.float32)
        dim = queries_BD.shape[1]
        queries_BE[:, :dim] = queries_BD
        queries_BE[:, dim] = (noise + prior if self.kappa_popularity is None else noise) * (
            self.temperature / self.kappa
        )
        if self.kappa_bias is not None:
            queries_BE[:, dim + 1] = self.temperature / self.kappa_bias
        if self.kappa_popularity is not None:
            queries_BE[:, -1] = prior * (self.temperature / self.kappa_popularity)
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
        """The augmentation whose κ give every added coordinate the spread of a typical embedding coordinate.

        A quantiser then spends its cells on all coordinates alike; exact search does not depend on κ. A coordinate
        that is the same for every label, such as log ν of uniform noise, changes no order: its κ is 1.

        Args:
            temperature: T.
            embeddings_LD: float32, label embeddings.
            log_pn_L: float32, nats.
            bias_L: float32, logits, or None for a model without label bias.
            log_popularity_L: float32, nats, or None where log ν is log π.
        """
        spread = float(np.sqrt(np.mean(np.var(embeddings_LD, axis=0, dtype=np.float64)))) or 1.0

        def scale(column: Float32) -> float:
            deviation = float(np.std(column, dtype=np.float64))
            constant = deviation <= _ROUNDING * float(np.abs(column).max())
            return 1.0 if constant else spread / deviation

        return cls(
            temperature,
            scale(log_pn_L),
            None if bias_L is None else scale(bias_L),
            None if log_popularity_L is None else scale(log_popularity_L),
        )
