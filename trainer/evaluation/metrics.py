"""Ranking, exposure and bucket metrics from top-k lists [METHODS §7].

Most metrics are a ratio of sums over queries, `Σ numerator / Σ denominator`, so one bootstrap over queries gives their
intervals. Recall of a bucket has an exact binomial interval, because the bucket may have few pairs.

Legend: `N` rows of a task (requests or events), `Q` queries, `K` longest list, `L` labels, `G` resamples.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.bundle import BUCKET_NAMES, Interval
from longtail.bundle.arrays import Bools, Float32, Float64, Int8, Int32, Int64
from longtail.bundle.exposure import coverage, coverage_by_bucket, gini
from longtail.bundle.sets import distinct
from longtail.trainer.metric_registry import Metric, RankedLists, compute_metric

_INTERVAL = (2.5, 97.5)
_FEW = 4
"""Positives a query, in the mean, up to which comparing each with its list is quicker than a search for every entry."""


@dataclass(frozen=True)
class Positives:
    """The labels to find for each query: distinct keys `query · L + label`, int64, sorted.

    Attributes:
        weights: total weight of every key's pairs, float64, for the likelihood, which is a mean over pairs.
    """

    keys: Int64
    weights: Float64
    queries: int
    labels: int

    @classmethod
    def collect(
        cls, query_rows: npt.NDArray[np.integer], label_rows: npt.NDArray[np.integer], *, queries: int, labels: int,
        weights: Float32 | None = None,
    ) -> Positives:  # fmt: skip
        """Build from pairs: query and label rows, int [n], of weight 1 or `weights`, [n]."""
        of_pairs = query_rows.astype(np.int64) * labels + label_rows
        keys = distinct(of_pairs)
        total = np.bincount(np.searchsorted(keys, of_pairs), weights, minlength=len(keys))
        return cls(keys, total.astype(np.float64), queries, labels)

    @property
    def label_rows(self) -> Int64:
        """Return the label of every positive."""
        return self.keys % self.labels

    @property
    def query_rows(self) -> Int64:
        """Return the query of every positive."""
        return self.keys // self.labels

    @property
    def per_query(self) -> Float64:
        """Count the positives of every query, float64 [N]."""
        return np.bincount(self.query_rows, minlength=self.queries).astype(np.float64)

    @property
    def weight_per_query(self) -> Float64:
        """Sum the weights of every query's pairs, float64 [N]."""
        return np.bincount(self.query_rows, self.weights, minlength=self.queries).astype(np.float64)

    def between(self, start: int, end: int) -> Positives:
        """Select the positives of queries start … end − 1."""
        first, last = np.searchsorted(self.keys, [start * self.labels, end * self.labels])
        return Positives(
            self.keys[first:last] - start * self.labels, self.weights[first:last], end - start, self.labels
        )

    def select_labels(self, mask_L: Bools) -> Positives:
        """Return the positives of some labels, bool [L]."""
        selected = mask_L[self.label_rows]
        return Positives(self.keys[selected], self.weights[selected], self.queries, self.labels)

    def select_queries(self, mask_N: Bools) -> Positives:
        """Return the positives of some queries, bool [N], numbered from 0."""
        selected, new_row_N = mask_N[self.query_rows], np.cumsum(mask_N) - 1
        keys = new_row_N[self.query_rows[selected]] * self.labels + self.label_rows[selected]
        return Positives(keys, self.weights[selected], int(mask_N.sum()), self.labels)

    def hits(self, top_NK: Int32) -> Bools:
        """Return which entries of the lists are positives, bool [N, K]; entries of −1 are none."""
        if len(self.keys) > _FEW * self.queries:
            keys_NK = np.arange(self.queries)[:, None] * self.labels + top_NK
            at_NK = np.minimum(np.searchsorted(self.keys, keys_NK), len(self.keys) - 1)
            hits_NK: Bools = (self.keys[at_NK] == keys_NK) & (top_NK >= 0)
            return hits_NK
        query_n, label_n = self.query_rows, self.label_rows.astype(np.int32)
        n, rank_n = np.nonzero(top_NK[query_n] == label_n[:, None])
        hits_NK = np.zeros(top_NK.shape, np.bool_)
        hits_NK[query_n[n], rank_n] = True
        return hits_NK


