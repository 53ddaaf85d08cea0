"""Compute label frequencies: smoothed log p_n, and the buckets head, torso, tail and new.

Legend: `L` labels.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from longtail.bundle.arrays import Float64, Int8, Int64

BUCKET_NAMES = ("head", "torso", "tail", "new")
HEAD, TORSO, TAIL, NEW = range(4)


def log_frequencies(counts_L: Int64 | Float64, *, smoothing: float = 0.5) -> Float64:
    """Compute `log π_y = log((count_y + a) / (N + a·L))` [METHODS §2.2].

    Values are never clipped: a label of frequency 1e-9 has a logarithm of −20.7, and an unseen label a finite one.

    Args:
        counts_L: training pairs per label, ≥ 0, shape [L]; fractional if pairs are visited more or less than once.
        smoothing: `a` > 0, pseudo-pairs added to every label.

    Returns:
        float64 [L], natural log (nats); logsumexp is 0.
    """
    if counts_L.size == 0:
        raise ValueError("log_frequencies: expected at least one label, received none")
    if counts_L.min() < 0:
        row = int(counts_L.argmin())
        raise ValueError(f"log_frequencies: expected counts >= 0, received {counts_L[row]} in row {row}")
    if not smoothing > 0:
        raise ValueError(f"log_frequencies: expected smoothing > 0, received {smoothing}")
    smoothed_L = counts_L.astype(np.float64) + smoothing
    log_L: Float64 = np.log(smoothed_L) - np.log(smoothed_L.sum())
    return log_L


class Buckets(BaseModel):
    """Thresholds of head and tail on a label's training count [METHODS §7].

    A label is head when `count > head_above`, torso when `count > tail_upto`, else tail. Equal counts
    always share a bucket; labels never seen in training are new.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: Literal["quantile", "count"]
    head_above: float = Field(ge=0)
    tail_upto: float = Field(ge=0)

    @classmethod
    def by_quantile(cls, counts_L: Int64, *, lower: float = 0.33, upper: float = 0.66) -> Buckets:
        """Set thresholds at quantiles of positive counts [R21 §5.2]."""
        positive = counts_L[counts_L > 0]
        if positive.size == 0:
            return cls(scheme="quantile", head_above=0, tail_upto=0)
        tail_upto, head_above = np.quantile(positive, [lower, upper])
        return cls(scheme="quantile", head_above=float(head_above), tail_upto=float(tail_upto))

    @classmethod
    def by_count(cls, *, head_from: int = 100, torso_from: int = 20) -> Buckets:
        """Set thresholds by counts: head from `head_from` training pairs, torso from `torso_from` [R21 §5.1]."""
        if not head_from > torso_from > 0:
            raise ValueError(
                f"Buckets.by_count: expected head_from > torso_from > 0, received {head_from} and {torso_from}"
            )
        return cls(scheme="count", head_above=head_from - 1, tail_upto=torso_from - 1)

    def assign(self, counts_L: Int64) -> Int8:
        """Compute every label's bucket: int8 [L], 0 head, 1 torso, 2 tail, 3 new (`BUCKET_NAMES`)."""
        buckets = np.full(counts_L.shape, TAIL, dtype=np.int8)
        buckets[counts_L > self.tail_upto] = TORSO
        buckets[counts_L > self.head_above] = HEAD
        buckets[counts_L == 0] = NEW
        return buckets
