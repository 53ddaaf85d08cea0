"""How much an answer's labels are alike, so that shares get intervals that are as wide as they should be.

Legend: `B` queries, `N` answered labels of all queries.

The labels of one answer are no independent draws: somebody who gets one from the tail gets more of them. The variance
of a bucket's share p = Σ X_q / Σ n_q over queries q, each with n_q labels and X_q of them in the bucket, is
Σ (X_q − p·n_q)² / (Σ n_q)² [Cochran 1977, §11]; p(1 − p) divided by it is the number of labels that, drawn alone,
would tell as much [Korn & Graubard 1998].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longtail.bundle import BUCKET_NAMES
from longtail.bundle.arrays import Array, Float64, Int8

BUCKETS = len(BUCKET_NAMES)
PAIRS = BUCKETS * BUCKETS
_FEW = 30
"""Queries below which their variance is anybody's guess."""


def pairs_of(buckets_N: Int8, ends_B: Sequence[int]) -> Float64:
    """Σ X_a·X_b over queries, for each two buckets a and b, float64 [PAIRS]: adds up over batches.

    Args:
        buckets_N: int8 [N].
        ends_B: where in the N labels every query's end, ascending.
    """
    queries = len(ends_B)
    if queries == 1:
        counts = np.bincount(buckets_N, minlength=BUCKETS).astype(np.float64)
        return np.outer(counts, counts).ravel()
    ends = np.asarray(ends_B)
    query_N = np.repeat(np.arange(queries), np.diff(ends, prepend=0))
    counts_B = np.bincount(query_N * BUCKETS + buckets_N, minlength=queries * BUCKETS).reshape(-1, BUCKETS)
    return (counts_B.T @ counts_B).astype(np.float64).ravel()


def telling(exposures: Array, pairs: Array, queries: float) -> list[float]:
    """Labels that would tell as much of each bucket's share, were each drawn alone.

    Never fewer than the queries, nor more than the labels; as many as the queries of a bucket that got nothing or all,
    where the pairs were not counted, or of fewer than 30 queries.

    Args:
        exposures: answered labels by bucket, [BUCKETS].
        pairs: of `pairs_of`, of the same queries, [PAIRS].
        queries: that had an answer.
    """
    labels = float(exposures.sum())
    least = min(float(queries), labels)
    products = np.asarray(pairs, np.float64).reshape(BUCKETS, BUCKETS)
    # Each query has n_q² ≥ n_q: less, and some were answered before pairs were counted.
    if labels == 0 or queries < _FEW or products.sum() < labels:
        return [least] * BUCKETS
    found = []
    for bucket, share in enumerate((exposures / labels).tolist()):
        with_all = products[bucket].sum()
        squares = products[bucket, bucket] - 2 * share * with_all + share * share * products.sum()
        variance = squares / (labels * labels) * queries / (queries - 1)
        alone = share * (1 - share)
        found.append(min(max(alone / variance, least), labels) if alone > 0 and variance > 0 else least)
    return found