class Bootstrap:
    """Poisson resamples of queries: each, with all of its rows, counts Poisson(1) times.

    Args:
        queries_N: query of every row, int [N]; None if every row is a query of its own.
    """

    def __init__(
        self, rows: int, *, resamples: int, seed: int, queries_N: npt.NDArray[np.integer] | None = None
    ) -> None:  # fmt: skip
        queries_Q, self._query_N = np.unique(np.arange(rows) if queries_N is None else queries_N, return_inverse=True)
        self._counts_GQ = np.random.default_rng(seed).poisson(1.0, (resamples, len(queries_Q))).astype(np.float32)

    def select_rows(self, mask_N: Bools) -> Bootstrap:
        """Return the resamples of some rows, bool [N]."""
        selected = copy(self)
        selected._query_N = self._query_N[mask_N]
        return selected

    def per_query(self, values_N: Float64) -> Float64:
        """Sum values of rows by query, float64 [Q]."""
        return np.bincount(self._query_N, values_N, minlength=self._counts_GQ.shape[1]).astype(np.float64)

    def interval(self, numerator_N: Float64, denominator_N: Float64) -> Interval:
        """Compute `Σ numerator / Σ denominator` with its 95 % interval; 0 if the denominator is 0."""
        return self.intervals({"": (numerator_N, denominator_N)})[""]

    def intervals(self, ratios: Mapping[str, tuple[Float64, Float64]]) -> dict[str, Interval]:
        """Compute the intervals of several ratios by one product."""
        # Ratios share denominators, and each array is summed once.
        column_of = {id(column_N): column_N for ratio in ratios.values() for column_N in ratio}
        columns_QC = np.stack([*map(self.per_query, column_of.values())], axis=1).astype(np.float32)
        sums_of = dict(zip(column_of, (self._counts_GQ @ columns_QC).T, strict=True))
        intervals = {}
        for name, (numerator_N, denominator_N) in ratios.items():
            total, (above_G, below_G) = float(denominator_N.sum()), (sums_of[id(it)] for it in ratios[name])
            # A resample may hold no query that counts.
            usable_G = below_G > 0
            low, high = 0.0, 0.0
            if total and usable_G.any():
                low, high = np.percentile(above_G[usable_G] / below_G[usable_G], _INTERVAL).tolist()
            intervals[name] = Interval(value=float(numerator_N.sum()) / total if total else 0.0, low=low, high=high)
        return intervals


def interval_of_share(hits_Q: Float64, pairs_Q: Float64) -> Interval:
    """Compute the share of found pairs, with its binomial 95 % interval.

    The interval is exact if pairs are independent. Otherwise the number of pairs is reduced by the share's variance
    over queries [Korn and Graubard 1998], or to one per query if no pair or every pair is found.

    Args:
        hits_Q, pairs_Q: found pairs and all pairs of every query, float64 [Q].
    """
    share, low, high = _share_bounds(hits_Q, pairs_Q)
    return Interval(value=share, low=low, high=high)


def _share_bounds(hits_Q: Float64, pairs_Q: Float64) -> tuple[float, float, float]:
    """Compute value and bounds of `interval_of_share`."""
    from scipy.special import betaincinv  # type: ignore[import-untyped]  # a recipe is checked without it

    total = float(pairs_Q.sum())
    if total == 0:
        return 0.0, 0.0, 0.0
    share, queries = float(hits_Q.sum()) / total, int(np.count_nonzero(pairs_Q))
    variance = float(((hits_Q - share * pairs_Q) ** 2).sum()) / total**2
    binomial = share * (1 - share) / total
    effective = total / max(variance / binomial, 1) if 0 < share < 1 and queries > 1 else queries
    hits = share * effective
    low = betaincinv(hits, effective - hits + 1, _INTERVAL[0] / 100) if share > 0 else 0.0
    high = betaincinv(hits + 1, effective - hits, _INTERVAL[1] / 100) if share < 1 else 1.0
    return share, float(low), float(high)


def interval_of_difference(ours_Q: Float64, theirs_Q: Float64, pairs_Q: Float64) -> Interval:
    """Compute the difference of two shares of hits, with a 95 % interval.

    The intervals are joined by the shares' correlation over queries [Newcombe 1998, method 10].

    Args:
        ours_Q, theirs_Q, pairs_Q: pairs found by either model, and all pairs, of every query, float64 [Q].
    """
    (ours, *ours_ends), (theirs, *theirs_ends) = (_share_bounds(hits_Q, pairs_Q) for hits_Q in (ours_Q, theirs_Q))
    ours_Q, theirs_Q = ours_Q - ours * pairs_Q, theirs_Q - theirs * pairs_Q
    spread = float(np.sqrt((ours_Q @ ours_Q) * (theirs_Q @ theirs_Q)))
    correlation = float(np.clip(ours_Q @ theirs_Q / spread, -1, 1)) if spread else 0.0

    def joined(distance: float, second_distance: float) -> float:
        return float(np.sqrt(max(distance**2 - 2 * correlation * distance * second_distance + second_distance**2, 0.0)))

    low = ours - theirs - joined(ours - ours_ends[0], theirs_ends[1] - theirs)
    high = ours - theirs + joined(ours_ends[1] - ours, theirs - theirs_ends[0])
    return Interval(value=ours - theirs, low=low, high=high)


