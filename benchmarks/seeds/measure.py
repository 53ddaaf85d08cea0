"""Metrics of a model on held-out pairs, and contributions of every query, for paired intervals.

Legend: `N` queries, `K` list length, `L` labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.bundle import BUCKET_NAMES, Augmentation
from longtail.bundle.arrays import Float32, Float64, Int8, Int32
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.metrics import Bootstrap, Positives, compute_metrics
from longtail.trainer.evaluation.ranking import EmbedQueries, Likelihood, RankedModel, rank


@dataclass(frozen=True)
class HeldOut:
    """Hold held-out pairs by query row; lists exclude the labels of `excluded`, if any."""

    rows_N: Int32
    positives: Positives
    excluded: Past | None

    @classmethod
    def collect(
        cls, pairs: Pairs, earlier: Pairs, *, labels: int, exclude_seen: bool, most: int | None = None
    ) -> HeldOut:
        """Group pairs by query, for at most `most` queries, drawn by seed 0."""
        queries = int(max(pairs.queries.max(initial=-1), earlier.queries.max(initial=-1))) + 1
        excluded = Past.fixed(earlier, queries=queries) if exclude_seen else None
        seen_n = np.zeros(len(pairs), np.bool_) if excluded is None else excluded.holds(pairs.queries, pairs.labels)
        keys = np.unique((pairs.queries.astype(np.int64) * labels + pairs.labels)[~seen_n])
        rows_N = np.unique(keys // labels).astype(np.int32)
        if most is not None and len(rows_N) > most:
            rows_N = np.sort(np.random.default_rng(0).choice(rows_N, most, replace=False))
            keys = keys[np.isin(keys // labels, rows_N)]
        rows = np.searchsorted(rows_N, keys // labels)
        return cls(rows_N, Positives.collect(rows, keys % labels, queries=len(rows_N), labels=labels), excluded)


@dataclass(frozen=True)
class Measured:
    """Hold metrics at one λ, and contributions per query, float64 [N], whose mean is the metric."""

    metrics: dict[str, float]
    contributions: dict[str, Float64]


def measure(
    held_out: HeldOut,
    embed_queries: EmbedQueries,
    label_side: LabelSide,
    config: EvaluationConfig,
    grid: tuple[float, ...],
) -> dict[float, Measured]:
    """Measure every metric at every λ, over the whole catalogue."""
    positives, labels = held_out.positives, len(label_side.counts)
    ks = [k for k in config.ks if k <= labels]
    tops, likelihoods = rank(
        held_out.rows_N, RankedModel(embed_queries, label_side), held_out.excluded,
        [Setting(at) for at in grid], k=max(ks), likelihood=Likelihood(positives) if config.log_likelihood else None,
    )  # fmt: skip
    none = Bootstrap(len(held_out.rows_N), resamples=1, seed=0)
    measured = {}
    for bias_removal, top_NK, log_p_N in zip(grid, tops, likelihoods, strict=True):
        metrics = compute_metrics(top_NK, positives, label_side.facts(config), ks=ks, bootstrap=none)
        shares = contributions(top_NK, positives, ks=ks, buckets_L=label_side.buckets)
        if log_p_N is not None:
            shares["log_likelihood"] = log_p_N * len(log_p_N) / positives.weight_per_query.sum()
        values = {name: interval.value for name, interval in metrics.items()}
        values |= {name: float(share_N.mean()) for name, share_N in shares.items() if len(share_N)}
        measured[bias_removal] = Measured(values, shares)
    return measured


def contributions(top_NK: Int32, positives: Positives, *, ks: list[int], buckets_L: Int8) -> dict[str, Float64]:
    """Compute the contribution of every query to each metric, float64 [N] by name; the mean is the metric.

    `pair_recall@K` is the share of found pairs, called Full in [R21], `recall@K/BUCKET` that of the bucket's pairs.
    `balanced_error@K[/BUCKET]` is the share of missed pairs per label, averaged over the tested labels (of the bucket).
    """
    hits_NK, wanted_N = positives.hits(top_NK), positives.per_query
    queries, bucket_of_pair = positives.queries, buckets_L[positives.label_rows]
    tests_L = np.bincount(positives.label_rows, minlength=positives.labels)
    shares: dict[str, Float64] = {}
    for k in ks:
        rows, ranks = np.nonzero(hits_NK[:, :k])
        labels = top_NK[rows, ranks]
        hits_N = np.bincount(rows, minlength=queries)
        shares[f"recall@{k}"] = hits_N / np.maximum(wanted_N, 1)
        shares[f"precision@{k}"] = hits_N / k
        shares[f"pair_recall@{k}"] = hits_N * queries / len(positives.keys)
        for bucket, name in [(None, ""), *((bucket, f"/{name}") for bucket, name in enumerate(BUCKET_NAMES))]:
            mine = np.ones(len(labels), bool) if bucket is None else buckets_L[labels] == bucket
            pairs = np.ones(len(bucket_of_pair), bool) if bucket is None else bucket_of_pair == bucket
            if name and pairs.any():
                shares[f"recall@{k}{name}"] = np.bincount(rows[mine], minlength=queries) * queries / pairs.sum()
            weight = queries / max(int(np.count_nonzero(np.bincount(positives.label_rows[pairs]))), 1)
            missed_N = np.bincount(positives.query_rows[pairs], 1 / tests_L[positives.label_rows[pairs]], queries)
            missed_N = missed_N - np.bincount(rows[mine], 1 / tests_L[labels[mine]], queries)
            if pairs.any():
                shares[f"balanced_error@{k}{name}"] = np.asarray(missed_N * weight, np.float64)
    return shares


def popularity_side(label_side: LabelSide, log_pi_L: Float32) -> LabelSide:
    """Build a label side that scores log π for queries of zeros at λ = 1: the popularity row."""
    return LabelSide(
        np.zeros((len(log_pi_L), 1), np.float32), log_pi_L, None, label_side.counts, label_side.training_queries,
        label_side.buckets, Augmentation(1.0, 1.0),
    )  # fmt: skip
