"""Hold the labels that evaluation ranks.

Legend: `L` labels, `B` rows, `D` dimensions, `E` coordinates of an augmented row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from longtail.bundle import Augmentation, Buckets, Labels
from longtail.bundle.arrays import Float32, Int8, Int32, Int64
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.evaluation.metrics import LabelFacts, inverse_propensity

LogProposal = Callable[[Int32], Float32]
"""Returns log p_n(y|x) of rows [B] and every label, float32 [B, L], which λ multiplies instead of log ν."""


@dataclass(frozen=True)
class LabelSide:
    """Hold all labels with their constants; arrays are [L] or [L, D].

    Attributes:
        log_pn: log ν; log π if the noise is a tree's.
        log_popularity: log π; None if `log_pn` is log π.
        counts: training pairs of every label.
    """

    embeddings: Float32
    log_pn: Float32
    bias: Float32 | None
    counts: Int64
    training_queries: int
    buckets: Int8
    augmentation: Augmentation
    log_popularity: Float32 | None = None

    @classmethod
    def build(
        cls, embeddings: Float32, bias: Float32 | None, counts: Int64, *, training_queries: int,
        temperature: float, log_pn: Float32, buckets: Buckets, log_popularity: Float32 | None = None,
    ) -> LabelSide:  # fmt: skip
        """Build from a model's label outputs and training counts."""
        augmentation = Augmentation.fitted(temperature, embeddings, log_pn, bias, log_popularity)
        bucket_L = buckets.assign(counts)
        return cls(embeddings, log_pn, bias, counts, training_queries, bucket_L, augmentation, log_popularity)

    @classmethod
    def read_bundle(
        cls, labels: Labels, embeddings: Float32, augmentation: Augmentation, *, training_queries: int
    ) -> LabelSide:
        """Build from a bundle's labels and embeddings, float32 [L, D]."""
        return cls(
            embeddings, labels.log_pn, labels.bias, labels.counts, training_queries, labels.buckets, augmentation,
            labels.log_popularity,
        )  # fmt: skip

    def labels(self, ids: pa.Array, display: pa.Table) -> Labels:
        """Return the label table of a bundle."""
        return Labels(ids, self.counts, self.log_pn, self.buckets, self.bias, display, self.log_popularity)

    def select_labels(self, rows: Int32) -> LabelSide:
        """Return some labels by their rows, int32 [n], with the same constants."""
        bias = None if self.bias is None else self.bias[rows]
        popularity = None if self.log_popularity is None else self.log_popularity[rows]
        return replace(
            self, embeddings=self.embeddings[rows], log_pn=self.log_pn[rows], bias=bias, counts=self.counts[rows],
            buckets=self.buckets[rows], log_popularity=popularity,
        )  # fmt: skip

    @property
    def log_pi(self) -> Float32:
        """Return what μ multiplies, float32 [L]: log π, or log π* of a forecast."""
        return self.log_pn if self.log_popularity is None else self.log_popularity

    def rows(self) -> Float32:
        """Return augmented label rows, float32 [L, E]."""
        return self.augmentation.rows(self.embeddings, self.log_pn, self.bias, self.log_popularity)

    def facts(self, config: EvaluationConfig) -> LabelFacts:
        """Return the label facts for metrics."""
        inverse_L = None
        if config.propensity is not None:
            a, b = config.propensity
            inverse_L = inverse_propensity(self.counts, queries=self.training_queries, a=a, b=b)
        return LabelFacts(self.counts, self.buckets, inverse_L)