class LabelFacts(NamedTuple):
    """Facts about labels for metrics: training pairs, buckets, 1 / p_y for `psp` and `psndcg`."""

    counts_L: Int64
    buckets_L: Int8
    inverse_propensity_L: Float64 | None = None


def compute_metrics(
    top_NK: Int32, positives: Positives, facts: LabelFacts, *, ks: list[int], bootstrap: Bootstrap,
    custom: Mapping[str, Metric] = MappingProxyType({}),
) -> dict[str, Interval]:  # fmt: skip
    """Compute every metric at every k, those of `compute_ratios` with intervals.

    `balanced_error@K`: mean over tested labels of the share of their pairs missed [R21 §5.1];
    `balanced_error@K/BUCKET`: mean over tested labels in the bucket, 0 if none is. `coverage@K[/BUCKET]`: share of
    labels in any list. `gini@K`: Gini coefficient of the labels' exposures, 0 if all are equal, 1 if all fall on one.

    Args:
        top_NK: label rows, best first; −1 after the end of a shorter list.
        custom: registered metrics by name, with bound parameters.
    """
    ratios = compute_ratios(top_NK, positives, facts, ks=ks, custom=custom)
    # A bucket may have few pairs, or no hit, for which resampling has no spread.
    bucket_recalls = {name for name in ratios if name.startswith("recall@") and "/" in name}
    intervals = bootstrap.intervals({name: ratio for name, ratio in ratios.items() if name not in bucket_recalls})
    metrics = {
        name: interval_of_share(*map(bootstrap.per_query, ratio)) if name in bucket_recalls else intervals[name]
        for name, ratio in ratios.items()
    }
    buckets_L = facts.buckets_L
    hits_NK, listed_NK = positives.hits(top_NK), top_NK >= 0
    tests_L = np.bincount(positives.label_rows, minlength=positives.labels)
    tested = tests_L > 0
    for k in ks:
        listed_L = np.bincount(top_NK[:, :k][listed_NK[:, :k]], minlength=positives.labels)
        hits_L = np.bincount(top_NK[:, :k][hits_NK[:, :k]], minlength=positives.labels)
        recall_l = hits_L[tested] / tests_L[tested]
        metrics[f"balanced_error@{k}"] = Interval(value=float(1 - np.mean(recall_l)))
        metrics[f"gini@{k}"] = Interval(value=gini(listed_L) or 0.0)
        metrics[f"coverage@{k}"] = Interval(value=coverage(listed_L))
        coverages = coverage_by_bucket(listed_L, buckets_L, np.bincount(buckets_L, minlength=len(BUCKET_NAMES)))
        for bucket, (name, share) in enumerate(zip(BUCKET_NAMES, coverages, strict=True)):
            metrics[f"coverage@{k}/{name}"] = Interval(value=share)
            bucket_recall_l = recall_l[buckets_L[tested] == bucket]
            error = float(1 - np.mean(bucket_recall_l)) if len(bucket_recall_l) else 0.0
            metrics[f"balanced_error@{k}/{name}"] = Interval(value=error)
    return metrics


