"""Augmented label rows and queries, whose inner product is T · s_λ(x, y), the score at any λ [METHODS §6].

A label's row is `[v, κ·log p_n, κ_b·b]`; a query is `[u, λ·T/κ, T/κ_b]`. Offline evaluation, the index build and the
service all use these two functions, so what was measured is what is served. κ and κ_b cancel in the product; they
only scale the added coordinates, which matters to a quantiser.

Legend: `L` labels, `B` queries, `D` embedding dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle.arrays import Float32


@dataclass(frozen=True)
class Augmentation:
    """The constants that labels' rows and queries must share.

    Args:
        temperature: T > 0; logits are `u·v / T + b`.
        kappa: scale of the log p_n coordinate, > 0.
        kappa_bias: scale of the bias coordinate, > 0; None for a model without label bias.
    """

    temperature: float
    kappa: float
    kappa_bias: float | None = None

    @property
    def extra_dims(self) -> int:
        """Coordinates added to an embedding: log p_n, and the bias if there is one."""
        return 1 if self.kappa_bias is None else 2

    def rows(self, embeddings_LD: Float32, log_pn_L: Float32, bias_L: Float32 | None) -> Float32:
        """Label rows, float32 [L, D + extra_dims].

        Args:
            embeddings_LD: label embeddings.
            log_pn_L: log p_n of every label, nats.
            bias_L: biases in logits; ignored by a model without label bias.

        Raises:
            ValueError: no biases for a model with label bias.
        """
        columns = [embeddings_LD, self.kappa * log_pn_L[:, None]]
        if self.kappa_bias is not None:
            if bias_L is None:
                raise ValueError("Augmentation.rows: expected label biases, received None")
            columns.append(self.kappa_bias * bias_L[:, None])
        return np.concatenate(columns, axis=1, dtype=np.float32)

    def queries(self, queries_BD: Float32, bias_removal: float | Float32) -> Float32:
        """Query rows, float32 [B, D + extra_dims].

        Args:
            queries_BD: query tower outputs.
            bias_removal: λ, one for all queries or one each, shape [B].
        """
        queries_BE = np.empty((len(queries_BD), queries_BD.shape[1] + self.extra_dims), np.float32)
        dim = queries_BD.shape[1]
        queries_BE[:, :dim] = queries_BD
        queries_BE[:, dim] = np.asarray(bias_removal, np.float32) * (self.temperature / self.kappa)
        if self.kappa_bias is not None:
            queries_BE[:, dim + 1] = self.temperature / self.kappa_bias
        return queries_BE

    @classmethod
    def fitted(
        cls, temperature: float, embeddings_LD: Float32, log_pn_L: Float32, bias_L: Float32 | None
    ) -> Augmentation:
        """The augmentation whose κ (and κ_b) give the added coordinates the spread of a typical embedding coordinate.

        A quantiser then spends its cells on all coordinates alike; exact search does not depend on κ.

        Args:
            temperature: T.
            embeddings_LD: float32, label embeddings.
            log_pn_L: float32, nats.
            bias_L: float32, logits, or None for a model without label bias.
        """
        spread = float(np.sqrt(np.mean(np.var(embeddings_LD, axis=0, dtype=np.float64)))) or 1.0

        def scale(column: Float32) -> float:
            return spread / (float(np.std(column, dtype=np.float64)) or spread)

        return cls(temperature, scale(log_pn_L), None if bias_L is None else scale(bias_L))