def compute_ratios(
    top_NK: Int32, positives: Positives, facts: LabelFacts, *, ks: list[int],
    custom: Mapping[str, Metric] = MappingProxyType({}),
) -> dict[str, tuple[Float64, Float64]]:  # fmt: skip
    """Compute numerators and denominators of metrics, float64 [N] each.

    `recall@K`, `precision@K`, `ndcg@K`, `mrr@K`, `hit_rate@K`: means over queries. `recall@K/BUCKET`: over the pairs
    whose label is in the bucket. `exposure@K/BUCKET`: share of list entries. `popularity@K`: mean training count of
    list entries. `psp@K`, `psndcg@K`: see `_propensity_scored`.
    """
    counts_L, buckets_L, inverse_propensity_L = facts
    hits_NK = positives.hits(top_NK)
    listed_NK = top_NK >= 0
    positives_N = positives.per_query
    gains_K = 1 / np.log2(np.arange(top_NK.shape[1]) + 2)
    ideal_K = np.concatenate([[0], np.cumsum(gains_K)])
    first_N = np.where(hits_NK.any(axis=1), hits_NK.argmax(axis=1), top_NK.shape[1])
    top_bucket_NK = np.where(listed_NK, buckets_L[top_NK], -1)
    positive_bucket = buckets_L[positives.label_rows]
    has_positives_N = (positives_N > 0).astype(np.float64)
    ratios: dict[str, tuple[Float64, Float64]] = {}
    if inverse_propensity_L is not None:
        ratios |= _propensity_scored(top_NK, hits_NK, positives, inverse_propensity_L, ks=ks)
    for k in ks:
        hit_Nk, listed_Nk, bucket_Nk = hits_NK[:, :k], listed_NK[:, :k], top_bucket_NK[:, :k]
        hits_N, entries_N = (of.sum(axis=1).astype(np.float64) for of in (hit_Nk, listed_Nk))
        ratios |= {
            f"recall@{k}": (hits_N / np.maximum(positives_N, 1), has_positives_N),
            f"precision@{k}": (hits_N / k, has_positives_N),
            f"ndcg@{k}": (
                hit_Nk @ gains_K[:k] / np.maximum(ideal_K[np.minimum(positives_N.astype(int), k)], 1e-12),
                has_positives_N,
            ),
            f"mrr@{k}": (np.where(first_N < k, 1 / (first_N + 1.0), 0.0), has_positives_N),
            f"hit_rate@{k}": ((hits_N > 0).astype(np.float64), has_positives_N),
            f"popularity@{k}": (
                np.where(listed_Nk, counts_L[top_NK[:, :k]], 0).sum(axis=1).astype(np.float64),
                entries_N,
            ),
        }
        for bucket, name in enumerate(BUCKET_NAMES):
            in_bucket_Nk, bucket_rows = bucket_Nk == bucket, positives.query_rows[positive_bucket == bucket]
            ratios[f"recall@{k}/{name}"] = (
                (hit_Nk & in_bucket_Nk).sum(axis=1).astype(np.float64),
                np.bincount(bucket_rows, minlength=positives.queries).astype(np.float64),
            )
            ratios[f"exposure@{k}/{name}"] = (in_bucket_Nk.sum(axis=1).astype(np.float64), entries_N)
        lists = RankedLists(top_NK[:, :k], hit_Nk, positives_N, counts_L, buckets_L)
        ratios |= {f"{name}@{k}": compute_metric(name, metric, lists) for name, metric in custom.items()}
    return ratios


def inverse_propensity(counts_L: Int64, *, queries: int, a: float, b: float) -> Float64:
    """Compute 1/p_y = 1 + C(N_y + b)^−a, C = (ln N − 1)(b + 1)^a, float64 [L] [Jain et al. 2016, §5].

    Args:
        queries: number N of training queries; below e, where C would be negative, C is 0.
        a, b: 0.55 and 1.5; Amazon 0.6 and 2.6; Wikipedia 0.5 and 0.4.
    """
    scale = max(float(np.log(queries)) - 1, 0.0) * (b + 1) ** a
    inverse_L: Float64 = 1 + scale / (counts_L + b) ** a
    return inverse_L


def _propensity_scored(
    top_NK: Int32, hits_NK: Bools, positives: Positives, inverse_propensity_L: Float64, *, ks: list[int]
) -> dict[str, tuple[Float64, Float64]]:
    """Compute `psp@K` and `psndcg@K` like `xclib`."""
    weights = inverse_propensity_L[positives.label_rows]
    best_first = np.lexsort((-weights, positives.query_rows))
    owners = positives.query_rows[best_first]
    ranks = np.arange(len(owners)) - np.searchsorted(owners, owners)
    inside = ranks < top_NK.shape[1]
    best_NK = np.zeros(top_NK.shape)
    best_NK[owners[inside], ranks[inside]] = weights[best_first][inside]
    reached_NK = np.where(hits_NK, inverse_propensity_L[top_NK], 0.0)
    gains_K = 1 / np.log2(np.arange(top_NK.shape[1]) + 2)
    ideal_NK = np.cumsum(np.where(best_NK > 0, gains_K, 0.0), axis=1)
    ratios = {}
    for k in ks:
        ideal_N = np.maximum(ideal_NK[:, k - 1], 1e-12)
        ratios[f"psp@{k}"] = (reached_NK[:, :k].sum(axis=1), best_NK[:, :k].sum(axis=1))
        ratios[f"psndcg@{k}"] = (
            reached_NK[:, :k] @ gains_K[:k] / ideal_N,
            best_NK[:, :k] @ gains_K[:k] / ideal_N,
        )
    return ratios
